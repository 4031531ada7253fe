"""The blocks of one prompt as one safetensors file: how KV is handed from one machine to another. No JAX.

    kv       [n, L, 2, block_size, K, H]   of the prompt's first n blocks
    tokens   int32 [n, block_size]
    keys     uint8 [n, 32]
    metadata format_version, fingerprint, model, checksum (xxh3-128 of kv and tokens); all as text

Whoever reads it believes nothing: the keys are computed again from the tokens, model and salt.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jprefill.errors import InvalidRequestError
from jprefill.kvstore.block_file import BlockForm, bytes_of, checksum
from jprefill.kvstore.hashing import KEY_BYTES, BlockKeys, KeyMaker

EXCHANGE_VERSION = "1"


class Imported(NamedTuple):
    """What a file gave. `payloads` is `[n, L, 2, block_size, K, H]`, in the order of `keys`."""

    keys: BlockKeys
    payloads: np.ndarray
    model_name: str


def export_blocks(
    path: Path, form: BlockForm, keys: BlockKeys, payloads: Sequence[np.ndarray], *, model_name: str = ""
) -> None:
    """Writes the first `len(payloads)` blocks of a prompt; the file appears whole or not at all.

    Args:
      payloads: at least one, each of the form's shape and dtype.

    Raises:
      InvalidRequestError: the file cannot be written.
    """
    count = len(payloads)
    kv, tokens = np.stack(payloads), np.ascontiguousarray(keys.tokens[:count])
    metadata = {
        "format_version": EXCHANGE_VERSION,
        "fingerprint": form.fingerprint.hex(),
        "model": model_name,
        "checksum": checksum([bytes_of(kv), bytes_of(tokens)]).hex(),
    }
    tensors = {"kv": kv, "tokens": tokens, "keys": _key_array(keys.hashes[:count])}
    temporary = path.with_name(f".{path.name}-{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, metadata)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            temporary.unlink()
        raise InvalidRequestError(f"{path}: cannot be written: {error}") from None


def import_blocks(path: Path, form: BlockForm, maker: KeyMaker, salt: str = "") -> Imported:
    """Reads and checks a file of `export_blocks`.

    Args:
      form: of the model that the blocks are wanted for.
      maker: of that model's keys.
      salt: of the tenant that may find them.

    Raises:
      InvalidRequestError: the file is missing, damaged, of another version, model or salt.
    """
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            _check_origin(path, metadata, form)
            found = {name: file.get_tensor(name) for name in ("kv", "tokens", "keys")}
    except (OSError, SafetensorError) as error:
        raise InvalidRequestError(f"{path}: cannot be read: {error}") from None
    kv, tokens, keys = found["kv"], found["tokens"], found["keys"]
    _check_shapes(path, form, kv, tokens, keys)
    if checksum([bytes_of(kv), bytes_of(tokens)]).hex() != metadata.get("checksum"):
        raise InvalidRequestError(f"{path}: is damaged: its checksum does not match")
    computed = maker.keys(tokens.reshape(-1), salt)
    if not np.array_equal(_key_array(computed.hashes), keys):
        raise InvalidRequestError(f"{path}: its keys are not those of its tokens: give the salt it was exported with")
    return Imported(computed, kv, metadata.get("model", ""))


def _key_array(hashes: Sequence[bytes]) -> UInt8[np.ndarray, "n 32"]:
    return np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, KEY_BYTES)


def _check_origin(path: Path, metadata: dict[str, str], form: BlockForm) -> None:
    if (version := metadata.get("format_version")) != EXCHANGE_VERSION:
        raise InvalidRequestError(f"{path}: format_version={version!r}: {EXCHANGE_VERSION!r} is read")
    if (fingerprint := metadata.get("fingerprint", "")) != form.fingerprint.hex():
        raise InvalidRequestError(
            f"{path}: holds KV of model {metadata.get('model', '')!r} with fingerprint {fingerprint[:12]}...: "
            f"{form.fingerprint.hex()[:12]}... is wanted (same weights, dtype, block size)"
        )


def _check_shapes(path: Path, form: BlockForm, kv: np.ndarray, tokens: np.ndarray, keys: np.ndarray) -> None:
    count = len(keys)
    wanted = {
        "kv": (kv, (count, *form.shape), form.dtype),
        "tokens": (tokens, (count, form.block_size), np.dtype(np.int32)),
        "keys": (keys, (count, KEY_BYTES), np.dtype(np.uint8)),
    }
    for name, (array, shape, dtype) in wanted.items():
        if array.shape != shape or array.dtype != dtype:
            raise InvalidRequestError(
                f"{path}: tensor {name!r} is {array.dtype.name} {array.shape}: {dtype.name} {shape} is wanted"
            )
