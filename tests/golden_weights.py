"""Weights that any program can make again: bytes of SHAKE-128 over a tensor's name. NumPy only.

`scripts/reference/golden_families.py` gives them to transformers, `tests/model/test_families.py` to us; so the golden
file holds prompts and answers only. A random generator would not do: NumPy may change its streams.
"""

import hashlib
import math

import numpy as np


def golden_weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32. Scaled so that logits spread by a few units and attention is far from uniform."""
    stream = hashlib.shake_128(name.encode()).digest(2 * math.prod(shape))
    uniform = np.frombuffer(stream, "<i2").reshape(shape).astype(np.float32) / np.float32(32768)  # -1 to 1
    if len(shape) == 1:
        mean = 1.5 if "q_norm" in name or "k_norm" in name else 1.0 if "norm" in name else 0.0
        return np.float32(mean) + np.float32(0.4) * uniform
    gain = 1.6 if "q_proj" in name or "k_proj" in name else 1.0
    if "embed_tokens" in name or "lm_head" in name or "score" in name:
        gain = 2.0
    return np.float32(gain * math.sqrt(3 / shape[1])) * uniform
