"""`convert`: any source to our checkpoint directory, streamed and atomic."""

import contextlib
import datetime
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jprefill import __version__
from jprefill.config import DType, Quantization
from jprefill.errors import CheckpointError
from jprefill.model.checkpoints.detect import open_source
from jprefill.model.checkpoints.manifest import FILE_NAME, Manifest, digest_tensor, exact_fingerprint
from jprefill.model.checkpoints.orbax import WEIGHTS, OrbaxSource, file_sizes, write_weights
from jprefill.model.checkpoints.read_ahead import progress_bar, read_ahead
from jprefill.model.checkpoints.source import (
    DTYPES,
    Kind,
    WeightSource,
    check_dtype,
    check_quantization,
    check_tensors,
    leaves_of,
)
from jprefill.model.weights import weight_leaves


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    dtype: DType = "bfloat16",
    quantization: Quantization | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Manifest:
    """Writes the model at `src` as a checkpoint directory `dst`.

    Names, shapes and types of all tensors are checked before any data is read. Tensors pass through one by
    one: memory holds a few of them and one group on its way to disk. `dst` appears complete or not at all.

    Args:
      src: what `open_source` takes; also a checkpoint of ours, to change its dtype.
      dst: must not exist, unless `overwrite`.
      dtype: of the stored weights that are not quantised.
      quantization: of the projection matrices; None leaves them as the source has them.
      overwrite: replace a checkpoint of ours; any other file or directory is refused all the same.
      progress: show a bar on a terminal.

    Returns:
      The manifest that was written.

    Raises:
      CheckpointError: the source is damaged or incomplete, `dst` is in the way, or the disk fails.
      UnsupportedModelError: the model asks for something that is not implemented.
      ConfigError: an unknown dtype or quantization, or weights that are quantised in another way already.
    """
    check_dtype(dtype)
    source = open_source(src)
    kept_in = check_quantization(source, quantization)
    names = list(check_tensors(source, quantization))
    with _new_directory(Path(dst), overwrite=overwrite) as partial:
        digests = _write(source, names, partial / WEIGHTS, dtype, kept_in, progress=progress)
        fingerprint = exact_fingerprint(source.config, digests)
        manifest = _manifest(source, partial, Path(dst).name, dtype, kept_in, fingerprint)
        manifest.write(partial)
    return manifest


def _write(
    source: WeightSource,
    names: list[str],
    directory: Path,
    dtype: DType,
    quantization: Quantization | None,
    *,
    progress: bool,
) -> dict[str, bytes]:
    """Streams all tensors into `directory`; returns the digests of what was written."""
    digests: dict[str, bytes] = {}

    def read(name: str) -> dict[str, np.ndarray]:
        leaves = leaves_of(name, source.read(name), dtype, quantization)
        digests.update({leaf: digest_tensor(leaf, array) for leaf, array in leaves.items()})
        return leaves

    num_bytes = sum(leaf.num_bytes for leaf in weight_leaves(source.config, DTYPES[dtype], quantization).values())
    with progress_bar("converting", num_bytes, progress=progress) as bar:

        def counted() -> Iterator[tuple[str, np.ndarray]]:
            for _, leaves in read_ahead(read, names):
                for leaf, array in leaves.items():
                    bar.update(array.nbytes)
                    yield leaf, array

        write_weights(directory, counted())
    return digests


def _manifest(
    source: WeightSource,
    directory: Path,
    name: str,
    dtype: DType,
    quantization: Quantization | None,
    fingerprint: str,
) -> Manifest:
    """Completes `directory` with the tokenizer, and describes it under the name that its owner chose."""
    from jprefill.tokenization import copy_tokenizer_files

    kind, source_name = _origin(source)
    return Manifest(
        name=name,
        hf_config=source.hf_config,
        dtype=dtype,
        quantization=quantization,
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
