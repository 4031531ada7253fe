"""What fits beside the weights on the device that is there: the plan's numbers, from the executables themselves."""

import logging

import jax
import numpy as np

from jprefill.config import DType, EngineConfig
from jprefill.errors import ConfigError
from jprefill.model.layouts import LayoutSpec
from jprefill.model.memory import library_bytes
from jprefill.model.programs import Programs
from jprefill.planner.search import longest_input

log = logging.getLogger("jprefill.engine")

_ROW_BYTES = 64  # of vectors beside a token's activations: positions, ranges


def free_bytes() -> int | None:
    """Memory of the default device that nothing holds yet; None where the device does not say, as a CPU."""
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"]


def longest_fitting(spec: LayoutSpec, settings: EngineConfig, wanted: int) -> int | None:
    """The longest pass, in tokens, up to `wanted`, that the memory left by the weights holds.

    Call it when the weights are on the device and nothing else is. Where `wanted` fits, one bucket is compiled, which
    the compilation cache then has; else a few more.

    Returns:
      `wanted`, or a multiple of the chunk size below it; 0 if not one chunk fits; None where the device does not say.
    """
    free = free_bytes()
    if free is None:
        return None
    budget = free - library_bytes(spec.config, spec.quantization)

    def measure(bucket: int) -> int:
        return Programs.compile(spec, settings.layout, settings.dtype, (bucket,)).of(bucket).pass_bytes

    step = spec.chunk_size
    if measure(-(-wanted // step) * step) <= budget:
        return wanted
    return longest_input(measure, budget, step=step, at_most=wanted, probe=wanted // 2)


def check_fit(limit: int | None, settings: EngineConfig, max_model_len: int) -> int:
    """The longest prompt to serve: `max_model_len`, or less where nobody asked for so much and it does not fit.

    Args:
      limit: from `longest_fitting`.

    Raises:
      ConfigError: a length that was asked for does not fit; the message holds the limit.
    """
    if limit is None:
        return max_model_len
    wanted = {"max_model_len": settings.max_model_len, "max_batch_tokens": settings.max_batch_tokens}
    wanted["buckets"] = max(settings.buckets or (0,))
    for name, length in wanted.items():
        if length is not None and length > limit:
            raise ConfigError(f"{name}={length}: the device holds passes of at most {limit} tokens beside the weights")
    if limit == 0:
        raise ConfigError("the device has no room for a pass of one chunk of tokens beside the weights")
    if max_model_len > limit:
        log.warning("max_model_len is %d: the model was made for %d, the device holds no more", limit, max_model_len)
    return min(limit, max_model_len)


def bytes_beside_passes(spec: LayoutSpec, dtype: DType, programs: Programs) -> int | None:
    """Device memory that is left for a prefix pool; None where the device does not say.

    Call it when weights and KV buffer are on the device and no pass runs.
    """
    free = free_bytes()
    if free is None:
        return None
    needed = max(programs.of(bucket).pass_bytes for bucket in programs.buckets)
    # The KV buffer counts in a pass, and lies there already.
    return free + _kv_bytes(spec, dtype, programs) - needed - library_bytes(spec.config, spec.quantization)


def suspension_bytes(spec: LayoutSpec, dtype: DType, programs: Programs) -> int:
    """Device memory beyond that of the largest pass, for when it waits between two layers for one of the next bucket.

    What waits are activations and row vectors; the KV buffer is free.
    """
    if len(programs.buckets) < 2:
        return 0
    second, last = programs.buckets[-2:]
    waits = last * (spec.config.embed_dim * np.dtype(dtype).itemsize + _ROW_BYTES)
    return max(0, waits + programs.of(second).pass_bytes - programs.of(last).pass_bytes)


def _kv_bytes(spec: LayoutSpec, dtype: DType, programs: Programs) -> int:
    heads = spec.config.num_kv_heads * spec.config.head_dim
    return 2 * programs.buckets[-1] * heads * np.dtype(dtype).itemsize
