"""The grid of KV rows on which an implementation sums: what bit-equal scores must keep to."""

import math

import jax.numpy as jnp

from jprefill.config import DType
from jprefill.errors import ConfigError
from jprefill.pallas.attention.tiles import FEW_ROWS, tile_for
from jprefill.pallas.attention.xla import BLOCK_KV, MIN_BLOCK_KV


def key_block(implementation: str, *, head_dim: int, dtype: DType, device_kind: str) -> int:
    """Rows of the KV grid: a query meets the same keys in the same blocks wherever its ranges start on it.

    Every tile that the implementation takes, for chunks or for the few rows that are read, divides it. The buffer must
    be a multiple of it too.

    Args:
      implementation: a name in `implementations()`.
      dtype: of queries, keys and values.
      device_kind: `Device.device_kind`; only GPUs have tiles of their own.

    Raises:
      ConfigError: the implementation sums over the whole buffer at once, or takes no such heads.
    """
    match implementation:
        case "xla":
            return math.lcm(BLOCK_KV, MIN_BLOCK_KV)
        case "triton":
            itemsize = jnp.dtype(dtype).itemsize
            tiles = [tile_for(device_kind, head_dim, itemsize, num_rows) for num_rows in (FEW_ROWS, FEW_ROWS + 1)]
            return math.lcm(*(tile.block_kv for tile in tiles))
        case "mosaic":
            # Imported when asked for, as in `api`.
            from jprefill.pallas.attention.mosaic import BLOCKS, refusal

            if reason := refusal(dtype, head_dim):
                raise ConfigError(f"attention='mosaic': {reason}")
            return BLOCKS[head_dim][0]
    raise ConfigError(
        f"attention={implementation!r} with batch_invariant: it has no grid of keys; allowed are xla, triton, mosaic"
    )
