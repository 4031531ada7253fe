"""What only the Triton kernel promises. The rest is in the shared suite."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jprefill.errors import ConfigError
from jprefill.pallas.attention.contract import KeyRanges
from jprefill.pallas.attention.reference import attend_reference
from jprefill.pallas.attention.tiles import Tile
from jprefill.pallas.attention.triton import attend_triton

TINY = Tile(16, 16, 4, 2)
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 64


def random_inputs(num_tokens):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(num_tokens, n, HEAD_DIM)), jnp.float32) for n in (HEADS, KV_HEADS, KV_HEADS)]


def causal(length, start=0, prefix=(0, 0)):
    """Rows of one segment whose first key is at `start`."""
    offset = jnp.arange(length, dtype=jnp.int32)
    fixed = lambda number: jnp.full_like(offset, number)  # noqa: E731
    return KeyRanges(fixed(prefix[0]), fixed(prefix[1]), fixed(start), start + offset)


@pytest.mark.parametrize("tile", [TINY, Tile(16, 64, 4, 2), Tile(128, 32, 4, 2)], ids=str)
def test_every_tile_gives_the_reference(tile):
    q, k, v = random_inputs(150)
    ranges = causal(150)
    ours = jax.jit(partial(attend_triton, tile=tile))(q, k, v, ranges)
    assert jnp.abs(ours - attend_reference(q, k, v, ranges)).max() <= 2e-6


def test_bits_do_not_depend_on_the_rows_in_the_tile():
    """A prompt alone, and as the second of a pack: the same bits, for its keys start on the same grid of blocks."""
    q, k, v = random_inputs(112)
    first, second = 48, 64
    packed = KeyRanges(*map(jnp.concatenate, zip(causal(first), causal(second, start=first), strict=True)))
    attend = jax.jit(partial(attend_triton, tile=TINY))
    alone = attend(q[first:], k[first:], v[first:], causal(second))
    np.testing.assert_array_equal(np.asarray(attend(q, k, v, packed)[first:]), np.asarray(alone))


def test_bits_of_an_item_do_not_depend_on_where_its_prefix_lies():
    """Items that see keys [0, 48) as a prefix, and the same tokens as one causal prompt."""
    q, k, v = random_inputs(112)
    attend = jax.jit(partial(attend_triton, tile=TINY))
    whole = attend(q, k, v, causal(112))[48:]
    item = attend(q[48:], k, v, causal(64, start=48, prefix=(0, 48)))
    np.testing.assert_array_equal(np.asarray(item), np.asarray(whole))


def test_head_size_without_tile_is_refused():
    q = jnp.zeros((4, 1, 512))
    with pytest.raises(ConfigError, match="head_dim=512"):
        attend_triton(q, q, q, causal(4))
