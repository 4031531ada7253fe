"""Which device a program is being traced for."""

from typing import NamedTuple

import jax


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
