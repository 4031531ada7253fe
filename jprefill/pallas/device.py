"""Which device a program is being traced for, and how large a bite suits it."""

from typing import NamedTuple

import jax

SMALL_GPU_BYTES = 32 * 10**9


class Target(NamedTuple):
    """`platform` is "cpu" or "gpu"; `kind` is the vendor's name, such as "NVIDIA L4"."""

    platform: str
    kind: str


def trace_target() -> Target:
    """The abstract device of the mesh in use (compiling for a GPU that is not there), or else the default device."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return Target(abstract.platform, abstract.device_kind)
    device = jax.devices()[0]
    return Target(device.platform, device.device_kind)


def chunk_size_for(memory_bytes: int | None) -> int:
    """Tokens per step of a layer's loops where nobody asked for a number.

    Large enough to keep a GPU busy, smaller where memory is short; a CPU is busy with 256.

    Args:
      memory_bytes: of a GPU; None: of no GPU.
    """
    if memory_bytes is None:
        return 256
    return 1024 if memory_bytes < SMALL_GPU_BYTES else 2048


def default_chunk_size() -> int:
    """`chunk_size_for` the default device."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return chunk_size_for(None)
    stats = device.memory_stats() or {}
    return chunk_size_for(stats.get("bytes_limit", SMALL_GPU_BYTES))
