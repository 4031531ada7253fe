"""Hugging Face transformers as a child process of `jprefill bench offline --peer hf`.

One JSON object a line. First it describes itself: {"versions": {...}, "threads": 2, "dtype": "bfloat16"}.
Then it gives {"seconds": 1.2, "label_logprobs": [...]} for each {"token_ids": [...], "label_ids": [...]}.
Only the forward pass is timed. It runs as fast as transformers can on a CPU: dense weights, SDPA, no KV cache
kept, the LM head on the last token alone. Needs `requirements.txt` beside this file, and nothing of jprefill.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch
import transformers
from gguf_model import load_model
from transformers import PreTrainedModel


def main() -> int:
    """Answers until stdin ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="a GGUF file or a Hugging Face directory")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), default="bfloat16")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    replies = _claim_stdout()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    model = load_model(args.model, getattr(torch, args.dtype))
    _say(replies, _description(model, args))
    for line in sys.stdin:
        question = json.loads(line)
        _say(replies, _answer(model, question["token_ids"], question["label_ids"]))
    return 0


def _claim_stdout() -> TextIO:
    """Keeps stdout for the protocol: whatever a library prints goes to stderr."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _say(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def _description(model: PreTrainedModel, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "threads": torch.get_num_threads(),
        "dtype": args.dtype,
        "attention": model.config._attn_implementation,
    }


@torch.inference_mode()
def _answer(model: PreTrainedModel, token_ids: list[int], label_ids: list[int]) -> dict[str, Any]:
    ids = torch.tensor([token_ids])
    started = time.perf_counter()
    logits = model(ids, use_cache=False, logits_to_keep=1).logits[0, -1]
    logprobs = torch.log_softmax(logits.float(), dim=-1)[label_ids].tolist()
    return {"seconds": time.perf_counter() - started, "label_logprobs": logprobs}


if __name__ == "__main__":
    sys.exit(main())
