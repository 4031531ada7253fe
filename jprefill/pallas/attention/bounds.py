"""Which key blocks a tile of queries must visit, computed once before a kernel starts.

For the rows of a tile, which see [low_r, high_r), the blocks fall in three runs:

    keys      low_min   low_max               high_min  high_max
    blocks    | masked  |  whole: no mask      |  masked  |        all others are not visited

A tile holds `block_q` *query rows* of one KV head: the G heads that share it, token by token, so row m is token
`m // G`. No G wastes a row, a tile of keys serves G heads, and few tokens (read rows) still fill a tile.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jprefill.pallas.attention.contract import KeyRanges

NUM_BOUNDS = 4  # per range: first key, end key, first whole block, end of the whole blocks


def tile_bounds(
    ranges: KeyRanges, *, num_keys: int, num_groups: int, block_q: int, block_kv: int
) -> Int32[Array, "num_tiles 8"]:
    """`NUM_BOUNDS` numbers for the prefix range, then as many for the self range, of each tile.

    Blocks `[first_key // block_kv, first_whole)` and `[end_whole, ceil(end_key / block_kv))` need a mask; those
    between need none. Where a row of the tile sees nothing of a range, no block is whole.
    """
    num_rows = ranges.self_lo.shape[0]
    num_tiles = -(-num_rows * num_groups // block_q)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)[:, None]
    last_row = jnp.minimum(((tile + 1) * block_q - 1) // num_groups, num_rows - 1)
    most_rows = (block_q - 1) // num_groups + 2
    rows = jnp.minimum(tile * block_q // num_groups + jnp.arange(most_rows, dtype=jnp.int32)[None], last_row)
    low = jnp.stack([ranges.prefix_lo, ranges.self_lo])
    high = jnp.stack([ranges.prefix_hi, ranges.self_pos + 1])
    is_empty = low >= high
    # One reduction for all: a maximum is the minimum of the negated.
    extremes = jnp.stack(
        [
            jnp.where(is_empty, num_keys, low),
            -jnp.where(is_empty, 0, high),
            -jnp.where(is_empty, num_keys, low),
            jnp.where(is_empty, 0, high),
        ]
    )
    first_key, end_key, last_low, first_high = extremes[:, :, rows].min(-1) * jnp.array(
        [1, -1, -1, 1], jnp.int32
    ).reshape(4, 1, 1)
    first = first_key // block_kv
    end = jnp.maximum(first, -(-end_key // block_kv))
    first_whole = jnp.clip(-(-last_low // block_kv), first, end)
    end_whole = jnp.clip(first_high // block_kv, first_whole, end)
    bounds = jnp.stack([first_key, end_key, first_whole, end_whole])  # [4, 2, num_tiles]
    return bounds.transpose(2, 1, 0).reshape(num_tiles, 2 * NUM_BOUNDS)
