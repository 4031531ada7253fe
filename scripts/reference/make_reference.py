"""Writes reference files for `jprefill compare` with PyTorch and transformers, float32 on the CPU.

    python make_reference.py OUT --gguf SmolLM2-135M-Instruct.Q4_1.gguf

OUT/smollm2.json: real prompts, tokenised and scored by transformers from the GGUF file itself.
OUT/NAME.json and OUT/NAME/: small random models with their prompts. The format is described in
`jprefill/bench/reference_format.py`. Needs `requirements.txt` beside this file, and nothing of jprefill.
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf_model import load_model, load_tokenizer
from random_models import write_random_models
from scoring import score, write_reference
from texts import Text, prose, prose_texts, short_texts
from transformers import PreTrainedTokenizerBase

MAX_MODEL_LEN = 8192
NUM_LONG, NUM_MEDIUM = 4, 12
LONG_TOKENS, MEDIUM_TOKENS = 8000, 1950
QUESTION_TOKENS = 100  # the longest chat template and question around a window of prose
PROMPTS_FILE = Path(__file__).with_name("prompts.jsonl")


def main() -> int:
    """Makes every file and returns the exit status."""
    args = _parse_arguments()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    for line in write_random_models(args.out, args.quick):
        print(line, flush=True)
    if args.gguf:
        _write_real_model(args)
    print(f"reference written to {args.out} in {time.monotonic() - started:.0f} s", flush=True)
    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the reference files")
    parser.add_argument("--gguf", type=Path, help="real model; without it only the random models are written")
    parser.add_argument("--num-prompts", type=int, default=220, help="real prompts, at least 100 (default: 220)")
    parser.add_argument("--quick", action="store_true", help="24 real prompts and no long ones, for a first look")
    parser.add_argument("--threads", type=int, help="PyTorch threads (default: its own choice)")
    args = parser.parse_args()
    if args.gguf and not args.gguf.is_file():
        parser.error(f"--gguf {args.gguf}: no such file")
    if args.num_prompts < 100:
        parser.error(f"--num-prompts {args.num_prompts}: must be at least 100; --quick makes fewer")
    return args


def _write_real_model(args: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(args.gguf)
    model = load_model(args.gguf, torch.float32)
    prompts = []
    started = time.monotonic()
    texts = list(_texts(tokenizer, args.num_prompts, args.quick))
    for number, text in enumerate(texts, start=1):
        prompts.append(_score_text(model, tokenizer, text))
        if number % 20 == 0 or number == len(texts):
            num_tokens = sum(len(prompt["token_ids"]) for prompt in prompts)
            seconds = time.monotonic() - started
            print(f"smollm2: {number} of {len(texts)} prompts, {num_tokens} tokens, {seconds:.0f} s", flush=True)
    model_path = os.path.relpath(args.gguf, args.out)
    write_reference(args.out / "smollm2.json", "smollm2", model_path, MAX_MODEL_LEN, prompts)


def _texts(tokenizer: PreTrainedTokenizerBase, num_prompts: int, is_quick: bool) -> Iterator[Text]:
    """Short and long prompts mixed, in an order that never changes."""
    short = short_texts(PROMPTS_FILE)
    if is_quick:
        short, lengths = short[::5], _spaced_lengths(24 - len(short[::5]), 100, 600)
    else:
        num_spaced = num_prompts - len(short) - NUM_LONG - NUM_MEDIUM
        lengths = _spaced_lengths(num_spaced, 100, 1000)
        lengths += [MEDIUM_TOKENS + 10 * number for number in range(NUM_MEDIUM)]
        lengths += [LONG_TOKENS + 20 * number for number in range(NUM_LONG)]
    random.Random(0).shuffle(lengths)
    words = _words(tokenizer)
    texts = short + list(prose_texts(words, [length - QUESTION_TOKENS // 2 for length in lengths]))
    random.Random(1).shuffle(texts)
    yield from texts


def _spaced_lengths(count: int, low: int, high: int) -> list[int]:
    """`count` lengths from `low` to `high`, closer together at the short end: long prompts take the time."""
    parts = [number / max(1, count - 1) for number in range(count)]
    return [round(low * (high / low) ** part**1.5) for part in parts]


def _words(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The prose cut at its token boundaries, so that a window of n pieces has close to n tokens."""
    text = prose()
    offsets = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).offsets
    starts = [start for start, _ in offsets] + [len(text)]
    return [text[start:end] for start, end in pairwise(starts)]


def _score_text(model: Any, tokenizer: PreTrainedTokenizerBase, text: Text) -> dict[str, Any]:
    prompt = text.user
    if text.is_chat:
        turns = [{"role": "user", "content": text.user}]
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    token_ids = _encode(tokenizer, prompt)
    continuation = _encode(tokenizer, text.continuation) if text.continuation else []
    if len(token_ids) + len(continuation) > MAX_MODEL_LEN:
        sys.exit(f"{text.name}: {len(token_ids)} tokens do not fit {MAX_MODEL_LEN}; lower LONG_TOKENS")
    labels = [_label_id(tokenizer, label) for label in text.labels]
    return {"name": text.name, "text": prompt, **score(model, token_ids, labels, continuation)}


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _label_id(tokenizer: PreTrainedTokenizerBase, label: str) -> int:
    token_ids = _encode(tokenizer, label)
    if len(token_ids) != 1:
        sys.exit(f"label {label!r} is {len(token_ids)} tokens; a label must be one")
    return token_ids[0]


if __name__ == "__main__":
    sys.exit(main())
