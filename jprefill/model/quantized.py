"""Weight-only quantisation: 8-bit values and one float32 scale per output channel, symmetric. NumPy, on the host.

    weight[out, in]  =  values[out, in] * scale[out]        int8: |values| <= 127        fp8 (e4m3fn): |values| <= 448

The scale belongs to the output channel, so a matrix product takes the values as they are and multiplies its result
(`layer.linear`). Float32 scales cost 4 bytes a channel, a thousandth of a matrix; bfloat16 ones would add an error of
2^-9 to every weight for nothing.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Shaped

from jprefill.config import Quantization
from jprefill.errors import CheckpointError

QUANTIZED_DTYPES: dict[str, np.dtype] = {
    "int8": np.dtype(np.int8),
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
}
_LARGEST = {"int8": 127.0, "fp8": 448.0}
_SLAB_SIZE = 2**22  # elements in float32 at a time: the largest matrices of a 70B model would need gigabytes


class Quantized(NamedTuple):
    """One quantised matrix; `values` is int8 or float8_e4m3fn."""

    values: Shaped[np.ndarray, "O I"]
    scale: Float32[np.ndarray, " O"]


def kind_of(dtype: np.dtype) -> Quantization | None:
    """Which quantisation keeps its values in `dtype`; None: none does."""
    return next((kind for kind in ("int8", "fp8") if QUANTIZED_DTYPES[kind] == dtype), None)


def quantize(weight: Shaped[np.ndarray, "O I"], quantization: Quantization, name: str) -> Quantized:
    """Rounds every row to nearest on a grid that its largest magnitude spans.

    The error of a weight is at most half a scale for int8; for fp8 2^-4 of the weight, or 2^-10 of the scale where
    that is more.

    Raises:
      CheckpointError: a value is infinite or NaN; `name` is the tensor's, for the message.
    """
    num_rows, num_columns = weight.shape
    values = np.empty(weight.shape, QUANTIZED_DTYPES[quantization])
    scale = np.empty(num_rows, np.float32)
    height = max(1, _SLAB_SIZE // num_columns)
    for start in range(0, num_rows, height):
        rows = slice(start, start + height)
        wide = weight[rows].astype(np.float32)
        # Not below the smallest normal number: a row of zeros stays one, and no scale is flushed to zero.
        scale[rows] = np.maximum(np.abs(wide).max(axis=1) / np.float32(_LARGEST[quantization]), np.finfo("f4").tiny)
        if not np.isfinite(scale[rows]).all():
            raise CheckpointError(f"tensor {name!r} holds values that are not finite and cannot be quantised")
        values[rows] = _round(wide / scale[rows, None], quantization)
    return Quantized(values, scale)


def from_blocks(
    values: Shaped[np.ndarray, "O I"],
    block_scale: Float32[np.ndarray, "_ _"],
    block: tuple[int, int],
    quantization: Quantization,
) -> Quantized:
    """One scale per output channel instead of one per block: a row takes the largest of its blocks' scales.

    Values under that scale keep their bits, as do fp8 values under a scale that is smaller by a power of two (down to
    2^-9). The others are rounded once more, by at most half a step of their new grid.
    """
    (num_rows, num_columns), (height, width) = values.shape, block
    largest = block_scale.max(axis=1)
    ratio = np.divide(block_scale, largest[:, None], out=np.zeros_like(block_scale), where=largest[:, None] > 0)
    result = np.empty_like(values)
    for i in range(len(block_scale)):
        rows = slice(i * height, (i + 1) * height)
        by_column = np.repeat(ratio[i], width)[:num_columns]
        result[rows] = _round(values[rows].astype(np.float32) * by_column[None, :], quantization)
    return Quantized(result, np.repeat(largest, height)[:num_rows])


def dequantize(weight: Quantized) -> Float32[np.ndarray, "O I"]:
    """The matrix that the values and scales stand for."""
    return weight.values.astype(np.float32) * weight.scale[:, None]


def _round(scaled: Float32[np.ndarray, "O I"], quantization: Quantization) -> Shaped[np.ndarray, "O I"]:
    """To nearest, ties to even. The division may have gone an ulp past the largest value, where e4m3fn has NaN."""
    largest = _LARGEST[quantization]
    np.clip(scaled, -largest, largest, out=scaled)
    if quantization == "int8":
        np.rint(scaled, out=scaled)
    return scaled.astype(QUANTIZED_DTYPES[quantization])
