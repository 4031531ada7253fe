"""Builds the store that an engine's settings ask for."""

import math
from collections.abc import Mapping

import jax
import numpy as np

from jprefill.config import EngineConfig
from jprefill.errors import ConfigError
from jprefill.kvstore.block_file import BlockForm
from jprefill.kvstore.device_pool import DevicePool, block_bytes
from jprefill.kvstore.disk_tier import DiskTier
from jprefill.kvstore.eviction import make_order
from jprefill.kvstore.fingerprint import fingerprint
from jprefill.kvstore.host_tier import HostTier
from jprefill.kvstore.index import BlockIndex
from jprefill.kvstore.keep import KeepPolicy
from jprefill.kvstore.lower_tiers import LowerTiers
from jprefill.kvstore.store import PrefixStore
from jprefill.model.config import ModelConfig
from jprefill.model.weights import layer_shapes

CPU_BYTES = 512 * 2**20
# Keys are remembered for more blocks than the pool holds: sharing shows after a block has left.
GHOSTS_PER_BLOCK = 8
MIN_GHOSTS = 65_536


def num_pool_blocks(config: ModelConfig, settings: EngineConfig, available_bytes: int | None) -> int:
    """Blocks of the device pool; 0: no store.

    Args:
      available_bytes: device memory that weights and passes leave; None where the device does not say.

    Raises:
      ConfigError: more was asked for than there is.
    """
    asked = settings.kv_cache_memory_bytes
    if asked is not None and available_bytes is not None and asked > available_bytes:
        raise ConfigError(
            f"kv_cache_memory_bytes={asked}: weights and passes leave {max(0, available_bytes)} bytes of the device"
        )
    if settings.keep == "none" and settings.kv_disk_path is None:
        return 0
    default = CPU_BYTES if available_bytes is None else max(0, available_bytes)
    num_bytes = default if asked is None else asked
    return num_bytes // block_bytes(config, settings.dtype, settings.block_size)


def make_store(
    config: ModelConfig, weights: Mapping[str, jax.Array], settings: EngineConfig, pool: DevicePool, model_name: str
) -> PrefixStore:
    """The store on top of a pool that exists.

    Raises:
      ConfigError: the disk tier's folder cannot be used.
    """
    identity = b"" if settings.kv_disk_path is None else fingerprint(config, weights, settings)
    order = make_order(settings.eviction, pool.num_blocks, _crossover_tokens(config))
    index = BlockIndex(pool.num_blocks, pool.block_size, order)
    policy = KeepPolicy(settings.keep, max(MIN_GHOSTS, GHOSTS_PER_BLOCK * pool.num_blocks))
    lower = _lower_tiers(config, settings, identity, model_name)
    return PrefixStore(pool, index, policy, identity, lower)


def _crossover_tokens(config: ModelConfig) -> int:
    """The position from which on attention costs a token more than a layer's matrix products."""
    num_parameters = sum(math.prod(shape) for shape in layer_shapes(config).values())
    return max(1, num_parameters // (2 * config.num_heads * config.head_dim))


def _lower_tiers(config: ModelConfig, settings: EngineConfig, identity: bytes, model_name: str) -> LowerTiers | None:
    host = HostTier(settings.kv_host_bytes) if settings.kv_host_bytes else None
    disk = None
    if settings.kv_disk_path is not None:
        shape = (config.num_layers, 2, settings.block_size, config.num_kv_heads, config.head_dim)
        form = BlockForm(identity, shape, np.dtype(settings.dtype))
        disk = DiskTier(settings.kv_disk_path, settings.kv_disk_bytes, form, model_name=model_name)
    return None if host is None and disk is None else LowerTiers(host, disk)
