"""Segment layouts that attention is compared on: four int32 vectors each, as `KeyRanges` wants them. NumPy only."""

import numpy as np

LAYOUTS = ("causal", "packed", "shared_prefix", "padded")


def segment_rows(layout: str, num_keys: int) -> tuple[np.ndarray, int]:
    """Rows of (prefix_lo, prefix_hi, self_lo, self_pos), one a key, and how many of them are real.

    causal          | one prompt                                  |
    packed          | 3 tokens | half | 1 token | rest            |   prompts that must not see each other
    shared_prefix   | prefix   | item | item    | item  | padding |   items see the prefix and themselves
    padded          | one prompt                | padding         |   padding sees nothing
    """
    tail = max(1, num_keys // 16)
    if layout == "causal":
        return _rows(num_keys, 0, [num_keys]), num_keys
    if layout == "packed":
        return _rows(num_keys, 0, [3, num_keys // 2, 1, num_keys - num_keys // 2 - 4]), num_keys
    if layout == "shared_prefix":
        prefix = num_keys // 3
        item = (num_keys - prefix - tail) // 3
        return _rows(num_keys, prefix, [item] * 3), prefix + 3 * item
    return _rows(num_keys, 0, [num_keys * 5 // 8 + 1]), num_keys * 5 // 8 + 1


def _rows(num_keys: int, prefix: int, lengths: list[int]) -> np.ndarray:
    rows = np.zeros((num_keys, 4), np.int32)
    rows[:, 3] = -1  # padding: sees nothing
    rows[:prefix, 3] = np.arange(prefix)
    start = prefix
    for length in lengths:
        here = slice(start, start + length)
        rows[here, 1], rows[here, 2], rows[here, 3] = prefix, start, np.arange(start, start + length)
        start += length
    return rows
