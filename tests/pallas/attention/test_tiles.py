"""Tile table and tile bounds: what a kernel is told before it starts."""

import jax.numpy as jnp
import numpy as np
import pytest

from jprefill.errors import ConfigError
from jprefill.pallas.attention.bounds import tile_bounds
from jprefill.pallas.attention.contract import KeyRanges
from jprefill.pallas.attention.tiles import family_of, tile_for

SHARED_MEMORY_BYTES = {"NVIDIA L4": 101_376, "NVIDIA A100-SXM4-40GB": 166_912, "NVIDIA H100 80GB HBM3": 232_448}


def bounds_of(rows, *, num_keys, num_groups=1, block_q=4, block_kv=4):
    ranges = KeyRanges(*(jnp.asarray(column, jnp.int32) for column in zip(*rows, strict=True)))
    sizes = {"num_keys": num_keys, "num_groups": num_groups, "block_q": block_q, "block_kv": block_kv}
    return np.asarray(tile_bounds(ranges, **sizes)).reshape(-1, 2, 4)


def visited(bounds, block_kv=4):
    """(first block, first whole, end of whole, end) of one range of one tile."""
    first_key, end_key, first_whole, end_whole = (int(bound) for bound in bounds)
    return first_key // block_kv, first_whole, end_whole, -(-end_key // block_kv)


def test_causal_tile_masks_only_its_diagonal_block():
    bounds = bounds_of([(0, 0, 0, t) for t in range(12)], num_keys=12)
    assert visited(bounds[0, 1]) == (0, 0, 0, 1)
    assert visited(bounds[2, 1]) == (0, 0, 2, 3)


def test_shared_prefix_is_whole_blocks_and_a_masked_rest():
    bounds = bounds_of([(3, 14, 20, 20 + t) for t in range(4)], num_keys=24)
    assert visited(bounds[0, 0]) == (0, 1, 3, 4)
    assert tuple(bounds[0, 0, :2]) == (3, 14)


def test_tile_without_keys_visits_no_block():
    first, first_whole, end_whole, end = visited(bounds_of([(0, 0, 0, -1)] * 4, num_keys=24)[0, 0])
    assert first == first_whole == end_whole >= end


def test_empty_row_leaves_no_block_whole():
    bounds = bounds_of([(0, 16, 0, -1)] * 3 + [(0, 0, 0, -1)], num_keys=16)
    first, first_whole, end_whole, end = visited(bounds[0, 0])
    assert (first, end) == (0, 4)
    assert first_whole == end_whole


@pytest.mark.parametrize("num_groups", [1, 2, 3, 5, 8])
def test_tile_of_grouped_heads_spans_its_tokens(num_groups):
    """Query row m is token m // G, so a tile's last causal key is the token of its last row."""
    bounds = bounds_of([(0, 0, 0, t) for t in range(10)], num_keys=10, num_groups=num_groups)
    ends = [min(((tile + 1) * 4 - 1) // num_groups, 9) + 1 for tile in range(len(bounds))]
    assert len(bounds) == -(-10 * num_groups // 4)
    assert bounds[:, 1, 1].tolist() == ends


@pytest.mark.parametrize("kind", SHARED_MEMORY_BYTES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("num_query_rows", [8, 8192])
def test_tile_fits_the_shared_memory_of_its_gpu(kind, head_dim, itemsize, num_query_rows):
    tile = tile_for(kind, head_dim, itemsize, num_query_rows)
    padded_dim = 1 << (head_dim - 1).bit_length()
    num_elements = (tile.block_q + 2 * tile.num_stages * tile.block_kv) * padded_dim
    assert num_elements * itemsize <= SHARED_MEMORY_BYTES[kind]


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("NVIDIA L4", "ada"),
        ("NVIDIA A10", "ada"),
        ("NVIDIA A100-SXM4-80GB", "ampere"),
        ("NVIDIA H100 80GB HBM3", "hopper"),
        ("NVIDIA H200", "hopper"),
        ("cpu", "ada"),
    ],
)
def test_gpu_takes_the_tiles_of_its_family(kind, family):
    assert family_of(kind) == family


def test_few_rows_take_small_tiles_so_that_they_spread_over_the_gpu():
    few, many = (tile_for("NVIDIA L4", 128, 2, num_rows) for num_rows in (8 * 4, 1024 * 4))
    assert few.block_q < many.block_q


def test_head_size_beyond_the_table_is_refused():
    with pytest.raises(ConfigError, match=r"head_dim=512.*at most 256"):
        tile_for("NVIDIA L4", 512, 2, 64)
