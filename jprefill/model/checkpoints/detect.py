"""`open_source`: which format a path holds."""

import re
from pathlib import Path

from jprefill.errors import CheckpointError
from jprefill.model.checkpoints import manifest
from jprefill.model.checkpoints.source import WeightSource


def open_source(path: str | Path) -> WeightSource:
    """Opens a converted checkpoint, a Hugging Face directory, a GGUF file, or an `org/name` of the hub.

    A local path always wins over the hub. Only headers are read.

    Raises:
      CheckpointError: nothing there that can be read, or it is damaged.
      UnsupportedModelError: the model asks for something that is not implemented.
    """
    local = Path(path)
    if local.is_dir():
        return _open_directory(local)
    if local.exists():
        return _open_file(local)
    from jprefill.model.checkpoints import hub

    if not hub.is_repo_id(str(path)):
        raise CheckpointError(f"{path}: no such file or directory")
    from jprefill.model.checkpoints.hf import HFSource

    return HFSource(hub.download(str(path)), name=str(path))


def _open_file(path: Path) -> WeightSource:
    if path.suffix != ".gguf":
        raise CheckpointError(f"{path.name}: is a file: of single files only .gguf is read")
    from jprefill.model.checkpoints.gguf import GGUFSource

    return GGUFSource(path)


def _open_directory(directory: Path) -> WeightSource:
    name = directory.resolve().name
    if re.search(r"\.(partial|old)-\d+$", name):
        raise CheckpointError(f"{name}: is left from an interrupted conversion; convert again")
    if (directory / manifest.FILE_NAME).exists():
        from jprefill.model.checkpoints.orbax import OrbaxSource

        return OrbaxSource(directory)
    if (directory / "config.json").exists():
        from jprefill.model.checkpoints.hf import HFSource

        return HFSource(directory)
    files = sorted(directory.glob("*.gguf"))
    if len(files) == 1:
        return _open_file(files[0])
    if files:
        raise CheckpointError(f"{name}: holds {len(files)} .gguf files; name one")
    raise CheckpointError(f"{name}: holds neither {manifest.FILE_NAME}, nor config.json, nor a .gguf file")
