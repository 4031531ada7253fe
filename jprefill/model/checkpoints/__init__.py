"""Weights on disk: Hugging Face, GGUF and our Orbax folders; `convert` to the last, `load` to the device.

Names are loaded on first use: reading a GGUF header needs no JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jprefill.model.checkpoints.conversion import convert
    from jprefill.model.checkpoints.detect import open_source
    from jprefill.model.checkpoints.loading import Checkpoint, load
    from jprefill.model.checkpoints.manifest import Manifest
    from jprefill.model.checkpoints.source import WeightSource

_MODULES = {
    "Checkpoint": "loading",
    "Manifest": "manifest",
    "WeightSource": "source",
    "convert": "conversion",
    "load": "loading",
    "open_source": "detect",
}

__all__ = ["Checkpoint", "Manifest", "WeightSource", "convert", "load", "open_source"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
