"""Blocks on disk: kept over restarts, bounded in bytes, least recently used first out. No JAX.

A fault of the file system switches the tier off; a bad block is deleted and was never there.
"""

import errno
import logging
import os
import stat
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from jprefill.errors import ConfigError
from jprefill.kvstore.block_file import BlockEntry, BlockForm, Miss, Tokens, block_path, read_block, scan, write_block
from jprefill.types import TierStats

log = logging.getLogger("jprefill.kvstore")

NAME_FILE = "model.txt"
"""In a model's folder: what the model is called, for people."""

_TRANSIENT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR}  # say nothing about the disk
_SHARED = stat.S_IWOTH


class DiskTier:
    """Key -> block file, at most `max_bytes` of files below one folder.

    The folder may hold blocks of several models, one sub-folder per fingerprint. Only those of `form.fingerprint` are
    found; all count against the limit and leave by the same order. Which block was used when is kept in memory; the
    files' times of change carry it over a restart.

    Thread safety: `has`, `get`, `touch` and `stats` may be called from any thread, `put` and `scan_more` from one.
    Processes that share a folder find each other's blocks after a restart, spare each other's temporary files, and
    take a block that another has evicted for a miss; each holds `max_bytes` by what it found and wrote itself.
    """

    def __init__(self, path: str | Path, max_bytes: int, form: BlockForm, *, model_name: str = "", scan_s: float = 1.0):
        """Opens the folder, makes it if need be, and looks for blocks for at most `scan_s` seconds.

        What was not reached by then is not there yet: `scan_more` goes on. Nothing is deleted for lack of time.

        Raises:
          ConfigError: `path` is no folder, or everybody may write to it.
        """
        self.form = form
        self.path = Path(path).absolute()
        self._model_name = model_name
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, BlockEntry] = OrderedDict()  # by fingerprint + key; the next to go is first
        self._num_bytes = 0
        self._counts: Counter[str] = Counter()
        self.is_on = True
        self._found = iter(())
        try:
            check_folder(self.path, makes=True)
        except OSError as error:
            self._switch_off("open", error)
        else:
            self._found = scan(self.path)
            self.scan_more(scan_s)

    def has(self, key: bytes) -> bool:
        """Whether a file is known for this key; no hit, and nothing is read."""
        return self.is_on and self.form.fingerprint + key in self._entries

    def get(self, key: bytes, tokens: Tokens) -> np.ndarray | None:
        """Reads a block. A hit makes it the last to go; a bad block is deleted and counted.

        Returns:
          The payload, a new array; None: not here, bad, of other tokens, or the tier is off.
        """
        if not self.has(key):
            return None
        path = self._path(key)
        try:
            payload = read_block(path, self.form, key, tokens)
        except OSError as error:
            self._handle("read", error)
            return None
        if isinstance(payload, Miss):
            self._forget(key)
            if payload is not Miss.MISSING:
                log.debug("KV block %s is %s: deleted", path.name, payload.value)
                self._count(num_errors=1)
                with suppress(OSError):
                    path.unlink()
            return None
        self.touch([key])
        return payload

    def put(self, key: bytes, tokens: Tokens, payload: np.ndarray, *, used_ns: int | None = None) -> bool:
        """Writes a block, after deleting as many as must go for it. One that is here already is only renewed.

        Args:
          payload: contiguous, of the form's shape and dtype.
          used_ns: when it was last of use, since the epoch; None: now. Decides who goes first after a restart.

        Returns:
          Whether the block is here now.
        """
        if not self.is_on or self.form.file_bytes > self._max_bytes:
            return False
        if self.has(key):
            self.touch([key], used_ns=used_ns)
            return True
        path = self._path(key)
        try:
            self._make_room(self._max_bytes - self.form.file_bytes)
            write_block(path, self.form, key, tokens, payload)
            if used_ns is not None:
                os.utime(path, ns=(used_ns, used_ns))
        except FileNotFoundError:  # somebody tidied up below us
            return False
        except OSError as error:
            self._handle("write", error)
            return False
        self._write_name()
        self._remember([BlockEntry(self.form.fingerprint, key, self.form.file_bytes, used_ns or time.time_ns())])
        self._count(num_insertions=1)
        return True

    def touch(self, keys: Iterable[bytes], *, used_ns: int | None = None) -> None:
        """Makes those that are here the last to go; the last key goes last. `used_ns`: as in `put`."""
        for key in keys:
            now_ns = used_ns or time.time_ns()
            with self._lock:
                name = self.form.fingerprint + key
                if name not in self._entries:
                    continue
                self._entries[name] = replace(self._entries[name], used_ns=now_ns)
                self._entries.move_to_end(name)
            with suppress(OSError):  # a hint for the next start
                os.utime(self._path(key), ns=(now_ns, now_ns))

    def scan_more(self, budget_s: float) -> bool:
        """Goes on looking for blocks that earlier runs left, for about `budget_s` seconds; then for room.

        Returns:
          Whether there is nothing left to do.
        """
        deadline = time.monotonic() + budget_s
        found, is_done = [], False
        try:
            while time.monotonic() < deadline:
                entry = next(self._found, None)
                if entry is None:
                    is_done = True
                    break
                found.append(entry)
            if found:
                self._merge(found)
            return self._make_room(self._max_bytes, deadline) and is_done
        except OSError as error:
            self._handle("scan", error)
            return True

    def stats(self) -> TierStats:
        """One look at the counters; hits and misses are counted by `LowerTiers`. Blocks and bytes: of all models."""
        with self._lock:
            held = {"num_blocks": len(self._entries), "num_bytes": self._num_bytes, "max_bytes": self._max_bytes}
            return TierStats(**held, **self._counts, is_on=self.is_on)

    def _path(self, key: bytes) -> Path:
        return block_path(self.path, self.form.fingerprint, key)

    def _merge(self, found: list[BlockEntry]) -> None:
        """Adds what a scan found, then puts everything in order of use again."""
        with self._lock:
            known = self._entries
            new = [entry for entry in found if entry.fingerprint + entry.key not in known]
        self._remember(new)
        with self._lock:
            entries = sorted(self._entries.items(), key=lambda item: item[1].used_ns)
            self._entries = OrderedDict(entries)

    def _remember(self, entries: list[BlockEntry]) -> None:
        with self._lock:
            for entry in entries:
                old = self._entries.pop(entry.fingerprint + entry.key, None)
                self._entries[entry.fingerprint + entry.key] = entry
                self._num_bytes += entry.num_bytes - (old.num_bytes if old else 0)

    def _forget(self, key: bytes) -> None:
        with self._lock:
            entry = self._entries.pop(self.form.fingerprint + key, None)
            self._num_bytes -= entry.num_bytes if entry else 0

    def _make_room(self, limit: int, deadline: float | None = None) -> bool:
        """Deletes the oldest blocks until `limit` bytes are left, or the time is up; whether it got there."""
        while self._num_bytes > limit:
            if deadline is not None and time.monotonic() >= deadline:
                return False
            with self._lock:
                if not self._entries:
                    break
                _, entry = self._entries.popitem(last=False)
                self._num_bytes -= entry.num_bytes
                self._counts["num_evictions"] += 1
            with suppress(FileNotFoundError):
                block_path(self.path, entry.fingerprint, entry.key).unlink()
        return True

    def _write_name(self) -> None:
        """For people only, once: not worth an error."""
        name, self._model_name = self._model_name, ""
        if name:
            with suppress(OSError):
                (self.path / self.form.fingerprint.hex() / NAME_FILE).write_text(name + "\n", encoding="utf-8")

    def _count(self, **changes: int) -> None:
        with self._lock:
            self._counts.update(changes)

    def _handle(self, what: str, error: OSError) -> None:
        self._count(num_errors=1)
        if error.errno not in _TRANSIENT:
            self._switch_off(what, error)

    def _switch_off(self, what: str, error: OSError) -> None:
        with self._lock:
            was_on, self.is_on = self.is_on, False
        if was_on:
            log.warning("kv_disk_path=%s: %s failed: %s; the disk tier is off", self.path, what, error.strerror)


def check_folder(path: Path, *, makes: bool) -> None:
    """Refuses a folder that cannot be trusted with KV blocks; may make it, with mode 0700.

    Raises:
      ConfigError: `path` is no folder, or everybody may write to it.
      OSError: it cannot be made or looked at.
    """
    try:
        if makes:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = path.stat().st_mode
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"kv_disk_path={str(path)!r}: is a file: must be a folder, or not be there yet") from None
    if not stat.S_ISDIR(mode):
        raise ConfigError(f"kv_disk_path={str(path)!r}: is no folder")
    if mode & _SHARED:
        raise ConfigError(
            f"kv_disk_path={str(path)!r}: mode {stat.S_IMODE(mode):04o} lets everybody write, so that scores could be "
            "forged: take the right away (chmod 700)"
        )
