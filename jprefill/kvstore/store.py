"""`PrefixStore`: keys, index, device pool and lower tiers as the one store that the engine uses.

    device pool    every pass reads and writes it         evicted blocks go down
    host memory    restored before a pass                 what was not used for longest goes down
    disk           survives the process                   what was not used for longest is deleted

A cache may be slow or gone but never wrong: keys cover everything that KV depends on, tokens are compared again on a
hit, and what a failed pass wrote is never found.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np

from jprefill.kvstore.contract import Lease
from jprefill.kvstore.hashing import BlockKeys, KeyMaker
from jprefill.kvstore.index import BlockIndex, Entry, Reservation
from jprefill.kvstore.keep import KeepPolicy
from jprefill.kvstore.lower_tiers import LowerTiers, Pending
from jprefill.types import ScoreRequest, TierStats, TokenIds

log = logging.getLogger("jprefill.kvstore")

FLUSH_GROUP = 64  # blocks that are brought down at a time when the store closes
MIN_FLUSH_S = 10.0  # who pays for a disk tier wants it filled, even by an engine that is closed at once


@runtime_checkable
class Pool(Protocol):
    """What the store needs of a device pool; `DevicePool` is the real one."""

    num_blocks: int
    block_size: int
    block_bytes: int

    def read(self, block_ids: Sequence[int]) -> Pending:
        """Starts copying blocks to the host; later writes do not change the copy."""
        ...

    def write(self, block_ids: Sequence[int], payloads: np.ndarray) -> None:
        """Copies payloads `[n, L, 2, block_size, K, H]` to the device."""
        ...

    def reset(self) -> None:
        """Makes the arrays anew; what they held is lost."""
        ...


class PrefixStore:
    """See `contract.Store` for who may call what.

    Invariant: a block is in the index if and only if the pool holds its KV, or will when the pass that was dispatched
    last is done.
    """

    def __init__(
        self, pool: Pool, index: BlockIndex, policy: KeepPolicy, fingerprint: bytes, lower: LowerTiers | None = None
    ):
        self.block_size, self.block_bytes = pool.block_size, pool.block_bytes
        self.has_lower_tiers = lower is not None
        self._pool, self._index, self._lower, self._policy = pool, index, lower, policy
        self._fingerprint = fingerprint
        self._key_maker = KeyMaker(fingerprint, pool.block_size)
        self._stats = TierStats(max_bytes=pool.num_blocks * pool.block_bytes)

    def set_shared_tokens(self, token_ids: TokenIds) -> None:
        """Leading tokens that salts do not separate. Call it before the first request."""
        self._key_maker = KeyMaker(self._fingerprint, self.block_size, token_ids)

    def keys(self, request: ScoreRequest) -> BlockKeys:
        """Of the prompt's whole blocks: of its prefix, and of its item where it has but one."""
        if not request.uses_store:
            return self._key_maker.keys(request.prefix[:0])
        token_ids: TokenIds = request.prefix
        if len(request.items) == 1:
            token_ids = np.concatenate([token_ids, request.items[0].token_ids])
        return self._key_maker.keys(token_ids, request.salt)

    def prefetch(self, keys: BlockKeys) -> None:
        """Starts bringing blocks that the device does not hold from disk to host memory."""
        if self._lower is not None:
            self._lower.prefetch(keys, self._index.num_matched(keys), len(keys))

    def arrive(self, request: ScoreRequest, keys: BlockKeys) -> int:
        """Counts a request that waits from now on; how many leading blocks it shares."""
        self._policy.arrive(keys)
        return self._policy.num_shared(request, keys, self.block_size)

    def num_cached(self, keys: BlockKeys, limit: int) -> int:
        """Leading blocks that some tier holds."""
        num_found = self._index.num_matched(keys, limit)
        if self._lower is not None and num_found < limit:
            num_found += self._lower.num_found(keys, num_found, limit, counts=False)
        return num_found

    def num_on_device(self, keys: BlockKeys, limit: int) -> int:
        """Leading blocks that the device holds."""
        return self._index.num_matched(keys, limit)

    def changes(self) -> Mapping[bytes, bool] | None:
        """Keys of blocks that came to the device or left it since the last call, and whether they are there now."""
        return self._index.changes()

    def lease(self, keys: BlockKeys, limit: int) -> Lease:
        """Pins what the device holds, restores what a lower tier holds after it, and pins that too."""
        limit = min(limit, len(keys))
        blocks = self._index.match(keys, limit)
        self._index.pin(blocks)
        if self._lower is None or len(blocks) == limit:
            return Lease(keys, tuple(blocks.tolist()))
        restored = self._restore(keys, len(blocks), limit)
        return Lease(keys, (*blocks.tolist(), *restored.tolist()), num_restored=len(restored))

    def restore(self, keys: BlockKeys) -> None:
        """A lease that nobody uses: what it restored stays on the device."""
        if self._lower is not None:
            self.release(self.lease(keys, len(keys)), is_good=False)

    def _restore(self, keys: BlockKeys, first: int, limit: int) -> np.ndarray:
        """Brings consecutive blocks to the device, as many as have room there; pinned."""
        lower = self._lower
        if lower is None or not lower.num_found(keys, first, limit):
            return np.zeros(0, np.int32)
        payloads = lower.fetch(keys, first, limit)
        room = self._reserve(keys, first, first + len(payloads), is_restore=True)
        if room.first != first:  # the pass that runs computes these blocks; until it ends nothing can follow them
            self._index.abandon(room)
            return np.zeros(0, np.int32)
        if len(room.blocks):
            self._pool.write(room.blocks.tolist(), np.stack(payloads[: len(room.blocks)]))
        self._index.commit(room)
        self._index.pin(room.blocks)
        return room.blocks

    def shorten(self, lease: Lease, num_blocks: int) -> None:
        """Unpins the cached blocks from number `num_blocks` on."""
        self._index.unpin(np.asarray(lease.cached[num_blocks:], np.int32))
        lease.cached = lease.cached[:num_blocks]

    def keep(self, lease: Lease, request: ScoreRequest, limit: int) -> None:
        """Reserves room for what the policy wants kept after the cached blocks."""
        first = max(len(lease.cached), lease.num_borrowed)
        self._index.touch(np.asarray(lease.cached, np.int32))
        self._count(num_hits=len(lease.cached), num_misses=len(lease.keys) - first)
        end = min(limit, self._policy.num_kept(request, lease.keys, self.block_size))
        if end > first:
            lease.reservation = self._reserve(lease.keys, first, end)

    def _reserve(self, keys: BlockKeys, first: int, end: int, *, is_restore: bool = False) -> Reservation:
        """Room in the pool; what had to leave goes to the lower tiers before anything is written over it."""
        num_seen = self._policy.num_repeated(keys)
        room = self._index.reserve(keys, first, end, num_seen=num_seen, is_restore=is_restore)
        if room.evicted:
            self._count(num_evictions=len(room.evicted))
            self._bring_down(room.evicted)
        return room

    def _bring_down(self, entries: Sequence[Entry]) -> None:
        if self._lower is None:
            return
        new = [entry for entry in entries if not self._lower.has(entry.key)]
        if new:
            reading = self._pool.read([entry.block for entry in new])
            self._lower.put([(entry.key, entry.tokens) for entry in new], reading)

    def release(self, lease: Lease, *, is_good: bool) -> None:
        """Unpins; commits what was kept, or gives its room back."""
        if (room := lease.reservation) is not None:
            if is_good:
                self._count(num_insertions=self._index.commit(room))
            else:
                self._index.abandon(room)
        self._index.unpin(np.asarray(lease.cached, np.int32))

    def recover(self) -> None:
        """After a failed pass some arrays of the pool may be gone: all starts anew. Leases end with it."""
        self._index.clear()
        self._pool.reset()

    def stats(self) -> Mapping[str, TierStats]:
        """By tier."""
        num_blocks = self._index.num_blocks - self._index.num_free
        device = replace(self._stats, num_blocks=num_blocks, num_bytes=num_blocks * self._pool.block_bytes)
        return {"device": device} | ({} if self._lower is None else self._lower.stats())

    def close(self, timeout_s: float) -> None:
        """Moves the device's blocks to the disk tier, if there is one, for at most `timeout_s`, or `MIN_FLUSH_S`."""
        lower = self._lower
        if lower is None:
            return
        if lower.disk is not None:
            deadline_s = time.monotonic() + max(timeout_s, MIN_FLUSH_S)
            # Roots last: where there is no room for all, they are of use alone and their leaves are not.
            entries = list(self._index.entries())[::-1]
            for start in range(0, len(entries), FLUSH_GROUP):
                self._bring_down(entries[start : start + FLUSH_GROUP])
                if not lower.drain(deadline_s - time.monotonic()):
                    break
            if not lower.flush(deadline_s - time.monotonic()):
                log.warning("not all stored prefixes reached the disk before the engine closed")
        lower.close()

    def _count(self, **changes: int) -> None:
        stats = self._stats
        self._stats = replace(stats, **{name: getattr(stats, name) + change for name, change in changes.items()})
