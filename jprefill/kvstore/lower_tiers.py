"""What lies below the device pool: host memory, then disk, and the two threads that move blocks. No JAX.

    put ──> writer thread ──> host memory ──evicted──> disk
    prefetch ──> reader thread: disk ──> host memory
    fetch <── host memory, else disk

A block that was brought up stays where it was; what leaves host memory and is on disk already is not written again.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from jprefill.kvstore.block_file import Tokens
from jprefill.kvstore.disk_tier import DiskTier
from jprefill.kvstore.hashing import BlockKeys
from jprefill.kvstore.host_tier import HostBlock, HostTier
from jprefill.types import TierStats

log = logging.getLogger("jprefill.kvstore")

_STAGING_BYTES = 256 * 2**20  # what a prefetch may fill where there is no host tier
_IDLE_S = 0.05  # how long the writer thread looks for old blocks between two jobs
_WAIT_S = 30.0  # for a block on its way; then it is a miss


@runtime_checkable
class Pending(Protocol):
    """Payloads on their way from the device to the host."""

    def wait(self) -> np.ndarray:
        """`[n, L, 2, block_size, K, H]`. Called by the writer thread; must not need the engine thread."""
        ...


Tier = Literal["host", "disk"]


@dataclass(frozen=True, slots=True)
class _Move:
    """A block on its way: which tier it counts for, and what it becomes; None: lost."""

    tier: Tier
    future: "Future[HostBlock | None]"


@dataclass(frozen=True, slots=True)
class _Put:
    entries: Sequence[tuple[bytes, Tokens]]
    pending: Pending

    @property
    def keys(self) -> list[bytes]:
        return [key for key, _ in self.entries]


@dataclass(frozen=True, slots=True)
class _Spill:
    blocks: Sequence[HostBlock]

    @property
    def keys(self) -> list[bytes]:
        return [block.key for block in self.blocks]


@dataclass(frozen=True, slots=True)
class _Flush:
    deadline: float
    done: "Future[bool]"
    writes_host: bool
    keys: Sequence[bytes] = ()


class LowerTiers:
    """Host memory and disk as one place to put blocks and to find them again.

    Thread safety: every method may be called from any thread; the engine thread calls `fetch` and `put`. `put`,
    `prefetch` and `has` never wait for memory copies or files. Two threads of this object move blocks: the writer
    alone writes files, the reader only puts what it read into host memory.
    Invariant: a block that is on its way stands in `_moving` with a future, so `fetch` waits for it instead of
    missing it; each such future gets its one result, None if the block was lost. Nobody waits while holding a lock.
    """

    def __init__(self, host: HostTier | None, disk: DiskTier | None, *, max_queued_blocks: int = 4096):
        """Starts the threads.

        Args:
          host: None: blocks go to disk at once.
          disk: None: what leaves host memory is gone.
          max_queued_blocks: that wait to be written; they hold device or host memory. Beyond, new ones are dropped.
        """
        self.host, self.disk = host, disk
        self._memory = host or HostTier(_STAGING_BYTES)
        self._max_queued_blocks = max_queued_blocks
        self._lock = threading.Lock()
        self._moving: dict[bytes, _Move] = {}
        self._num_queued = self._num_reading = 0  # blocks
        self._counts = {"host": Counter[str](), "disk": Counter[str]()}
        self._restore_s = {"host": 0.0, "disk": 0.0}
        self._upper: Tier = "disk" if host is None else "host"  # where blocks arrive
        self._is_closed = False
        self._writes: SimpleQueue[_Put | _Spill | _Flush | None] = SimpleQueue()
        self._reads: SimpleQueue[list[tuple[bytes, Tokens]] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=loop, name=f"jprefill-kv-{name}", daemon=True)
            for name, loop in (("writer", self._write_loop), ("reader", self._read_loop))
        ]
        for thread in self._threads:
            thread.start()

    # ---- the engine's side ----------------------------------------------------------------------------------------

    def has(self, key: bytes) -> bool:
        """Whether the block is here or on its way here. Some microseconds, no file is touched."""
        return self._tier_of(key) is not None

    def num_found(self, keys: BlockKeys, first: int, end: int, *, counts: bool = True) -> int:
        """Blocks `first`, `first + 1`, ... below `end` that are here, up to the first that is not.

        Args:
          counts: as hits and misses; False where the same request was or will be counted by another call.
        """
        tiers = []
        for key in keys.hashes[first:end]:
            tier = self._tier_of(key)
            if tier is None:
                break
            tiers.append(tier)
        if counts:
            num_slow, num_missed = tiers.count("disk"), end - first - len(tiers)
            with self._lock:
                self._counts["host"].update(num_hits=len(tiers) - num_slow, num_misses=num_slow + num_missed)
                self._counts["disk"].update(num_hits=num_slow, num_misses=num_missed)
        return len(tiers)

    def prefetch(self, keys: BlockKeys, first: int, end: int) -> None:
        """Has the reader thread bring blocks of the range from disk to host memory, up to the first missing one.

        It stops where half of host memory would be full of them: more would push each other out.
        """
        if self.disk is None:
            return
        wanted = []
        with self._lock:
            room = self._memory.stats().max_bytes // 2 // self.disk.form.payload_bytes - self._num_reading
            for key, tokens in zip(keys.hashes[first:end], keys.tokens[first:end], strict=True):
                if len(wanted) >= room or self._is_closed or not self.has(key):
                    break
                if key not in self._moving and not self._memory.has(key):
                    self._moving[key] = _Move("disk", Future())
                    wanted.append((key, tokens))
            self._num_reading += len(wanted)
        if wanted:
            self._reads.put(wanted)

    def fetch(self, keys: BlockKeys, first: int, end: int) -> list[np.ndarray]:
        """Payloads of the blocks `first`, `first + 1`, ... below `end`, up to the first missing or bad one.

        Waits for those on their way, reads the others from memory or disk. Nobody may write to the arrays.
        """
        blocks: list[HostBlock] = []
        from_disk = []
        for key, tokens in zip(keys.hashes[first:end], keys.tokens[first:end], strict=True):
            start = time.perf_counter()
            tier, block = self._tier_of(key), self._fetch_one(key, tokens)
            if block is None or tier is None:
                break
            blocks.append(block)
            if tier == "disk":
                from_disk.append(key)
            with self._lock:
                self._counts[tier]["num_restores"] += 1
                self._restore_s[tier] += time.perf_counter() - start
        # Last first: the root of a chain must outlive its leaves, which are of no use without it.
        self._memory.touch(block.key for block in reversed(blocks))
        if self.disk is not None:
            self.disk.touch(reversed(from_disk))
        return [block.payload for block in blocks]

    def put(self, entries: Sequence[tuple[bytes, Tokens]], pending: Pending) -> bool:
        """Takes blocks that leave the device; returns at once.

        Args:
          entries: key and tokens of each, parents first.
          pending: gives their payloads, in the same order.

        Returns:
          False if the queue was full or closed: the blocks are dropped, which `stats` counts as evictions.
        """
        with self._lock:
            is_full = 0 < self._num_queued > self._max_queued_blocks - len(entries)
            if is_full or self._is_closed or (self.host is None and self.disk is None):
                self._counts[self._upper]["num_evictions"] += len(entries)
                return False
            self._num_queued += len(entries)
            for key, _ in entries:
                self._moving.setdefault(key, _Move(self._upper, Future()))
            self._writes.put(_Put(entries, pending))
            return True

    def drain(self, timeout_s: float) -> bool:
        """Waits until what was put is stored, so that the queue has room again; whether it was in time."""
        return self._wait_for_writer(timeout_s, writes_host=False)

    def flush(self, timeout_s: float) -> bool:
        """As `drain`, then writes host memory to disk, latest used first.

        Returns:
          Whether all of it was done in time.
        """
        return self._wait_for_writer(timeout_s, writes_host=True)

    def _wait_for_writer(self, timeout_s: float, *, writes_host: bool) -> bool:
        done: Future[bool] = Future()
        with self._lock:
            if self._is_closed:
                return False
            self._writes.put(_Flush(time.monotonic() + timeout_s, done, writes_host))
        try:
            return done.result(timeout_s)
        except TimeoutError:
            return False

    def close(self, timeout_s: float = 10.0) -> None:
        """Stops the threads; what still waits to be written is dropped. `flush` first to keep it."""
        with self._lock:
            self._is_closed = True
        self._writes.put(None)
        self._reads.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def stats(self) -> dict[str, TierStats]:
        """By tier, of those that there are."""
        tiers = {"host": self.host, "disk": self.disk}
        return {name: self._with_counts(name, tier.stats()) for name, tier in tiers.items() if tier is not None}

    def _with_counts(self, name: str, stats: TierStats) -> TierStats:
        with self._lock:
            sums = {key: getattr(stats, key) + count for key, count in self._counts[name].items()}
            return replace(stats, **sums, restore_s=self._restore_s[name])

    def _tier_of(self, key: bytes) -> Tier | None:
        """Which tier has the block; what was prefetched counts for the disk until it is fetched."""
        if move := self._moving.get(key):
            return move.tier
        if block := self._memory.peek(key):
            return "disk" if block.is_prefetched else "host"
        return "disk" if self.disk is not None and self.disk.has(key) else None

    def _fetch_one(self, key: bytes, tokens: Tokens) -> HostBlock | None:
        block = None
        if move := self._moving.get(key):
            with suppress(TimeoutError):
                block = move.future.result(_WAIT_S)
        if block is None or not np.array_equal(block.tokens, tokens):
            block = self._memory.get(key, tokens)
        if block is not None:
            block.is_prefetched = self.host is None
            return block
        payload = None if self.disk is None else self.disk.get(key, tokens)
        return None if payload is None else HostBlock(key, tokens, payload)

    # ---- the two threads ------------------------------------------------------------------------------------------

    def _write_loop(self) -> None:
        is_scanned = self.disk is None
        while True:
            try:
                job = self._writes.get(block=is_scanned)
            except Empty:
                is_scanned = self.disk is None or self.disk.scan_more(_IDLE_S)
                continue
            if job is None:
                return
            try:
                self._do(job)
            except Exception:  # the loop's edge: whoever waits for a block of this job must not wait for ever
                log.exception("a job of the KV writer failed")
                for key in job.keys:
                    self._settle(key, None)

    def _do(self, job: _Put | _Spill | _Flush) -> None:
        if isinstance(job, _Flush):
            job.done.set_result(not job.writes_host or self._flush(job.deadline))
            return
        try:
            if isinstance(job, _Put):
                self._store(job)
            else:
                self._to_disk(job.blocks)
        finally:
            with self._lock:
                self._num_queued -= len(job.keys)

    def _store(self, job: _Put) -> None:
        """Leaves first, so that the root of a chain is the last to be evicted."""
        payloads = () if self._is_closed else self._wait(job)
        for (key, tokens), payload in reversed(list(zip(job.entries, payloads, strict=False))):
            block = HostBlock(key, tokens, np.array(payload))  # a copy: a view would keep all of them alive
            if self.host is None:
                self._to_disk([block])
            else:
                evicted = self.host.put(block)
                self._settle(key, block)
                self._to_disk(evicted)
        for key in job.keys[len(payloads) :]:
            self._settle(key, None)

    def _wait(self, job: _Put) -> Sequence[np.ndarray] | np.ndarray:
        try:
            return job.pending.wait()
        except RuntimeError as error:  # JAX's own are among them: the device failed
            log.warning("%d KV blocks were lost on their way from the device: %s", len(job.keys), error)
            return ()

    def _settle(self, key: bytes, block: HostBlock | None, *, stays: bool = False) -> None:
        """Gives a moving block its result. It counts as moving no more, unless it `stays` so."""
        with self._lock:
            new = _Move(self._upper, Future())
            move = self._moving.setdefault(key, new) if stays else self._moving.pop(key, None)
            if move is not None and not move.future.done():
                move.future.set_result(block)

    def _to_disk(self, blocks: Sequence[HostBlock]) -> None:
        if self.disk is None:
            return
        for block in blocks:  # in no tier until it is written
            self._settle(block.key, block, stays=True)
        for block in blocks:
            self.disk.put(block.key, block.tokens, block.payload)
            self._settle(block.key, block)

    def _flush(self, deadline: float) -> bool:
        if self.disk is None or self.host is None:
            return True
        now_ns, room = time.time_ns(), self.disk.stats().max_bytes
        for age, block in enumerate(reversed(self.host.blocks())):
            room -= self.disk.form.file_bytes
            if room < 0:  # older ones would push newer ones out
                break
            if time.monotonic() > deadline or self._is_closed:
                return False
            self.disk.put(block.key, block.tokens, block.payload, used_ns=now_ns - 1000 * age)
        return self.disk.is_on

    def _read_loop(self) -> None:
        while (wanted := self._reads.get()) is not None:
            for key, tokens in wanted:
                block = None
                try:
                    block = None if self._is_closed else self._read(key, tokens)
                except Exception:  # the loop's edge, as above
                    log.exception("a read of the KV reader failed")
                self._settle(key, block)
            with self._lock:
                self._num_reading -= len(wanted)

    def _read(self, key: bytes, tokens: Tokens) -> HostBlock | None:
        payload = None if self.disk is None else self.disk.get(key, tokens)
        if payload is None:
            return None
        block = HostBlock(key, tokens, payload, is_prefetched=True)
        self._spill(self._memory.put(block))
        return block

    def _spill(self, blocks: Sequence[HostBlock]) -> None:
        """Hands what had to leave host memory to the writer, if it is not on disk already."""
        new = [block for block in blocks if self.disk is not None and not self.disk.has(block.key)]
        with self._lock:
            if new and self.host is not None and self._num_queued + len(new) <= self._max_queued_blocks:
                self._num_queued += len(new)
                self._writes.put(_Spill(new))
