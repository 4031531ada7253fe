"""Rotary position embedding: default and `llama3` scaling, angles in float32.

Source: transformers `modeling_rope_utils` for the definition of the llama3 stretch.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from jprefill.model.config import RopeConfig
from jprefill.pallas.rounding import round_to


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Float32[np.ndarray, " F"]:
    """Radians per position of each pair of channels, `head_dim / 2` of them.

    llama3 leaves short wavelengths alone, divides long ones by `factor`, and blends in between:

        wavelength   < original/high   |  between  |  > original/low
        frequency        kept          |   blend   |   / factor
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # The power in float64, rounded once, gives PyTorch's bits; NumPy's own float32 power is 2 ulp off, and an ulp
    # of a frequency is 5e-4 radians at position 8,000.
    frequencies = np.float32(1) / (rope.theta ** exponents.astype(np.float64)).astype(np.float32)
    if rope.scaling == "default":
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    stretched = frequencies / rope.factor
    blend = (rope.original_max_len / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies  # in the order of the source
    scaled = np.where(wavelengths > rope.original_max_len / rope.low_freq_factor, stretched, blended)
    kept = wavelengths < rope.original_max_len / rope.high_freq_factor
    return np.where(kept, frequencies, scaled).astype(np.float32)


class Angles(NamedTuple):
    """Cosine and sine of position x frequency for each token, float32."""

    cos: Float32[Array, "T F"]
    sin: Float32[Array, "T F"]


def angles_at(positions: Int32[Array, " T"], rope: RopeConfig, head_dim: int) -> Angles:
    """The angles of each token. Float32 throughout: bfloat16 positions lose whole tokens beyond 256."""
    frequencies = jnp.asarray(inverse_frequencies(rope, head_dim))
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    return Angles(jnp.cos(angles), jnp.sin(angles))


def rotate(x: Float[Array, "T N H"], angles: Angles) -> Float[Array, "T N H"]:
    """Turns channel pairs (h, h + H/2) of every head by their angle; the dtype of `x` is kept."""
    cos, sin = angles.cos[:, None, :], angles.sin[:, None, :]
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return round_to(turned, x.dtype)
