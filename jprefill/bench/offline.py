"""`jprefill bench offline`: tokens per second of single prompts, ours and a peer's, measured in turns.

Both sides read the same windows of real prose and give the log-probabilities of two labels after the last
token. The sides never run at the same time. Ours is timed from `submit` to the answer, the peer's around its
forward pass alone, so what little the comparison leaves out is in the peer's favour.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import numpy as np

import jprefill
from jprefill.bench.local import (
    DEMO_MODEL,
    demo_label_ids,
    load_checkpoint,
    load_tokenizer,
    num_threads,
    positive,
    positive_list,
    running_engine,
)
from jprefill.bench.parity import Scorer
from jprefill.bench.peer import DEFAULT_PYTHON, Peer, hf_command
from jprefill.bench.prose import prose_windows
from jprefill.config import DType, EngineConfig, Layout, Quantization
from jprefill.errors import ConfigError
from jprefill.types import Item, ScoreRequest

DEMO_PEER_MODEL = Path(".cache/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
_PAUSE_S = 0.1  # worker threads of the side that just ran spin for a moment before they sleep


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt on one side."""

    seconds: float
    label_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """One prompt length, as the report and the JSON file show it.

    Attributes:
      jprefill_s: every measured time, in seconds; the speeds are tokens over the median.
      jprefill_spread: (slowest - fastest) / median.
      ratio: our speed over the peer's.
      max_label_delta: largest |difference| of a label's log-probability between the sides: a check that both
        computed the same thing, not a parity test.
    """

    tokens: int
    jprefill_tokens_per_s: float
    jprefill_spread: float
    jprefill_s: tuple[float, ...]
    peer_tokens_per_s: float | None = None
    peer_spread: float | None = None
    peer_s: tuple[float, ...] | None = None
    ratio: float | None = None
    max_label_delta: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `jprefill bench offline`."""
    parser.add_argument("--model", default=DEMO_MODEL, help=f"default: {DEMO_MODEL}")
    parser.add_argument("--lengths", type=positive_list, default=(512, 2048, 8000), metavar="N,N,...")
    parser.add_argument("--repeat", type=positive, default=5, metavar="N", help="timed runs a length (default: 5)")
    parser.add_argument("--dtype", choices=get_args(DType), default=EngineConfig.dtype)
    parser.add_argument("--quantization", choices=get_args(Quantization), help="of the layers' matrices, while loading")
    parser.add_argument("--layout", choices=get_args(Layout), default=EngineConfig.layout)
    parser.add_argument("--chunk-size", type=positive, default=EngineConfig.chunk_size, metavar="N")
    parser.add_argument("--attention", metavar="NAME", help="attention implementation (default: by platform)")
    parser.add_argument("--peer", choices=("hf",), help="measure Hugging Face transformers in the same run")
    parser.add_argument("--peer-python", type=Path, default=DEFAULT_PYTHON, metavar="PATH")
    parser.add_argument("--peer-model", type=Path, metavar="PATH", help="GGUF file or folder (default: --model)")
    parser.add_argument(
        "--min-ratio", type=float, metavar="X", help="exit 1 where our speed is below X times the peer's"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 1 if `--min-ratio` is missed, else 0.

    Raises:
      ConfigError: a flag cannot be used.
      CheckpointError: the model cannot be used.
      EngineError: the peer failed.
    """
    if args.min_ratio is not None and not args.peer:
        raise ConfigError("--min-ratio needs --peer: it is a ratio of two speeds")
    command = _peer_command(args)
    checkpoint = load_checkpoint(args.model, args.dtype, args.quantization)
    tokenizer = load_tokenizer(checkpoint)
    windows = prose_windows(tokenizer, args.lengths, args.repeat + 1)
    label_ids = demo_label_ids(tokenizer)
    with ExitStack() as stack:
        engine = stack.enter_context(running_engine(checkpoint, _engine_config(args)))
        peer = stack.enter_context(Peer(command)) if command else None
        setting = _setting(args, peer)
        print("\n".join(f"{key}: {value}" for key, value in setting.items()))
        print(_HEADER, flush=True)
        records = []
        for length in args.lengths:
            records.append(measure(engine, peer, windows[length], label_ids))
            print(row(records[-1]), flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps([asdict(r) | setting for r in records], indent=1) + "\n", encoding="utf-8")
    return _exit_status(records, args.min_ratio)


def _peer_command(args: argparse.Namespace) -> list[str] | None:
    """Checked before anything slow starts."""
    if not args.peer:
        return None
    model = args.peer_model or (DEMO_PEER_MODEL if args.model == DEMO_MODEL else Path(args.model))
    if not args.peer_model and model.is_dir() and not (model / "config.json").is_file():
        raise ConfigError(f"--model {args.model} is a checkpoint of ours: name a GGUF file or folder with --peer-model")
    return hf_command(args.peer_python, model, args.dtype, num_threads())


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        dtype=args.dtype,
        quantization=args.quantization,
        layout=args.layout,
        chunk_size=args.chunk_size,
        attention=args.attention,
        max_model_len=max(args.lengths),
    )


def _setting(args: argparse.Namespace, peer: Peer | None) -> dict[str, Any]:
    """What a reader needs to repeat the run; the same for all its records."""
    versions = {"jprefill": jprefill.__version__} | {name: version(name) for name in ("jax", "jaxlib")}
    return {
        "model": str(args.model),
        "dtype": args.dtype,
        "quantization": args.quantization,
        "layout": args.layout,
        "chunk_size": args.chunk_size,
        "threads": num_threads(),
        "versions": versions | {"python": sys.version.split()[0]},
        "peer": peer.description if peer else None,
        "command": " ".join(["jprefill", *sys.argv[1:]]),
    }


def measure(engine: Scorer, peer: Peer | None, windows: Sequence[Sequence[int]], label_ids: Sequence[int]) -> Record:
    """One length: the first window warms both sides up, the others are timed, the sides in turns."""
    ours: list[Run] = []
    theirs: list[Run] = []
    for window in windows:
        ours.append(_run_ours(engine, window, label_ids))
        time.sleep(_PAUSE_S)
        if peer:
            answer = peer.ask(window, label_ids)
            theirs.append(Run(answer.seconds, answer.label_logprobs))
            time.sleep(_PAUSE_S)
    return _record(len(windows[0]), ours[1:], theirs[1:])


def _run_ours(engine: Scorer, token_ids: Sequence[int], label_ids: Sequence[int]) -> Run:
    item = Item(
        token_ids=np.asarray(token_ids, np.int32),
        rows=np.asarray([len(token_ids) - 1], np.int32),
        targets=np.asarray([label_ids], np.int32),
    )
    request = ScoreRequest(prefix=np.zeros(0, np.int32), items=(item,))
    started_s = time.perf_counter()
    result = engine.submit(request).result()
    seconds = time.perf_counter() - started_s
    return Run(seconds, tuple(result.items[0].logprobs[0].tolist()))


def _record(num_tokens: int, ours: Sequence[Run], theirs: Sequence[Run]) -> Record:
    our_s, their_s = (tuple(run.seconds for run in runs) for runs in (ours, theirs))
    our_speed = num_tokens / statistics.median(our_s)
    if not theirs:
        return Record(num_tokens, our_speed, _spread(our_s), our_s)
    their_speed = num_tokens / statistics.median(their_s)
    deltas = [
        abs(a - b)
        for our, their in zip(ours, theirs, strict=True)
        for a, b in zip(our.label_logprobs, their.label_logprobs, strict=True)
    ]
    return Record(
        tokens=num_tokens,
        jprefill_tokens_per_s=our_speed,
        jprefill_spread=_spread(our_s),
        jprefill_s=our_s,
        peer_tokens_per_s=their_speed,
        peer_spread=_spread(their_s),
        peer_s=their_s,
        ratio=our_speed / their_speed,
        max_label_delta=max(deltas),
    )


def _spread(seconds: Sequence[float]) -> float:
    return (max(seconds) - min(seconds)) / statistics.median(seconds)


_HEADER = " tokens  jprefill tok/s  spread  peer tok/s  spread   ratio  max|Δ label|"


def row(record: Record) -> str:
    """One line of the table."""
    text = f"{record.tokens:7,d}  {record.jprefill_tokens_per_s:14,.0f} {record.jprefill_spread:7.1%}"
    if record.peer_tokens_per_s is None:
        return text
    return (
        f"{text}  {record.peer_tokens_per_s:10,.0f} {record.peer_spread:7.1%}  {record.ratio:5.2f}x"
        f"  {record.max_label_delta:12.1e}"
    )


def _exit_status(records: Sequence[Record], min_ratio: float | None) -> int:
    """0, or 1 with a line about every length that misses `min_ratio`."""
    if min_ratio is None:
        return 0
    missed = [record for record in records if record.ratio is None or record.ratio < min_ratio]
    for record in missed:
        print(f"{record.tokens} tokens: ratio {record.ratio:.2f} is below {min_ratio:g}")
    return 1 if missed else 0
