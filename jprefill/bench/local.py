"""Our own side of a comparison or benchmark: weights, tokenizer, running engine. JAX loads on first use."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from jprefill.config import DType, EngineConfig, Quantization
from jprefill.tokenization.api import Tokenizer

if TYPE_CHECKING:
    from jprefill.engine import Engine
    from jprefill.model.checkpoints import Checkpoint

DEMO_MODEL = "checkpoints/smollm2-135m-instruct"
_LABELS = (" the", " a")


def num_threads() -> int:
    """Cores that this process may use; a peer gets as many threads."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def demo_label_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """First tokens of two labels: any two plausible next tokens will do."""
    return tuple(tokenizer.encode(label, add_bos=False)[0] for label in _LABELS)


def load_checkpoint(path: str | Path, dtype: DType, quantization: Quantization | None = None) -> "Checkpoint":
    """Weights and config of a converted checkpoint, a Hugging Face folder or a GGUF file; quantised while loading.

    Raises:
      CheckpointError: the files cannot be used; the message names the file.
    """
    from jprefill.model.checkpoints import load

    return load(path, dtype=dtype, quantization=quantization)


def load_tokenizer(checkpoint: "Checkpoint") -> Tokenizer:
    """The tokenizer that lies with the weights.

    Raises:
      CheckpointError: there is none, or it cannot be used.
    """
    from jprefill.tokenization.load import load_tokenizer as load

    return load(checkpoint.tokenizer_path)


@contextmanager
def running_engine(checkpoint: "Checkpoint", config: EngineConfig) -> Iterator["Engine"]:
    """Compiles, starts, and closes an engine."""
    from jprefill.engine import Engine

    engine = Engine.from_checkpoint(checkpoint, config)
    try:
        yield engine
    finally:
        engine.close()


def positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, at least 1")
    return int(text)


def positive_list(text: str) -> tuple[int, ...]:
    """An argparse type: whole numbers of at least 1, separated by commas."""
    return tuple(positive(part.strip()) for part in text.split(","))
