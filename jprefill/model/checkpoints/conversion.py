"""`convert`: any source to our checkpoint directory, streamed and atomic."""

import contextlib
import datetime
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jprefill import __version__
from jprefill.config import DType
from jprefill.errors import CheckpointError
from jprefill.model.checkpoints.detect import open_source
from jprefill.model.checkpoints.manifest import FILE_NAME, Manifest, digest_tensor, exact_fingerprint
from jprefill.model.checkpoints.orbax import WEIGHTS, OrbaxSource, file_sizes, write_weights
from jprefill.model.checkpoints.read_ahead import progress_bar, read_ahead
from jprefill.model.checkpoints.source import DTYPES, Kind, WeightSource, cast, check_dtype, check_tensors


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    dtype: DType = "bfloat16",
    overwrite: bool = False,
    progress: bool = True,
) -> Manifest:
    """Writes the model at `src` as a checkpoint directory `dst`.

    Names, shapes and types of all tensors are checked before any data is read. Tensors pass through one by
    one: memory holds a few of them and one group on its way to disk. `dst` appears complete or not at all.

    Args:
      src: what `open_source` takes; also a checkpoint of ours, to change its dtype.
      dst: must not exist, unless `overwrite`.
      dtype: of the stored weights.
      overwrite: replace a checkpoint of ours; any other file or directory is refused all the same.
      progress: show a bar on a terminal.

    Returns:
      The manifest that was written.

    Raises:
      CheckpointError: the source is damaged or incomplete, `dst` is in the way, or the disk fails.
      UnsupportedModelError: the model asks for something that is not implemented.
      ConfigError: an unknown dtype.
    """
    check_dtype(dtype)
    source = open_source(src)
    shapes = check_tensors(source)
    with _new_directory(Path(dst), overwrite=overwrite) as partial:
        digests = _write(source, shapes, partial / WEIGHTS, dtype, progress=progress)
        fingerprint = exact_fingerprint(source.config, digests)
        manifest = _manifest(source, partial, Path(dst).name, dtype, fingerprint)
        manifest.write(partial)
    return manifest


def _write(
    source: WeightSource, shapes: dict[str, tuple[int, ...]], directory: Path, dtype: DType, *, progress: bool
) -> dict[str, bytes]:
    """Streams all tensors into `directory`; returns their digests."""
    digests: dict[str, bytes] = {}

    def read(name: str) -> np.ndarray:
        array = cast(source.read(name), dtype, name)
        digests[name] = digest_tensor(name, array)
        return array

    num_bytes = sum(math.prod(shape) for shape in shapes.values()) * DTYPES[dtype].itemsize
    with progress_bar("converting", num_bytes, progress=progress) as bar:

        def counted() -> Iterator[tuple[str, np.ndarray]]:
            for name, array in read_ahead(read, shapes):
                bar.update(array.nbytes)
                yield name, array

        write_weights(directory, counted())
    return digests


def _manifest(source: WeightSource, directory: Path, name: str, dtype: DType, fingerprint: str) -> Manifest:
    """Completes `directory` with the tokenizer, and describes it under the name that its owner chose."""
    from jprefill.tokenization import copy_tokenizer_files

    kind, source_name = _origin(source)
    return Manifest(
        name=name,
        hf_config=source.hf_config,
        dtype=dtype,
        fingerprint=fingerprint,
        source_kind=kind,
        source_name=source_name,
        weight_files=file_sizes(directory / WEIGHTS),
        tokenizer_files=copy_tokenizer_files(source.tokenizer_path, directory),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        jprefill_version=__version__,
    )


def _origin(source: WeightSource) -> tuple[Kind, str]:
    """What the weights came from at first. Base names only: a manifest can be published, a path cannot."""
    if isinstance(source, OrbaxSource):
        return source.manifest.source_kind, source.manifest.source_name
    return source.kind, source.tokenizer_path.name if source.kind == "gguf" else source.name


@contextlib.contextmanager
def _new_directory(dst: Path, *, overwrite: bool) -> Iterator[Path]:
    """A directory beside `dst` that becomes `dst` when the block ends well and vanishes when it fails.

    Killed in between, it stays behind under its own name, which `open_source` refuses. With `overwrite` the
    old checkpoint is moved aside for the moment of the rename: Python has no swap of directories.
    """
    dst = dst.resolve()
    _check_destination(dst, overwrite=overwrite)
    partial = dst.with_name(f"{dst.name}.partial-{os.getpid()}")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a killed process that had our number
        partial.mkdir(parents=True)
        yield partial
        _check_destination(dst, overwrite=overwrite)
        _put_in_place(partial, dst)
    except OSError as error:
        raise CheckpointError(f"{dst.name}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put_in_place(partial: Path, dst: Path) -> None:
    """Renames `partial` to `dst`; what stood there is deleted only afterwards, and comes back on failure."""
    if not dst.exists():
        partial.rename(dst)
        return
    old = dst.with_name(f"{dst.name}.old-{os.getpid()}")
    dst.rename(old)
    try:
        partial.rename(dst)
    except OSError:
        old.rename(dst)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _check_destination(dst: Path, *, overwrite: bool) -> None:
    """Only a checkpoint of ours is ever replaced, so a mistyped path costs nothing."""
    if not dst.exists():
        return
    if not overwrite:
        raise CheckpointError(f"{dst.name}: exists already; overwrite replaces it")
    if not (dst / FILE_NAME).is_file():
        raise CheckpointError(f"{dst.name}: is not a jprefill checkpoint and is not overwritten")
