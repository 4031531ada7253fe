"""One suite for every implementation, against the dense float32 reference."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jprefill.errors import ConfigError
from jprefill.pallas.attention import KeyRanges, attend, implementations
from jprefill.pallas.attention.reference import visible

# (heads, kv heads, head_dim): SmolLM2-135M, TinyLlama, Llama-3.2-1B, Llama-3.1-8B, Phi-like odd head size
SHAPES = [(9, 3, 64), (32, 4, 64), (8, 2, 64), (8, 2, 128), (4, 4, 80)]
NAMES = [name for name in implementations() if name != "reference"]


def make_ranges(rows):
    """Rows of (prefix_lo, prefix_hi, self_lo, self_pos) -> KeyRanges."""
    return KeyRanges(*(jnp.asarray(column, jnp.int32) for column in zip(*rows, strict=True)))


def segments_to_rows(prefix_len, lengths, num_pad):
    """One shared prefix (row 0 on, causal) and items after it, then padding that sees nothing."""
    rows = [(0, 0, 0, t) for t in range(prefix_len)]
    start = prefix_len
    for length in lengths:
        rows += [(0, prefix_len, start, start + t) for t in range(length)]
        start += length
    return rows + [(0, 0, 0, -1)] * num_pad


def random_qkv(seed, num_rows, num_keys, shape, dtype=jnp.float32):
    heads, kv_heads, head_dim = shape
    rng = np.random.default_rng(seed)
    draw = lambda *s: jnp.asarray(rng.normal(size=s), dtype)  # noqa: E731
    return (
        draw(num_rows, heads, head_dim),
        draw(num_keys, kv_heads, head_dim),
        draw(num_keys, kv_heads, head_dim),
    )


def both(name, q, k, v, ranges):
    ours = attend(q, k, v, ranges, implementation=name)
    exact = attend(*(x.astype(jnp.float32) for x in (q, k, v)), ranges, implementation="reference")
    return np.asarray(ours, np.float32), np.asarray(exact, np.float32)


def test_mask_is_the_one_drawn_by_hand():
    rows = segments_to_rows(2, [2, 1], 1)
    expected = np.array(
        [
            [1, 0, 0, 0, 0, 0],  # prefix, causal
            [1, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0],  # item 0: prefix and itself
            [1, 1, 1, 1, 0, 0],
            [1, 1, 0, 0, 1, 0],  # item 1 does not see item 0
            [0, 0, 0, 0, 0, 0],  # padding sees nothing
        ],
        bool,
    )
    np.testing.assert_array_equal(np.asarray(visible(make_ranges(rows), 6)), expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_segments_match_the_reference(name, shape):
    rows = segments_to_rows(300, [70, 1, 200, 33], 36)
    q, k, v = random_qkv(0, len(rows), len(rows), shape)
    ours, exact = both(name, q, k, v, make_ranges(rows))
    assert np.abs(ours - exact).max() <= 2e-6
    assert (ours[-36:] == 0).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_rows", [1, 255, 256, 257, 700])
def test_causal_prompt_of_any_length_matches(name, num_rows):
    rows = segments_to_rows(num_rows, [], 0)
    q, k, v = random_qkv(1, num_rows, num_rows, (6, 2, 64))
    ours, exact = both(name, q, k, v, make_ranges(rows))
    assert np.abs(ours - exact).max() <= 2e-6


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_stays_within_its_rounding(name):
    rows = segments_to_rows(300, [100, 100], 12)
    q, k, v = random_qkv(2, 512, 512, (9, 3, 64), jnp.bfloat16)
    ours, exact = both(name, q, k, v, make_ranges(rows))
    assert np.abs(ours - exact).max() <= 2e-2
    assert np.abs(ours - exact).mean() <= 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_nan_outside_every_range_is_never_read(name):
    rows = segments_to_rows(90, [40], 126)
    q, k, v = random_qkv(3, 256, 600, (4, 2, 64))
    k, v = k.at[130:].set(jnp.nan), v.at[130:].set(jnp.nan)
    ours, exact = both(name, q, k, v, make_ranges(rows))
    assert np.isfinite(ours).all()
    assert np.abs(ours - exact).max() <= 2e-6


@pytest.mark.parametrize("name", NAMES)
def test_large_scores_do_not_overflow(name):
    rows = segments_to_rows(64, [], 0)
    q, k, v = random_qkv(4, 64, 64, (2, 1, 64))
    ours, exact = both(name, q * 100, k * 100, v, make_ranges(rows))
    assert np.isfinite(ours).all()
    assert np.abs(ours - exact).max() <= 1e-3


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_ranges_match(name, data):
    """Any disjoint pair of ranges, row by row, with no structure for the implementation to lean on."""
    num_rows, num_keys = 40, 530
    rows = []
    for _ in range(num_rows):
        a, b, c, d = sorted(data.draw(st.tuples(*[st.integers(0, num_keys)] * 4)))
        rows.append((a, b, c, d - 1))
    q, k, v = random_qkv(data.draw(st.integers(0, 99)), num_rows, num_keys, (4, 2, 64))
    ours, exact = both(name, q, k, v, make_ranges(rows))
    assert np.abs(ours - exact).max() <= 2e-6


def test_unknown_implementation_is_refused_by_name():
    q, k, v = random_qkv(5, 2, 2, (1, 1, 64))
    with pytest.raises(ConfigError, match=r"'flash'.*reference, xla"):
        attend(q, k, v, make_ranges(segments_to_rows(2, [], 0)), implementation="flash")
