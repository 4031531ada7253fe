"""`manifest.json`: what a converted checkpoint says about itself. Written last: where it is, all is."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from jprefill.config import DType, Quantization
from jprefill.errors import CheckpointError
from jprefill.model.checkpoints.hf import read_json_object
from jprefill.model.checkpoints.source import DTYPES, Kind
from jprefill.model.config import ModelConfig
from jprefill.model.quantized import QUANTIZED_DTYPES

FILE_NAME = "manifest.json"
FORMAT_VERSION = 1
_FIELD_TYPES: dict[str, type | tuple[type, ...]] = {
    "quantization": (str, NoneType),
    "hf_config": dict,
    "tokenizer_files": list,
    "weight_files": dict,
    "format_version": int,
}


@dataclass(frozen=True)
class Manifest:
    """Contents of `manifest.json`.

    Attributes:
      name: of the directory that it was converted into: its owner chose it.
      hf_config: Hugging Face `config.json`, or its equivalent for a GGUF file.
      dtype: of every stored tensor that is not quantised.
      fingerprint: `exact_fingerprint` of weights and config, hex.
      source_kind: what it was converted from.
      source_name: base name of that file or directory; no path, so that a manifest can be published.
      weight_files: path under `weights/` -> size in bytes; a truncated copy is found without reading it.
      tokenizer_files: names of the tokenizer files beside the manifest.
      created: UTC, ISO 8601.
      jprefill_version: of the converter.
      quantization: of the projection matrices; None (also where an older manifest has no such key): none.
    """

    name: str
    hf_config: dict[str, Any]
    dtype: DType
    fingerprint: str
    source_kind: Kind
    source_name: str
    weight_files: dict[str, int]
    tokenizer_files: tuple[str, ...]
    created: str
    jprefill_version: str
    quantization: Quantization | None = None
    format_version: int = FORMAT_VERSION

    def write(self, directory: Path) -> None:
        """Writes `manifest.json` into `directory`."""
        (directory / FILE_NAME).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Reads and checks `manifest.json`.

        Raises:
          CheckpointError: it is missing, garbled, of another format version, or a value cannot be right.
        """
        values = read_json_object(directory / FILE_NAME)
        version = values.get("format_version")
        if version != FORMAT_VERSION:
            raise CheckpointError(f"{FILE_NAME}: format_version={version!r}: {FORMAT_VERSION} is read")
        values.setdefault("quantization", None)
        known = {f.name for f in fields(cls)}
        if wrong := sorted(known ^ values.keys()):
            raise CheckpointError(f"{FILE_NAME}: key {wrong[0]!r} is {'missing' if wrong[0] in known else 'unknown'}")
        for key, value in values.items():
            if not isinstance(value, _FIELD_TYPES.get(key, str)):
                raise CheckpointError(f"{FILE_NAME}: {key}={value!r} has the wrong type")
        _check_values(values)
        values["tokenizer_files"] = tuple(values["tokenizer_files"])  # JSON knows lists only
        return cls(**values)


def _check_values(values: dict[str, Any]) -> None:
    if values["dtype"] not in DTYPES:
        raise CheckpointError(f"{FILE_NAME}: dtype={values['dtype']!r}: {', '.join(DTYPES)} are read")
    if values["quantization"] not in (None, *QUANTIZED_DTYPES):
        known = ", ".join(QUANTIZED_DTYPES)
        raise CheckpointError(f"{FILE_NAME}: quantization={values['quantization']!r}: {known} are read")
    if values["source_kind"] not in ("hf", "gguf"):
        raise CheckpointError(f"{FILE_NAME}: source_kind={values['source_kind']!r}: 'hf' and 'gguf' are known")
    if not re.fullmatch(r"[0-9a-f]{64}", values["fingerprint"]):
        raise CheckpointError(f"{FILE_NAME}: fingerprint={values['fingerprint']!r} is no SHA-256")
    for file, num_bytes in values["weight_files"].items():
        if type(num_bytes) is not int or ".." in file or file.startswith("/"):
            raise CheckpointError(f"{FILE_NAME}: weight_files: {file!r}: {num_bytes!r} cannot be")
    if not all(isinstance(file, str) for file in values["tokenizer_files"]):
        raise CheckpointError(f"{FILE_NAME}: tokenizer_files must be file names")


def digest_tensor(name: str, array: np.ndarray) -> bytes:
    """SHA-256 of name, shape, dtype and bytes; releases the GIL, so that threads run side by side."""
    digest = hashlib.sha256(repr((name, array.shape, array.dtype.name)).encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return digest.digest()


def exact_fingerprint(config: ModelConfig, digests: dict[str, bytes]) -> str:
    """Hex SHA-256 over the config and every tensor's digest, by name. One changed bit anywhere changes it."""
    digest = hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode())
    for name in sorted(digests):
        digest.update(digests[name])
    return digest.hexdigest()
