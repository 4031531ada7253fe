"""Angles against formulas written out by hand."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jprefill.model.config import RopeConfig
from jprefill.model.rope import angles_at, inverse_frequencies, rotate


def by_the_book(rope, head_dim):
    """Llama 3.1's own description, one frequency at a time in float64."""
    out = []
    for i in range(head_dim // 2):
        frequency = rope.theta ** (-2 * i / head_dim)
        wavelength = 2 * math.pi / frequency
        if rope.scaling == "llama3" and wavelength > rope.original_max_len / rope.low_freq_factor:
            frequency /= rope.factor
        elif rope.scaling == "llama3" and wavelength >= rope.original_max_len / rope.high_freq_factor:
            smooth = (rope.original_max_len / wavelength - rope.low_freq_factor) / (
                rope.high_freq_factor - rope.low_freq_factor
            )
            frequency = (1 - smooth) * frequency / rope.factor + smooth * frequency
        out.append(frequency)
    return np.array(out)


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(theta=1e4),
        RopeConfig(theta=5e5, scaling="llama3", factor=8.0),
        RopeConfig(theta=5e5, scaling="llama3", factor=32.0),
    ],
    ids=["default", "llama-3.1", "llama-3.2"],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_are_those_of_the_book(rope, head_dim):
    np.testing.assert_allclose(inverse_frequencies(rope, head_dim), by_the_book(rope, head_dim), rtol=2e-6)


def test_llama3_scaling_changes_long_wavelengths_only():
    plain = inverse_frequencies(RopeConfig(theta=5e5), 128)
    scaled = inverse_frequencies(RopeConfig(theta=5e5, scaling="llama3", factor=8.0), 128)
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1] / 8)


def test_positions_far_out_are_turned_by_the_float32_angle():
    """As Hugging Face does it: the product in float32, so a position of 100,000 keeps its parity."""
    rope = RopeConfig(theta=1e4)
    positions = np.array([0, 1, 9_000, 100_000], np.int32)
    x = np.random.default_rng(0).normal(size=(4, 2, 64)).astype(np.float32)
    turned = np.asarray(rotate(jnp.asarray(x), angles_at(jnp.asarray(positions), rope, 64)))
    angle = (positions[:, None].astype(np.float32) * inverse_frequencies(rope, 64)[None]).astype(np.float64)
    pairs = x[..., :32] + 1j * x[..., 32:]
    exact = pairs * np.exp(1j * angle)[:, None, :]
    np.testing.assert_allclose(turned, np.concatenate([exact.real, exact.imag], -1), atol=2e-6)


def test_a_turn_depends_on_the_distance_only():
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 64)), jnp.float32) for _ in range(2))

    def score(q_position, k_position):
        at = lambda p: angles_at(jnp.asarray([p], jnp.int32), RopeConfig(), 64)  # noqa: E731
        return float((rotate(q, at(q_position)) * rotate(k, at(k_position))).sum())

    assert score(7, 3) == pytest.approx(score(1007, 1003), abs=1e-4)
