"""Our own checkpoint directories: `manifest.json`, tokenizer files, and the weights as an Orbax v1 pytree.

Orbax is imported where it is used: it takes a fifth of a second, and other formats do not need it.
"""

import contextlib
import hashlib
import math
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jprefill.config import DType, Quantization
from jprefill.errors import CheckpointError
from jprefill.model.checkpoints.manifest import Manifest
from jprefill.model.checkpoints.source import DTYPES, Kind
from jprefill.model.config import ModelConfig
from jprefill.model.quantized import QUANTIZED_DTYPES, Quantized
from jprefill.model.weights import is_projection, scale_name

WEIGHTS = "weights"
_GROUP_BYTES = 256 * 2**20


class OrbaxSource:
    """A directory written by `convert`. Invariant: see `WeightSource`."""

    kind: Kind = "orbax"

    def __init__(self, directory: Path):
        """Reads the manifest and the names, shapes and types of the weights.

        Raises:
          CheckpointError: the manifest or the weights' metadata is missing or damaged.
          UnsupportedModelError: the config asks for something that is not implemented.
        """
        self.manifest = Manifest.read(directory)
        self.name = self.manifest.name
        self.quantization: Quantization | None = self.manifest.quantization
        self.tokenizer_path = directory
        self.hf_config = self.manifest.hf_config
        self.config = ModelConfig.from_hf(self.hf_config)
        self._weights = directory.absolute() / WEIGHTS  # Orbax refuses relative paths
        self._lock = threading.Lock()
        _check_files(self._weights, self.manifest.weight_files)
        self._metadata = _read_metadata(self._weights)

    def names(self) -> set[str]:
        """See `WeightSource`."""
        scales = {scale_name(name) for name in self._metadata if self._is_quantized(name)}
        return set(self._metadata) - scales

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource`."""
        return tuple(self._entry(name).shape)

    def dtype(self, name: str) -> np.dtype:
        """See `WeightSource`."""
        if not self._is_quantized(name):
            return self._checked_dtype(name, DTYPES[self.manifest.dtype])
        scale, shape = scale_name(name), self.shape(name)
        self._checked_dtype(scale, np.dtype(np.float32))
        if self.shape(scale) != shape[:1]:
            raise CheckpointError(f"{WEIGHTS}: {scale!r} has shape {self.shape(scale)}, its weight {shape}")
        return self._checked_dtype(name, QUANTIZED_DTYPES[str(self.quantization)])

    def _checked_dtype(self, name: str, expected: np.dtype) -> np.dtype:
        dtype = np.dtype(self._entry(name).dtype)
        if dtype != expected:
            raise CheckpointError(
                f"{WEIGHTS}: tensor {name!r} has dtype {dtype.name}, the manifest says {expected.name}"
            )
        return dtype

    def file_name(self, name: str) -> str:
        """See `WeightSource`."""
        return WEIGHTS

    def read(self, name: str) -> np.ndarray | Quantized:
        """See `WeightSource`. A call costs about 10 ms whatever the size; `read_all` has no such cost."""
        return self._read([name])[name]

    def read_all(self, names: Iterable[str]) -> Iterator[tuple[str, np.ndarray | Quantized]]:
        """Yields `(name, array)` in the order of `names`, a group of them in memory at a time.

        Raises:
          CheckpointError: a file cannot be read.
        """
        for group in _grouped((name, self._num_bytes(name)) for name in names):
            arrays = self._read(group)
            for name in group:
                yield name, arrays.pop(name)

    def _is_quantized(self, name: str) -> bool:
        return self.quantization is not None and is_projection(name)

    def _read(self, names: list[str]) -> dict[str, np.ndarray | Quantized]:
        """Tensors by name, each quantised one with its scales."""
        scales = {name: scale_name(name) for name in names if self._is_quantized(name)}
        arrays = self._read_arrays([*names, *scales.values()])
        return {
            name: Quantized(arrays[name], arrays[scales[name]]) if name in scales else arrays[name] for name in names
        }

    def _read_arrays(self, names: list[str]) -> dict[str, np.ndarray]:
        from orbax.checkpoint import v1 as ocp

        abstract = {name: np.ndarray for name in names if self._entry(name)}
        context = ocp.Context()
        context.pytree_options.loading.partial_load = True
        # Orbax numbers its operations per process; two at a time are not documented as safe.
        with self._lock, _orbax_errors(self._weights), context:
            return dict(ocp.load(str(self._weights), abstract))

    def _num_bytes(self, name: str) -> int:
        return math.prod(self.shape(name)) * self.dtype(name).itemsize

    def fingerprint(self, dtype: DType, quantization: Quantization | None) -> str:
        """See `WeightSource`. The manifest's; for weights that will run in another form, derived from both."""
        stored = self.manifest
        if (dtype, quantization) == (stored.dtype, stored.quantization):
            return stored.fingerprint
        return hashlib.sha256(f"{stored.fingerprint} {dtype} {quantization}".encode()).hexdigest()

    def _entry(self, name: str) -> Any:
        try:
            return self._metadata[name]
        except KeyError:
            raise CheckpointError(f"{WEIGHTS}: tensor {name!r} is missing") from None


def write_weights(directory: Path, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes `directory` in groups, so that memory holds a group or two and never the whole model.

    Not compressed: bf16 weights shrink by a quarter but take twice as long to load (SmolLM2-135M, 2 cores).

    Raises:
      CheckpointError: the disk is full or the files cannot be written.
    """
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array_options.saving.use_compression = False
    context.memory_options.deepcopy_host_arrays = False  # nobody changes them while they are written
    with context:
        group: dict[str, np.ndarray] = {}
        for name, array in arrays:
            group[name] = array
            if sum(array.nbytes for array in group.values()) >= _GROUP_BYTES:
                with _orbax_errors(directory):
                    ocp.partial.save(str(directory), group)
                group = {}
        with _orbax_errors(directory):
            if group:
                ocp.partial.save(str(directory), group)
            ocp.partial.finalize(str(directory))


def file_sizes(directory: Path) -> dict[str, int]:
    """Relative path -> bytes of every file under `directory`."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}


def _check_files(weights: Path, sizes: dict[str, int]) -> None:
    """Finds missing and truncated files before Orbax does, whose error names no file and fills pages."""
    for name, num_bytes in sizes.items():
        path = weights / name
        if not path.is_file():
            raise CheckpointError(f"{weights.name}/{name}: is missing")
        if path.stat().st_size != num_bytes:
            raise CheckpointError(
                f"{weights.name}/{name}: truncated or changed: has {path.stat().st_size} bytes of {num_bytes}"
            )


def _grouped(sizes: Iterable[tuple[str, int]]) -> Iterator[list[str]]:
    """Names in order, cut where a group reaches `_GROUP_BYTES`."""
    group: list[str] = []
    total = 0
    for name, num_bytes in sizes:
        group.append(name)
        total += num_bytes
        if total >= _GROUP_BYTES:
            yield group
            group, total = [], 0
    if group:
        yield group


def _read_metadata(weights: Path) -> dict[str, Any]:
    """Name -> shape and dtype of every stored tensor."""
    from orbax.checkpoint import v1 as ocp

    with _orbax_errors(weights):
        metadata = ocp.metadata(str(weights)).metadata
    if not isinstance(metadata, dict) or not all(hasattr(entry, "shape") for entry in metadata.values()):
        raise CheckpointError(f"{weights.name}: the Orbax metadata is damaged or no flat set of tensors")
    return metadata


@contextlib.contextmanager
def _orbax_errors(weights: Path) -> Iterator[None]:
    """Orbax and TensorStore report bad files by many types; the caller gets one, in one line."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{weights.name}: Orbax: {reason[:300]}") from error
