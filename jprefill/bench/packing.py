"""`jprefill bench packing`: short prompts together against one at a time, over lengths.

one at a time | prompt 1 ... | prompt 2 ... | prompt 3 ... |    a caller that waits for each answer
together      | prompts 1, 2, 3 ... |                           all submitted at once

One engine without a prefix store runs both, in turns, over the same prompts: what differs is how many are there.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jprefill.bench.local import (
    DEMO_MODEL,
    demo_label_ids,
    load_checkpoint,
    load_tokenizer,
    positive,
    positive_list,
    running_engine,
)
from jprefill.bench.prose import prose_windows
from jprefill.config import EngineConfig
from jprefill.flags import add_flags, from_args
from jprefill.types import Item, ScoreRequest

if TYPE_CHECKING:
    from jprefill.engine import Engine

_LENGTHS = (16, 64, 128, 200, 256, 257, 384, 512, 1_000, 2_048)
_ROUND_TOKENS = 4_096  # of prompts in one round; at least `_MIN_PROMPTS`
_MIN_PROMPTS = 4
_ROOM_TOKENS = 2_048  # that a pass holds at least
_MAX_PROMPTS = 64


@dataclass(frozen=True, slots=True)
class Record:
    """One length; medians over the rounds.

    Attributes:
      num_passes: that the prompts took together.
      ratio: of prompts a second, together over one at a time; `lowest` and `highest` of any round.
    """

    length: int
    num_prompts: int
    num_passes: int
    alone_per_s: float
    together_per_s: float
    ratio: float
    lowest: float
    highest: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `jprefill bench packing`."""
    parser.add_argument("--model", default=DEMO_MODEL, help=f"default: {DEMO_MODEL}")
    parser.add_argument("--lengths", type=positive_list, default=_LENGTHS, metavar="N,...", help="tokens of a prompt")
    parser.add_argument("--repeat", type=positive, default=5, metavar="N", help="rounds (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
    add_flags(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Measures and prints.

    Raises:
      ConfigError: a flag cannot be used.
      CheckpointError: the model cannot be used.
    """
    config = from_args(args, EngineConfig)
    checkpoint = load_checkpoint(args.model, config.dtype, config.quantization)
    tokenizer = load_tokenizer(checkpoint)
    windows, labels = prose_windows(tokenizer, args.lengths, _MAX_PROMPTS), demo_label_ids(tokenizer)
    command = " ".join(["jprefill", *sys.argv[1:]])
    print(f"command: {command}\ntokens  prompts  passes  alone/s  together/s  ratio  (lowest to highest)", flush=True)
    records = []
    longest = max(args.lengths)
    config = replace(config, kv_cache_memory_bytes=0, max_model_len=config.max_model_len or max(longest, _ROOM_TOKENS))
    with running_engine(checkpoint, config) as engine:
        for length in args.lengths:
            count = min(_MAX_PROMPTS, max(_MIN_PROMPTS, _ROUND_TOKENS // length))
            record = measure(engine, [_request(ids, labels) for ids in windows[length][:count]], args.repeat)
            records.append(record)
            print(
                f"{record.length:6} {record.num_prompts:8} {record.num_passes:7} {record.alone_per_s:8.2f}"
                f" {record.together_per_s:11.2f} {record.ratio:5.2f}x  ({record.lowest:.2f} to {record.highest:.2f})",
                flush=True,
            )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        lines = [asdict(record) | {"command": command} for record in records]
        args.json.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(engine: "Engine", requests: Sequence[ScoreRequest], num_rounds: int) -> Record:
    """Both ways in turns, after a round of each that does not count."""
    rounds = [(_alone_s(engine, requests), _together_s(engine, requests)) for _ in range(1 + num_rounds)][1:]
    num_before = engine.stats().num_batches
    _together_s(engine, requests)
    ratios = [alone_s / together_s for alone_s, together_s in rounds]
    alone_s, together_s = (statistics.median(seconds) for seconds in zip(*rounds, strict=True))
    return Record(
        length=requests[0].num_tokens,
        num_prompts=len(requests),
        num_passes=engine.stats().num_batches - num_before,
        alone_per_s=len(requests) / alone_s,
        together_per_s=len(requests) / together_s,
        ratio=statistics.median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
    )


def _alone_s(engine: "Engine", requests: Sequence[ScoreRequest]) -> float:
    start_s = time.perf_counter()
    for request in requests:
        engine.submit(request).result()
    return time.perf_counter() - start_s


def _together_s(engine: "Engine", requests: Sequence[ScoreRequest]) -> float:
    start_s = time.perf_counter()
    for future in [engine.submit(request) for request in requests]:
        future.result()
    return time.perf_counter() - start_s


def _request(token_ids: Sequence[int], label_ids: Sequence[int]) -> ScoreRequest:
    rows, targets = np.array([len(token_ids) - 1], np.int32), np.array([label_ids], np.int32)
    return ScoreRequest(np.zeros(0, np.int32), (Item(np.asarray(token_ids, np.int32), rows, targets),))
