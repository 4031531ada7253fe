"""Puts an engine's parts together: from a checkpoint and settings to everything that `Engine` is made of."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from jprefill.config import EngineConfig, default_buckets
from jprefill.errors import ConfigError
from jprefill.kvstore.build import make_store, num_pool_blocks
from jprefill.kvstore.contract import Store
from jprefill.kvstore.device_pool import DevicePool
from jprefill.model.capacity import bytes_beside_passes, check_fit, longest_fitting, suspension_bytes
from jprefill.model.compiles import use_cache
from jprefill.model.layouts import LayoutSpec
from jprefill.model.runner import Runner, layout_spec
from jprefill.pallas.device import default_chunk_size
from jprefill.scheduler.calibration import calibrate
from jprefill.scheduler.features import ChunkWalk
from jprefill.scheduler.jct import JctModel

if TYPE_CHECKING:
    from jprefill.model.checkpoints import Checkpoint

log = logging.getLogger("jprefill.engine")


@dataclass(frozen=True)
class Parts:
    """What an engine is made of.

    Attributes:
      config: as it can be on this device.
      store: None: there is no room for one, or it is switched off.
      jct: what passes take here.
      save_jct: keeps it for the next process.
    """

    runner: Runner
    config: EngineConfig
    max_model_len: int
    store: Store | None
    jct: JctModel
    save_jct: Callable[[JctModel], None]


def assemble(checkpoint: "Checkpoint", config: EngineConfig, *, progress: bool = False) -> Parts:
    """Compiles every program, runs each once, sizes the prefix pool and times passes.

    Raises:
      ConfigError: lengths that contradict each other, the model or the device's memory.
    """
    cache = use_cache(config.compilation_cache)
    max_model_len = _max_model_len(checkpoint.config.max_position, config)
    chunk_size = config.chunk_size or default_chunk_size()
    last_bucket = _buckets(max_model_len, config, chunk_size)[-1]  # first: it refuses without a look at the weights
    spec = layout_spec(checkpoint.config, checkpoint.weights, config)
    limit = longest_fitting(spec, config, last_bucket)
    max_model_len = check_fit(limit, config, max_model_len)
    buckets = _buckets(max_model_len, config, chunk_size)
    runner = Runner(checkpoint.config, checkpoint.weights, config, buckets, progress=progress)
    available = bytes_beside_passes(spec, config.dtype, runner.programs)
    config, available = _with_room_to_wait(spec, config, runner, available)
    store = None
    if num_blocks := num_pool_blocks(checkpoint.config, config, available):
        runner.pool = DevicePool.create(checkpoint.config, config.dtype, config.block_size, num_blocks, buckets[-1])
        store = make_store(checkpoint.config, checkpoint.weights, config, runner.pool, checkpoint.name)
    runner.warm_up()
    jct, save_jct = _job_times(spec, config, runner, cache)
    return Parts(runner, config, max_model_len, store, jct, save_jct)


def _with_room_to_wait(
    spec: LayoutSpec, config: EngineConfig, runner: Runner, available: int | None
) -> tuple[EngineConfig, int | None]:
    """Sets memory aside for a suspended pass; where there is none, no pass waits for another."""
    if available is None or not config.preemption:
        return config, available
    needed = suspension_bytes(spec, config.dtype, runner.programs)
    if needed > available:
        log.warning("preemption is off: a pass that waits would take %d bytes more than there are", needed - available)
        return replace(config, preemption=False), available
    return config, available - needed


def _job_times(
    spec: LayoutSpec, config: EngineConfig, runner: Runner, cache: Path | None
) -> tuple[JctModel, Callable[[JctModel], None]]:
    """What passes take: as an earlier process has saved it for the same model and device, or else measured now."""
    device = jax.local_devices()[0].device_kind
    shape = (spec, config.layout, config.dtype, config.batch_invariant, runner.buckets)
    identity = f"{version('jax')} {device} {os.cpu_count()} {shape}"
    path = None if cache is None else cache / f"jct-{sha256(identity.encode()).hexdigest()[:16]}.json"
    saved = None if path is None else JctModel.load(path, identity)
    jct = saved or calibrate(runner.run, ChunkWalk(spec.chunk_size, runner.buckets))
    save = partial(_save, path=path, identity=identity)
    if saved is None:
        save(jct)
    return jct, save


def _save(jct: JctModel, path: Path | None, identity: str) -> None:
    """Keeps the model if there is a place for it; the next process measures anew where that fails."""
    if path is None:
        return
    try:
        jct.save(path, identity)
    except OSError as error:
        log.warning("%s: what passes take could not be saved: %s", path, error.strerror)


def _max_model_len(model_limit: int, config: EngineConfig) -> int:
    """The longest prompt: what was asked for, within what the model was made for."""
    asked = config.max_model_len or model_limit
    if asked > model_limit:
        raise ConfigError(f"max_model_len={asked}: the model was made for {model_limit} tokens")
    return asked


def _buckets(max_model_len: int, config: EngineConfig, chunk_size: int) -> tuple[int, ...]:
    """Compiled lengths; the last one holds the longest prompt and the largest batch."""
    wanted = max(max_model_len, config.max_batch_tokens or max_model_len)
    if config.buckets is None:
        buckets = default_buckets(wanted, chunk_size)
        # A bucket below one chunk has products of another shape, and so other bits.
        return tuple(b for b in buckets if b >= chunk_size) if config.batch_invariant else buckets
    buckets = tuple(sorted(set(config.buckets)))
    if buckets[-1] < wanted or any(bucket % min(bucket, chunk_size) or bucket < 16 for bucket in buckets):
        raise ConfigError(
            f"buckets={buckets}: each must be below chunk_size={chunk_size} (at least 16) or a multiple of it, "
            f"the last at least {wanted}"
        )
    return buckets
