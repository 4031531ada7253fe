"""One block of KV in one file, and how the files lie in a folder. No JAX.

    <kv_disk_path>/<fingerprint, hex>/<first byte of the key, hex>/<key, hex>

    header   magic, version, fingerprint, key, element type, shape, sizes | checksum (xxh3-128)
    tokens   int32, little-endian
    payload  keys and values of all layers, [L, 2, block_size, K, H], as they lie in memory

The checksum covers everything but itself. It is made for accidents: bits that flip, a file that was cut, a page that
never reached the disk. Whoever may write into the folder can forge blocks: hence its mode 0700.
"""

import fcntl
import os
import re
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from pathlib import Path

import ml_dtypes
import numpy as np
import xxhash
from jaxtyping import Int32

from jprefill.errors import ConfigError

FORMAT_VERSION = 1
DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}

_MAGIC = b"jprefKV\n"
_HEADER = struct.Struct("<8sI32s32s16s5IQ")  # magic, version, fingerprint, key, dtype, shape, payload bytes
_PROLOGUE = struct.Struct("<8sI")  # what every version starts with
_CHECKSUM_BYTES = 16
_HASH = re.compile(r"[0-9a-f]{64}")
_SHARD = re.compile(r"[0-9a-f]{2}")
_TEMPORARY_SUFFIX = ".tmp"
_numbers = count()

Tokens = Int32[np.ndarray, " block_size"]


class Miss(StrEnum):
    """Why a block cannot be read from its file."""

    MISSING = "no such file"
    DAMAGED = "damaged"
    VERSION = "written in another format version"
    MODEL = "of another model"
    TOKENS = "of other tokens"


@dataclass(frozen=True)
class BlockForm:
    """What all blocks of one store have in common.

    Attributes:
      fingerprint: 32 bytes; see `kvstore.fingerprint`.
      shape: of a payload, `(L, 2, block_size, K, H)`.
      dtype: of a payload.
    """

    fingerprint: bytes
    shape: tuple[int, int, int, int, int]
    dtype: np.dtype

    def __post_init__(self) -> None:
        if len(self.fingerprint) != 32 or self.dtype.name not in DTYPES or self.shape[1] != 2:
            raise ConfigError(
                f"KV blocks of shape {self.shape}, type {self.dtype.name}, fingerprint {len(self.fingerprint)} bytes: "
                f"must be (layers, 2, block_size, KV heads, head_dim), one of {', '.join(DTYPES)}, and 32"
            )

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.shape[2]

    @property
    def payload_bytes(self) -> int:
        """Of one block in memory."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def file_bytes(self) -> int:
        """Of one block on disk; every file has this size."""
        return _HEADER.size + _CHECKSUM_BYTES + 4 * self.block_size + self.payload_bytes


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """A block's file as a scan finds it; nothing of it was read.

    Attributes:
      used_ns: time of change, which a hit renews: when the block was last of use.
    """

    fingerprint: bytes
    key: bytes
    num_bytes: int
    used_ns: int


def block_path(root: Path, fingerprint: bytes, key: bytes) -> Path:
    """Where a block's file lies below `root`."""
    return root / fingerprint.hex() / f"{key[0]:02x}" / key.hex()


def write_block(
    path: Path, form: BlockForm, key: bytes, tokens: Tokens, payload: np.ndarray, *, syncs: bool = False
) -> None:
    """Writes a block under a temporary name, then renames it: readers see the whole file or none.

    Args:
      path: from `block_path`; missing folders are made, with mode 0700.
      payload: contiguous, of the form's shape and dtype.
      syncs: waits until the disk has it. Off by default: after a power cut a file may be torn, which its checksum
        tells, and then it is a miss. The wait would cost more than computing the block again.

    Raises:
      OSError: of the file system. No temporary file stays behind.
    """
    header = _header(form, key)
    parts = [header, tokens.astype("<i4").tobytes(), bytes_of(payload)]
    parts.insert(1, checksum(parts))
    temporary = path.with_name(f"{path.name}-{os.getpid()}-{next(_numbers)}{_TEMPORARY_SUFFIX}")
    fd = _create(temporary)
    try:
        with suppress(OSError):  # some network file systems know no locks
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed: `remove_temporary` spares it
        _write_all(fd, parts)
        if syncs:
            os.fsync(fd)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    finally:
        os.close(fd)


def read_block(path: Path, form: BlockForm, key: bytes, tokens: Tokens) -> np.ndarray | Miss:
    """The payload, if the file holds exactly this block; else why not. No content makes it raise.

    Raises:
      OSError: of the file system, other than that there is no such file.
    """
    try:
        # A link or a pipe put in the file's place must neither lead elsewhere nor block.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return Miss.MISSING
    except OSError:
        if path.is_symlink():
            return Miss.DAMAGED
        raise
    try:
        return _read(fd, form, key, tokens)
    finally:
        os.close(fd)


def scan(root: Path) -> Iterator[BlockEntry]:
    """Every block below `root`, of all models. Removes temporary files that nobody writes any more.

    Looks at names and sizes only, and at nothing that it does not know by its name.

    Raises:
      OSError: while iterating; what vanishes meanwhile is passed over.
    """
    for model in _folders(root, _HASH):
        for shard in _folders(Path(model.path), _SHARD):
            with suppress(FileNotFoundError), os.scandir(shard.path) as files:
                for file in files:
                    if file.name.endswith(_TEMPORARY_SUFFIX):
                        remove_temporary(Path(file.path))
                    elif _HASH.fullmatch(file.name) and file.is_file(follow_symlinks=False):
                        with suppress(FileNotFoundError):
                            found = file.stat(follow_symlinks=False)
                            fingerprint, key = bytes.fromhex(model.name), bytes.fromhex(file.name)
                            yield BlockEntry(fingerprint, key, found.st_size, found.st_mtime_ns)


def remove_temporary(path: Path) -> None:
    """Deletes a temporary file, unless a living process is writing it."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # the kernel drops the writer's lock with the writer
            path.unlink()
        finally:
            os.close(fd)


def checksum(parts: Sequence[bytes | memoryview]) -> bytes:
    """xxh3-128 over the parts, one after the other; releases the GIL on large ones."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()


def bytes_of(array: np.ndarray) -> memoryview:
    """The array's memory; through uint8, since bfloat16 has no buffer of its own."""
    return memoryview(array.reshape(-1).view(np.uint8))


def _header(form: BlockForm, key: bytes) -> bytes:
    dtype = form.dtype.name.encode().ljust(16, b"\0")
    return _HEADER.pack(_MAGIC, FORMAT_VERSION, form.fingerprint, key, dtype, *form.shape, form.payload_bytes)


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        for folder in (path.parents[2], path.parents[1], path.parents[0]):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, flags, 0o600)


def _write_all(fd: int, parts: Sequence[bytes | memoryview]) -> None:
    """One call in the common case; a disk that fills up writes a part, and the next call tells why."""
    left = [memoryview(part) for part in parts]
    while left:
        num_written = os.writev(fd, left)
        while left and num_written >= len(left[0]):
            num_written -= len(left.pop(0))
        if left:
            left[0] = left[0][num_written:]


def _read(fd: int, form: BlockForm, key: bytes, tokens: Tokens) -> np.ndarray | Miss:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        return Miss.DAMAGED
    header = os.pread(fd, _HEADER.size, 0)
    if reason := _wrong(header, form, key):
        return reason
    if status.st_size != form.file_bytes:
        return Miss.DAMAGED
    stored = bytearray(_CHECKSUM_BYTES + 4 * form.block_size)
    payload = np.empty(form.shape, form.dtype)
    if not _read_all(fd, [memoryview(stored), bytes_of(payload)], len(header)):
        return Miss.DAMAGED
    digest, token_bytes = stored[:_CHECKSUM_BYTES], bytes(stored[_CHECKSUM_BYTES:])
    if checksum([header, token_bytes, bytes_of(payload)]) != digest:
        return Miss.DAMAGED
    return payload if token_bytes == tokens.astype("<i4").tobytes() else Miss.TOKENS


def _wrong(header: bytes, form: BlockForm, key: bytes) -> Miss | None:
    """What the header says against reading on; None: it is the one expected, byte for byte."""
    if header == _header(form, key):
        return None
    if len(header) < _HEADER.size:
        return Miss.DAMAGED
    magic, version = _PROLOGUE.unpack_from(header)
    if magic == _MAGIC and version != FORMAT_VERSION:
        return Miss.VERSION
    is_foreign = magic == _MAGIC and _HEADER.unpack(header)[2] != form.fingerprint
    return Miss.MODEL if is_foreign else Miss.DAMAGED


def _read_all(fd: int, parts: Sequence[memoryview], offset: int) -> bool:
    """Fills `parts` from `offset` on; False where the file ends early."""
    left = list(parts)
    while left:
        num_read = os.preadv(fd, left, offset)
        if num_read == 0:
            return False
        offset += num_read
        while left and num_read >= len(left[0]):
            num_read -= len(left.pop(0))
        if left:
            left[0] = left[0][num_read:]
    return True


def _folders(parent: Path, pattern: re.Pattern[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(parent) as entries:
            return [entry for entry in entries if pattern.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
