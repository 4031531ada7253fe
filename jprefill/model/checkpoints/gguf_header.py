"""The header of a GGUF file, read strictly: metadata, tensor names, types, shapes and offsets. No JAX.

`gguf.GGUFReader` trusts every length in the file: damaged ones make it loop or return empty arrays, and a
vocabulary takes it seconds. Here each length is checked against the file's size before it is followed.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from jprefill.errors import CheckpointError
from jprefill.model.checkpoints.source import StoredTensor

_SCALARS: dict[GGUFValueType, str] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}
_VERSIONS = (2, 3)
_MAX_DIMS = 4


@dataclass(frozen=True)
class GGUFHeader:
    """What a GGUF file says before its data.

    Attributes:
      metadata: key -> number, bool, string, or list of those.
      tensors: by the file's own names; shapes in row-major order (`[out, in]`), `format` a ggml type name.
      raw: the header's bytes, for a fingerprint.
    """

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]
    raw: bytes


class _Damaged(Exception):
    """Something in the header cannot be; the message says what."""


class _Cursor:
    """Walks over the file's bytes; every step is checked against the end."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.offset = 0

    def take(self, num_bytes: int) -> bytes:
        """The next bytes."""
        end = self.offset + num_bytes
        if end > len(self.data):
            raise _Damaged(f"byte {end} is asked for, the file ends at {len(self.data)}")
        start, self.offset = self.offset, end
        return self.data[start:end]

    def scalars(self, letter: str, count: int = 1) -> tuple[Any, ...]:
        """`count` little-endian numbers."""
        return struct.unpack(f"<{count}{letter}", self.take(count * struct.calcsize(f"<{letter}")))

    def text(self) -> str:
        """A length-prefixed string; bytes that are no UTF-8 become U+FFFD, which matches no name."""
        return self.take(self.scalars("Q")[0]).decode(errors="replace")

    def value(self, kind: int) -> Any:
        """One metadata value of the type numbered `kind`."""
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind == GGUFValueType.ARRAY:
            item_kind, count = self.scalars("I")[0], self.scalars("Q")[0]
            if item_kind == GGUFValueType.STRING:
                return [self.text() for _ in range(count)]
            return list(self.scalars(_letter(item_kind), count))
        return self.scalars(_letter(kind))[0]


def read_gguf_header(path: Path) -> GGUFHeader:
    """Reads the header and checks that the file holds every tensor's bytes.

    Raises:
      CheckpointError: the file is missing, no GGUF, damaged or truncated; names file and tensor.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, _Cursor(data))
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise CheckpointError(f"{path.name}: truncated: the file is empty") from None
    except _Damaged as error:
        raise CheckpointError(f"{path.name}: the GGUF header is damaged or truncated: {error}") from None


def _parse(path: Path, cursor: _Cursor) -> GGUFHeader:
    if cursor.take(4) != b"GGUF":
        raise _Damaged("it does not start with 'GGUF'")
    (version,) = cursor.scalars("I")
    if version not in _VERSIONS:
        raise _Damaged(f"version {version}: little-endian 2 and 3 are read")
    num_tensors, num_keys = cursor.scalars("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.text()
        if key in metadata:
            raise _Damaged(f"key {key!r} comes twice")
        metadata[key] = cursor.value(cursor.scalars("I")[0])
    entries = [_read_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise _Damaged(f"general.alignment={alignment!r}")
    data_offset = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise _Damaged(f"tensor {name!r} comes twice")
        tensors[name] = _locate(path, name, shape, kind, data_offset + offset, len(cursor.data))
    _refuse_overlap(tensors)
    return GGUFHeader(metadata, tensors, cursor.data[: cursor.offset])


def _read_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, type number and offset of one tensor."""
    name = cursor.text()
    (num_dims,) = cursor.scalars("I")
    if num_dims > _MAX_DIMS:
        raise _Damaged(f"tensor {name!r} has {num_dims} dimensions")
    shape = cursor.scalars("Q", num_dims)[::-1]  # the file counts from the fastest axis
    return name, shape, cursor.scalars("I")[0], cursor.scalars("Q")[0]


def _locate(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int, num_file_bytes: int) -> StoredTensor:
    """The tensor's place in the file."""
    try:
        ggml_type = GGMLQuantizationType(kind)
    except ValueError:
        raise _Damaged(f"tensor {name!r} has the unknown type {kind}") from None
    block_size, block_bytes = GGML_QUANT_SIZES[ggml_type]
    if shape and shape[-1] % block_size:
        raise _Damaged(f"tensor {name!r}: rows of {shape[-1]} are no whole {ggml_type.name} blocks of {block_size}")
    num_bytes = math.prod(shape) // block_size * block_bytes
    if offset + num_bytes > num_file_bytes:
        raise _Damaged(f"tensor {name!r} ends at byte {offset + num_bytes}, the file at {num_file_bytes}")
    return StoredTensor(path, offset, num_bytes, shape, ggml_type.name)


def _refuse_overlap(tensors: dict[str, StoredTensor]) -> None:
    """Two tensors on the same bytes mean a wrong offset, and wrong weights without a word."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if tensor.offset < end:
            raise _Damaged(f"tensor {name!r} starts inside another")
        end = tensor.offset + tensor.num_bytes


def _letter(kind: int) -> str:
    try:
        return _SCALARS[GGUFValueType(kind)]
    except (ValueError, KeyError):
        raise _Damaged(f"value type {kind} is unknown or nested") from None
