"""Weights on disk: Hugging Face, GGUF and our Orbax folders; `convert` to the last, `load` to the device."""

from jprefill.model.checkpoints.convert import convert
from jprefill.model.checkpoints.detect import open_source
from jprefill.model.checkpoints.load import Checkpoint, load
from jprefill.model.checkpoints.manifest import Manifest
from jprefill.model.checkpoints.source import WeightSource

__all__ = ["Checkpoint", "Manifest", "WeightSource", "convert", "load", "open_source"]
