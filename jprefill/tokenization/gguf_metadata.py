"""The key-value header of a GGUF file, without its tensors.

`gguf.GGUFReader` wraps each string of a vocabulary in NumPy arrays of its own: 4 s for 49k tokens, where this
walk takes 0.1 s. It also refuses lengths that point outside the file.

Source: the GGUF specification, ggml `docs/gguf.md`; little-endian, versions 2 and 3.
"""

import mmap
import struct
from pathlib import Path
from typing import Any

from jprefill.errors import CheckpointError

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read_gguf_metadata(path: Path, prefixes: tuple[str, ...] = ("tokenizer.",)) -> dict[str, Any]:
    """Values by key, of the keys that start with one of `prefixes`.

    Returns:
      Scalars, texts, and lists of them. Bytes that are no UTF-8 become U+FFFD.

    Raises:
      CheckpointError: no GGUF file, a version that is not read here, or a broken header.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(data, path.name).read(prefixes)
    except struct.error:
        raise CheckpointError(f"{path.name}: the GGUF header ends too early") from None
    except ValueError:  # mmap of an empty file
        raise CheckpointError(f"{path.name} is empty") from None
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from None


class _Header:
    """A cursor over the header. Used by one thread, once."""

    def __init__(self, data: mmap.mmap, name: str):
        self._data = data
        self._name = name
        self._offset = 0

    def read(self, prefixes: tuple[str, ...]) -> dict[str, Any]:
        if self._data[:4] != b"GGUF":
            raise CheckpointError(f"{self._name} is no GGUF file")
        self._offset = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise CheckpointError(f"{self._name}: GGUF version {version} is not read here: 2 and 3 are")
        self._scalar("Q")  # number of tensors
        values: dict[str, Any] = {}
        for _ in range(self._scalar("Q")):
            key = self._string()
            value = self._value(self._scalar("I"))
            if key.startswith(prefixes):
                values[key] = value
        return values

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._offset)
        self._offset += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        end = self._scalar("Q") + self._offset
        if end > len(self._data):
            raise CheckpointError(f"{self._name}: a text in the GGUF header is longer than the file")
        text = self._data[self._offset : end].decode(errors="replace")
        self._offset = end
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise CheckpointError(f"{self._name}: unknown GGUF value type {kind}")
        return self._scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, length = self._scalar("I"), self._scalar("Q")
        if length > len(self._data):  # every element takes a byte or more
            raise CheckpointError(f"{self._name}: an array in the GGUF header is longer than the file")
        if kind == _STRING:
            return self._strings(length)
        if (
            kind not in _SCALARS
        ):  # nested arrays too: nobody writes them, and depth would be the file's choice
            raise CheckpointError(f"{self._name}: an array of GGUF value type {kind} is not read here")
        layout = f"<{length}{_SCALARS[kind]}"
        values = list(struct.unpack_from(layout, self._data, self._offset))
        self._offset += struct.calcsize(layout)
        return values

    def _strings(self, length: int) -> list[str]:
        """`_string` so many times, in one loop: a vocabulary has 100,000 of them."""
        data, start = self._data, self._offset
        read_length = struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(length):
            end = start + 8 + read_length(data, start)[0]
            if end > len(data):
                raise CheckpointError(f"{self._name}: a text in the GGUF header is longer than the file")
            texts.append(data[start + 8 : end].decode(errors="replace"))
            start = end
        self._offset = start
        return texts
