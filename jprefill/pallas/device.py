"""Which device a program is being traced for, and how large a bite suits it."""

from typing import NamedTuple

import jax

from jprefill.config import SMALL_GPU_BYTES, chunk_size_for


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


def default_chunk_size() -> int:
    """`chunk_size_for` the default device."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return chunk_size_for(None)
    stats = device.memory_stats() or {}
    return chunk_size_for(stats.get("bytes_limit", SMALL_GPU_BYTES))
