"""One suite for every implementation, against the dense float32 reference. Kernels run in interpret mode on a CPU."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jprefill.errors import ConfigError
from jprefill.pallas.attention import KeyRanges, attend, default_implementation, implementations
from jprefill.pallas.attention.reference import visible

# (heads, KV heads, head_dim) of real models: every head size that is supported, and 1 to 8 heads a KV head.
MODELS = {
    "SmolLM2-135M": (9, 3, 64),
    "TinyLlama": (32, 4, 64),
    "Phi-2": (32, 32, 80),
    "Phi-3-mini": (32, 32, 96),
    "Llama-3.1-8B": (32, 8, 128),
    "Qwen2.5-7B": (28, 4, 128),
    "Gemma-2-9B": (16, 8, 256),
}
# The Hopper kernel takes no float32 and is slow to simulate: `test_mosaic_kernel.py`.
NAMES = [name for name in implementations() if name != "mosaic"]
# Largest error in float32 against float64. Plain XLA on a CPU adds up 256 products in one chain.
LIMIT = 2e-6
LIMIT_XLA_256 = 4e-6


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


@cache
def compiled(name):
    """One function per implementation, so that examples of one shape share its executable."""
    return jax.jit(partial(attend, implementation=name))


def dense(q, k, v, ranges):
    """The definition, in float64 and NumPy."""
    num_groups = q.shape[1] // k.shape[1]
    mask = np.asarray(visible(ranges, k.shape[0]))
    is_seen = mask.any(0)[:, None, None]
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.where(is_seen, x, 0.0).repeat(num_groups, axis=1) for x in (k, v))
    scores = np.einsum("tnh,snh->nts", q, k) * q.shape[-1] ** -0.5
    scores = np.where(mask[None], scores, -1e30)
    weights = np.exp(scores - scores.max(-1, keepdims=True)) * mask[None]
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)  # a row that sees nothing gives 0
    return np.einsum("nts,snh->tnh", weights, v)


def both(name, q, k, v, ranges):
    ours = compiled(name)(q, k, v, ranges)
    assert ours.dtype == q.dtype
    return np.asarray(ours, np.float64), dense(q, k, v, ranges)


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
@pytest.mark.parametrize("model", MODELS)
def test_packed_segments_match_the_reference(name, model):
    rows = segments_to_rows(70, [20, 1, 26], 11)
    q, k, v = random_qkv(0, len(rows), len(rows), MODELS[model])
    ours, exact = both(name, q, k, v, make_ranges(rows))
    is_chained = name in ("xla", "reference") and MODELS[model][2] == 256
    assert np.abs(ours - exact).max() <= (LIMIT_XLA_256 if is_chained else LIMIT)
    assert (ours[-11:] == 0).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_rows", [1, 255, 257])
def test_causal_prompt_of_any_length_matches(name, num_rows):
    rows = segments_to_rows(num_rows, [], 0)
    q, k, v = random_qkv(1, num_rows, num_rows, (6, 2, 64))
    ours, exact = both(name, q, k, v, make_ranges(rows))
    assert np.abs(ours - exact).max() <= LIMIT


@pytest.mark.parametrize("name", NAMES)
def test_long_prefix_is_whole_blocks_and_matches(name):
    """Few rows over many keys: the head's read rows, most blocks without a mask."""
    rows = [(3, 1500, 1510 + 7 * t, 1515 + 7 * t) for t in range(8)]
    q, k, v = random_qkv(6, 8, 1600, (8, 2, 64))
    ours, exact = both(name, q, k, v, make_ranges(rows))
    assert np.abs(ours - exact).max() <= LIMIT


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "largest", "mean"), [("bfloat16", 2e-2, 1e-3), ("float16", 3e-3, 1.5e-4)])
def test_half_precision_stays_within_its_rounding(name, dtype, largest, mean):
    rows = segments_to_rows(150, [50, 50], 6)
    q, k, v = random_qkv(2, 256, 256, (9, 3, 64), jnp.dtype(dtype))
    ours, exact = both(name, q, k, v, make_ranges(rows))
    assert np.abs(ours - exact).max() <= largest
    assert np.abs(ours - exact).mean() <= mean


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_nan_outside_every_range_is_never_read(name, head_dim):
    rows = segments_to_rows(90, [40], 126)
    q, k, v = random_qkv(3, 256, 600, (4, 2, head_dim))
    k, v = k.at[130:].set(jnp.nan), v.at[130:].set(jnp.nan)
    ours, exact = both(name, q, k, v, make_ranges(rows))
    assert np.isfinite(ours).all()
    assert np.abs(ours - exact).max() <= LIMIT


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
    assert np.abs(ours - exact).max() <= LIMIT


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_packed_prompts_match(name, data):
    """Prompts of any lengths, each a prefix with items over it, packed one after the other as `pack` does."""
    num_rows, rows = 200, []
    while len(rows) < num_rows and data.draw(st.booleans(), label="one more prompt"):
        start = len(rows)
        prefix_len = data.draw(st.integers(0, 120), label="prefix")
        lengths = data.draw(st.lists(st.integers(1, 60), max_size=4), label="items")
        rows += [tuple(start + bound for bound in row) for row in segments_to_rows(prefix_len, lengths, 0)]
    rows = (rows + [(0, 0, 0, -1)] * num_rows)[:num_rows]
    q, k, v = random_qkv(7, num_rows, num_rows, (6, 2, 64))
    ours, exact = both(name, q, k, v, make_ranges(rows))
    assert np.abs(ours - exact).max() <= LIMIT


def test_cpu_takes_the_plain_implementation():
    assert default_implementation() == "xla"


def test_unknown_implementation_is_refused_by_name():
    q, k, v = random_qkv(5, 2, 2, (1, 1, 64))
    with pytest.raises(ConfigError, match=r"'flash'.*reference, xla, triton"):
        attend(q, k, v, make_ranges(segments_to_rows(2, [], 0)), implementation="flash")
