"""Hugging Face directories: `config.json` and safetensors files, one or sharded.

The header is read here and not by the `safetensors` package: its NumPy side has no bfloat16, and a damaged
file must name the tensor that it hurts. Format: an 8-byte little-endian header length, that many bytes of
JSON (`name -> dtype, shape, data_offsets`), then the data without gaps.
Source: https://github.com/huggingface/safetensors, README "Format".
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jprefill.config import DType, Quantization
from jprefill.errors import CheckpointError
from jprefill.model.checkpoints.published import (
    Published,
    check_scale,
    published_quantization,
    quantized_of,
    split_scales,
    without_quantization,
)
from jprefill.model.checkpoints.source import Kind, StoredTensor, find
from jprefill.model.config import ModelConfig
from jprefill.model.quantized import QUANTIZED_DTYPES, Quantized

_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_ITEM_BITS = {"F64": 64, "I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16, "I8": 8, "U8": 8}
_ITEM_BITS |= {"BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F32": 32, "F16": 16, "BF16": 16}
_MAX_HEADER_BYTES = 100_000_000
_INDEX = "model.safetensors.index.json"


class HFSource:
    """A local Hugging Face directory. Invariant: see `WeightSource`."""

    kind: Kind = "hf"

    def __init__(self, directory: Path, name: str | None = None):
        """Reads config and headers.

        Args:
          directory: holds `config.json`, safetensors files and the tokenizer.
          name: the model's name; None takes the directory's.

        Raises:
          CheckpointError: a file is missing, damaged or truncated.
          UnsupportedModelError: the config asks for something that is not implemented.
        """
        self.name = name or directory.resolve().name
        self.tokenizer_path = directory
        hf = read_json_object(directory / "config.json")
        self._published: Published | None = published_quantization(hf)
        self.quantization: Quantization | None = None if self._published is None else self._published.quantization
        self.hf_config = without_quantization(hf)
        self.config = ModelConfig.from_hf(self.hf_config)
        self._files, self._tensors = _open_files(directory)
        self._scales: dict[str, StoredTensor] = {}
        if self._published is not None:
            self._tensors, self._scales = split_scales(self._tensors)

    def names(self) -> set[str]:
        """See `WeightSource`."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource`."""
        return find(self._tensors, name, self.name).shape

    def dtype(self, name: str) -> np.dtype:
        """See `WeightSource`."""
        tensor = find(self._tensors, name, self.name)
        if self._published is not None and name in self._scales:
            _plain_dtype(self._scales[name], f"scale of {name!r}")
            check_scale(name, tensor, self._scales[name], self._published)
            return QUANTIZED_DTYPES[self._published.quantization]
        return _plain_dtype(tensor, f"tensor {name!r}")

    def file_name(self, name: str) -> str:
        """See `WeightSource`."""
        return find(self._tensors, name, self.name).file.name

    def read(self, name: str) -> np.ndarray | Quantized:
        """See `WeightSource`."""
        dtype = self.dtype(name)
        tensor = self._tensors[name]
        values = tensor.read_bytes(name).view(dtype).reshape(tensor.shape)
        if self._published is None or name not in self._scales:
            return values
        scale = self._scales[name]
        numbers = scale.read_bytes(f"scale of {name}").view(_DTYPES[scale.format]).reshape(scale.shape)
        return quantized_of(name, values, numbers, self._published)

    def fingerprint(self, dtype: DType, quantization: Quantization | None) -> str:
        """See `WeightSource`. From headers, sizes and times of change: no weight is read."""
        return cheap_fingerprint(self._files, self.config, dtype, quantization, self._published)


def read_json_object(path: Path) -> dict[str, Any]:
    """Parses a JSON file whose root is an object; anything else is a `CheckpointError` naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent.name}: {path.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name}: must be a JSON object, is {type(value).__name__}")
    return value


def _plain_dtype(tensor: StoredTensor, what: str) -> np.dtype:
    if tensor.format not in _DTYPES:
        raise CheckpointError(
            f"{tensor.file.name}: {what} has dtype {tensor.format}: {', '.join(_DTYPES)} are implemented"
        )
    return _DTYPES[tensor.format]


def cheap_fingerprint(headers: dict[Path, bytes], config: ModelConfig, *how: object) -> str:
    """Identity of files loaded in place: header bytes, size and time of change of each, config, and how it will run.

    Copying or touching a file changes it: a cold prefix store, never a wrong hit. A file rewritten with the
    same header, size and time keeps it: convert where that can happen.
    """
    digest = hashlib.sha256(repr((config, *how)).encode())
    for path, header in sorted(headers.items()):
        stat = path.stat()
        digest.update(repr((path.name, stat.st_size, stat.st_mtime_ns)).encode())
        digest.update(header)
    return digest.hexdigest()


def _open_files(directory: Path) -> tuple[dict[Path, bytes], dict[str, StoredTensor]]:
    """Headers of all weight files, and the tensors they hold."""
    weight_map = _weight_map(directory)
    paths = sorted({directory / file for file in weight_map.values()}) or [_only_file(directory)]
    headers, tensors = {}, {}
    for path in paths:
        headers[path], entries = read_header(path)
        tensors |= {name: entry for name, entry in entries.items() if weight_map.get(name, path.name) == path.name}
    for name, file in weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"{file}: tensor {name!r} is missing, {_INDEX} says it is there")
    return headers, tensors


def _only_file(directory: Path) -> Path:
    """`model.safetensors`, or the only safetensors file there is."""
    if (directory / "model.safetensors").exists():
        return directory / "model.safetensors"
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(f"{directory.name}: holds {len(found)} safetensors files and no {_INDEX}")
    raise CheckpointError(f"{directory.name}: holds no safetensors file, the only weight files that are read")


def _weight_map(directory: Path) -> dict[str, str]:
    """Tensor -> shard file from the index; empty where the model is one file."""
    path = directory / _INDEX
    if (directory / "model.safetensors").exists() or not path.exists():
        return {}
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{_INDEX}: has no 'weight_map'")
    for name, file in weight_map.items():
        # A shard outside the directory would let a downloaded index read any file.
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{_INDEX}: tensor {name!r} is in {file!r}, which is no file name")
    return weight_map


def read_header(path: Path) -> tuple[bytes, dict[str, StoredTensor]]:
    """Header bytes and tensors of one safetensors file, every offset checked against the file's size.

    Raises:
      CheckpointError: the file is missing, truncated, or its header is damaged.
    """
    header, num_data_bytes = _header_bytes(path)
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path.name}: the safetensors header is damaged: it is not JSON") from None
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path.name}: the safetensors header is damaged: it is no JSON object")
    entries.pop("__metadata__", None)
    tensors = {name: _entry(path, name, entry, 8 + len(header)) for name, entry in entries.items()}
    _check_layout(path, tensors, 8 + len(header), num_data_bytes)
    return header, tensors


def _header_bytes(path: Path) -> tuple[bytes, int]:
    """The JSON part, and how many bytes of data follow it."""
    try:
        with path.open("rb") as file:
            num_bytes = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if num_bytes < 8 or length > _MAX_HEADER_BYTES or 8 + length > num_bytes:
                raise CheckpointError(
                    f"{path.name}: the safetensors header is damaged or truncated: it claims {length} bytes "
                    f"of a {num_bytes}-byte file"
                )
            return file.read(length), num_bytes - 8 - length
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent.name}: weight file {path.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read: {error.strerror}") from None


def _entry(path: Path, name: str, entry: Any, data_offset: int) -> StoredTensor:
    """One header entry, its own parts checked against each other."""
    damaged = CheckpointError(f"{path.name}: the safetensors header is damaged at tensor {name!r}")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise damaged
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise damaged
    begin, end = offsets
    # Element types this table does not know keep an unchecked size: they are refused by name when asked for.
    if end < begin or (dtype in _ITEM_BITS and math.prod(shape) * _ITEM_BITS[dtype] != 8 * (end - begin)):
        raise damaged
    return StoredTensor(path, data_offset + begin, end - begin, tuple(shape), dtype)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _check_layout(path: Path, tensors: dict[str, StoredTensor], data_offset: int, num_data_bytes: int) -> None:
    """The data lies without gap or overlap and ends where the file ends."""
    end = data_offset
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if tensor.offset != end:
            raise CheckpointError(f"{path.name}: the safetensors header is damaged: gap or overlap at tensor {name!r}")
        end += tensor.num_bytes
        if end - data_offset > num_data_bytes:
            raise CheckpointError(
                f"{path.name}: truncated: tensor {name!r} ends at byte {end}, "
                f"the file at {data_offset + num_data_bytes}"
            )
    if end - data_offset != num_data_bytes:
        raise CheckpointError(f"{path.name}: {num_data_bytes - (end - data_offset)} bytes follow the last tensor")
