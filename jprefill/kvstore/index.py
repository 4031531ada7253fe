"""`BlockIndex`: which block of the device pool holds which key. No JAX and no KV here.

A block of the pool is always in one of these states:

    free -- reserve --> reserved -- commit --> cached -- evicted by a reserve --> free
                            |  abandon
                            +--------> free

Only cached blocks are found. What is cached is a forest: a block's parent, the block before it in its prompt, is
cached too, so a chain is found from its front, and only leaves may be evicted.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from jprefill.errors import EngineError
from jprefill.kvstore.changes import ChangeLog
from jprefill.kvstore.eviction import EvictionOrder, EvictionQueue
from jprefill.kvstore.hashing import BlockKeys

Blocks = Int32[np.ndarray, " _"]

_FREE, _RESERVED, _CACHED, _ORPHANED = range(4)
_NO_BLOCKS = np.zeros(0, np.int32)


@dataclass(frozen=True, eq=False, slots=True)
class Entry:
    """One cached block, or one that was cached until a reservation took its place.

    Attributes:
      key: of the block.
      tokens: a copy.
      block: its number in the pool; after an eviction the KV is there until the pool is written.
      depth: number of blocks before it in its prompt.
      num_hits: uses after it was stored.
    """

    key: bytes
    tokens: Int32[np.ndarray, " block_size"]
    block: int
    depth: int
    num_hits: int


@dataclass(frozen=True, eq=False, slots=True)
class Reservation:
    """Room for consecutive blocks of one prompt. It ends with one `commit` or one `abandon`.

    Attributes:
      keys: of the prompt.
      first: the prompt's block that `blocks[0]` is for; the next ones follow.
      blocks: numbers in the pool; may be none.
      evicted: what lay there; it is gone from the index in any case.
    """

    keys: BlockKeys
    first: int
    blocks: Blocks
    evicted: tuple[Entry, ...] = ()

    @property
    def end(self) -> int:
        """The prompt's block after the last one that has room."""
        return self.first + len(self.blocks)

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """The key of each block."""
        return self.keys.hashes[self.first : self.end]


class BlockIndex:
    """Finds, protects, places and evicts blocks. Only the engine thread may call it.

    Invariants (`check`): free + cached + reserved = all; no key has two blocks; a pinned block is cached and stays;
    a cached block's parent is cached; a block is in the eviction queue if and only if it is a cached, unpinned leaf.

    Args:
      num_blocks: size of the pool.
      block_size: tokens per block.
      order: what a block is worth.
    """

    def __init__(self, num_blocks: int, block_size: int, order: EvictionOrder):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._order = order
        self.clear()

    def clear(self) -> None:
        """Forgets everything: cached, reserved and pinned blocks are free. Leases and reservations end with it."""
        num_blocks, block_size = self.num_blocks, self.block_size
        self._clock = 0
        self._changes = ChangeLog(2 * num_blocks)
        self._blocks: dict[bytes, int] = {}  # of reserved and cached keys
        self._keys: list[bytes] = [b""] * num_blocks
        self._tokens = np.zeros((num_blocks, block_size), np.int32)
        self._states = np.full(num_blocks, _FREE, np.int8)
        self._parents = np.full(num_blocks, -1, np.int32)
        self._depths = np.zeros(num_blocks, np.int32)  # blocks before it in its prompt
        self._num_children = np.zeros(num_blocks, np.int32)  # cached, reserved and orphaned
        self._num_pins = np.zeros(num_blocks, np.int32)
        self._num_hits = np.zeros(num_blocks, np.int32)
        self._queue = EvictionQueue(num_blocks)
        self._free = array("i", range(num_blocks - 1, -1, -1))  # the last one is taken first

    # ---- looking --------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found."""
        return int(np.count_nonzero(self._states == _CACHED))

    @property
    def num_reserved(self) -> int:
        """Blocks between `reserve` and `commit` or `abandon`."""
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def num_pinned(self) -> int:
        """Cached blocks that somebody uses now."""
        return int(np.count_nonzero(self._num_pins))

    def match(self, keys: BlockKeys, limit: int | None = None) -> Blocks:
        """Blocks of the longest cached chain from the front of a prompt. Nothing is pinned, and no use is counted.

        Args:
          keys: of the prompt. Its tokens are compared: a block with the right key and other tokens is a miss.
          limit: the most blocks to look for; None: all.
        """
        found = []
        for key in keys.hashes[:limit]:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        blocks = np.asarray(found, np.int32)
        is_hit = self._states[blocks] == _CACHED
        is_hit &= (self._tokens[blocks] == keys.tokens[: len(blocks)]).all(1)
        return blocks if is_hit.all() else blocks[: int(is_hit.argmin())]

    def num_matched(self, keys: BlockKeys, limit: int | None = None) -> int:
        """Length of `match`, from a dozen look-ups: for prices. Tokens are not compared."""
        return bisect_left(keys.hashes[:limit], True, key=lambda key: not self._is_cached(key))

    def changes(self) -> Mapping[bytes, bool] | None:
        """Keys committed or evicted since the last call, and whether they are cached now; None: any may have been."""
        return self._changes.take()

    def entries(self) -> Iterator[Entry]:
        """All cached blocks, each after its parent. The index must not change meanwhile."""
        cached = np.flatnonzero(self._states == _CACHED)
        for block in cached[np.argsort(self._depths[cached], kind="stable")].tolist():
            yield self._entry(block)

    def _entry(self, block: int) -> Entry:
        depth, num_hits = int(self._depths[block]), int(self._num_hits[block])
        return Entry(self._keys[block], self._tokens[block].copy(), block, depth, num_hits)

    def _is_cached(self, key: bytes) -> bool:
        block = self._blocks.get(key)
        return block is not None and bool(self._states[block] == _CACHED)

    # ---- using ----------------------------------------------------------------------------------------------------

    def touch(self, blocks: Blocks) -> None:
        """Counts one use of each block; they are different and cached."""
        self._require_cached(blocks, "touch")
        self._clock += 1
        self._learn(self._depths[blocks[self._num_hits[blocks] == 0]], is_used=True)
        self._num_hits[blocks] += 1
        self._appraise(blocks)

    def pin(self, blocks: Blocks) -> None:
        """Protects different cached blocks from eviction, once more."""
        self._require_cached(blocks, "pin")
        self._num_pins[blocks] += 1
        for block in blocks[self._num_children[blocks] == 0].tolist():
            self._queue.discard(block)

    def unpin(self, blocks: Blocks) -> None:
        """Takes one `pin` of each block back.

        Raises:
          EngineError: a block is not pinned; nothing was changed.
        """
        if not (self._num_pins[blocks] > 0).all():
            raise EngineError("unpin: a block is not pinned")
        self._num_pins[blocks] -= 1
        for block in blocks[self._num_children[blocks] == 0].tolist():
            self._queue_if_evictable(block)

    def _require_cached(self, blocks: Blocks, operation: str) -> None:
        if not (self._states[blocks] == _CACHED).all():
            raise EngineError(f"{operation}: a block is not cached")

    def _appraise(self, blocks: Blocks) -> None:
        """Sets what blocks are worth now."""
        queued = [block for block in blocks[self._num_children[blocks] == 0].tolist() if block in self._queue]
        for block in queued:
            self._queue.discard(block)
        self._queue.values[blocks] = self._worth(self._num_hits[blocks], self._depths[blocks])
        for block in queued:
            self._queue.add(block)

    def _worth(self, num_hits: Blocks, depths: Blocks) -> np.ndarray:
        return self._order.values(num_hits, depths * np.int32(self.block_size), float(self._clock))

    def _learn(self, depths: Blocks, *, is_used: bool) -> None:
        self._order.learn(depths * np.int32(self.block_size), is_used=is_used)

    def _queue_if_evictable(self, block: int) -> None:
        is_evictable = self._states[block] == _CACHED and not self._num_children[block] and not self._num_pins[block]
        if is_evictable and block not in self._queue:
            self._queue.add(block)

    # ---- storing --------------------------------------------------------------------------------------------------

    def reserve(
        self, keys: BlockKeys, first: int, end: int, *, num_seen: int = 0, is_restore: bool = False
    ) -> Reservation:
        """Takes room for the blocks `[first, end)` of a prompt, as many leading ones as can be had.

        Blocks at the front that are cached or reserved already are left out: see `Reservation.first`. There is no
        room at all if the block before the first one is gone. Free blocks go first; then the least valuable
        unpinned leaves leave, as long as they are worth less than what comes.

        Args:
          keys: of the prompt.
          first: its first block that is wanted; all before it should be cached or reserved.
          end: after its last block that is wanted; cut to the whole blocks that there are.
          num_seen: leading blocks of the prompt that were seen before: they come in as if used once.
          is_restore: the blocks come from a lower tier and are used at once: they are worth more than any other.
        """
        end = min(end, len(keys))
        while first < end and keys.hashes[first] in self._blocks:
            first += 1
        parent = self._blocks.get(keys.hashes[first - 1], -1) if 0 < first < end else -1
        if first >= end or (first and parent < 0):
            return Reservation(keys, first, _NO_BLOCKS)
        self._clock += end - first
        depths = np.arange(first, end, dtype=np.int32)
        num_hits = (is_restore | (depths < num_seen)).astype(np.int32)
        self._learn(depths[num_hits > 0], is_used=True)
        worth = np.full(end - first, np.inf) if is_restore else self._worth(num_hits, depths)
        blocks, evicted = self._take(keys, first, parent, worth.tolist())
        self._learn(np.asarray([entry.depth for entry in evicted if not entry.num_hits], np.int32), is_used=False)
        self._changes.note((entry.key for entry in evicted), is_cached=False)
        self._num_hits[blocks] = num_hits[: len(blocks)]
        self._tokens[blocks] = keys.tokens[first : first + len(blocks)]
        return Reservation(keys, first, blocks, tuple(evicted))

    def _take(self, keys: BlockKeys, first: int, parent: int, worth: list[float]) -> tuple[Blocks, list[Entry]]:
        """Links a chain under `parent`, block by block, until there is no room for the next one."""
        taken: list[int] = []
        evicted: list[Entry] = []
        for depth, own in enumerate(worth, first):
            key = keys.hashes[depth]
            if key in self._blocks:  # under a parent that was abandoned: it will go too
                break
            # Held before anything leaves: the parent must not be evicted for its child.
            self._hold(parent)
            if not self._free and not self._evict_below(own, evicted):
                self._let_go(parent)
                break
            block = self._free.pop()
            self._blocks[key], self._keys[block] = block, key
            self._states[block], self._depths[block], self._parents[block] = _RESERVED, depth, parent
            taken.append(block)
            parent = block
        return np.asarray(taken, np.int32), evicted

    def _hold(self, parent: int) -> None:
        """Counts a child of a block; it is no leaf now."""
        if parent >= 0:
            self._num_children[parent] += 1
            self._queue.discard(parent)

    def _let_go(self, parent: int) -> None:
        """Takes a `_hold` back; an orphaned block leaves with its last child."""
        while parent >= 0:
            self._num_children[parent] -= 1
            if self._num_children[parent] or self._states[parent] != _ORPHANED:
                break
            parent = self._release(parent)
        if parent >= 0:
            self._queue_if_evictable(parent)

    def _release(self, block: int) -> int:
        """Frees a block without children; the caller lets go of the parent that it returns."""
        self._states[block], self._keys[block] = _FREE, b""
        self._free.append(block)
        return int(self._parents[block])

    def _evict_below(self, worth: float, evicted: list[Entry]) -> bool:
        """Evicts the least valuable block if it is worth less than `worth`."""
        block = self._queue.peek()
        if block < 0 or self._queue.values[block] >= worth:
            return False
        evicted.append(self._entry(block))
        self._queue.discard(block)
        del self._blocks[self._keys[block]]
        self._let_go(self._release(block))
        return True

    def commit(self, reservation: Reservation) -> int:
        """Makes reserved blocks findable, now that the pool holds their KV.

        A reservation under another one comes after it; if that one was abandoned, so is this.

        Returns:
          The number of blocks that can be found from now on: all or none.

        Raises:
          EngineError: it has ended already, or the reservation before it has not; nothing was changed.
        """
        self._require_reserved(reservation)
        blocks = reservation.blocks
        if not len(blocks):
            return 0
        parent = int(self._parents[blocks[0]])
        state = _CACHED if parent < 0 else int(self._states[parent])
        if state == _RESERVED:
            raise EngineError("commit: the blocks before these are still reserved")
        if state == _ORPHANED:
            self.abandon(reservation)
            return 0
        self._states[blocks] = _CACHED
        self._changes.note(reservation.hashes, is_cached=True)
        self._appraise(blocks)
        self._queue_if_evictable(int(blocks[-1]))
        return len(blocks)

    def abandon(self, reservation: Reservation) -> None:
        """Gives reserved blocks back.

        Raises:
          EngineError: it has ended already; nothing was changed.
        """
        self._require_reserved(reservation)
        for block in reversed(reservation.blocks.tolist()):
            del self._blocks[self._keys[block]]
            if self._num_children[block]:  # reserved under this one; the block waits for them to end
                self._states[block] = _ORPHANED
            else:
                self._let_go(self._release(block))

    def _require_reserved(self, reservation: Reservation) -> None:
        for key, block in zip(reservation.hashes, reservation.blocks.tolist(), strict=True):
            if self._blocks.get(key) != block or self._states[block] != _RESERVED:
                raise EngineError("the reservation was committed or abandoned before")

    # ---- checking -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Looks at everything; for tests and debugging, since it takes milliseconds.

        Raises:
          EngineError: an invariant is broken; the message says which one, with its numbers.
        """
        states, parents = self._states, self._parents
        counts = np.bincount(states, minlength=4).tolist()
        num_reserved = counts[_RESERVED] + counts[_ORPHANED]
        used, cached = np.flatnonzero(states != _FREE), states == _CACHED
        children = used[parents[used] >= 0]
        num_children = np.bincount(parents[children], minlength=self.num_blocks)
        evictable = cached & (self._num_pins == 0) & (self._num_children == 0)
        found = {self._keys[b]: b for b in np.flatnonzero(cached | (states == _RESERVED)).tolist()}
        total = f"free {self.num_free} + cached {counts[_CACHED]} + reserved {num_reserved} = {self.num_blocks}"
        broken = {
            f"{total} blocks": self.num_free + counts[_CACHED] + num_reserved != self.num_blocks,
            "each free block is free once": sorted(self._free) != np.flatnonzero(states == _FREE).tolist(),
            f"pins >= 0, lowest {self._num_pins.min(initial=0)}": (self._num_pins < 0).any(),
            "pinned blocks are cached": (self._num_pins[~cached] != 0).any(),
            f"one block per key, {len(self._blocks)} keys": found != self._blocks,
            "children are counted": (num_children != np.where(states != _FREE, self._num_children, 0)).any(),
            "free blocks have no children": self._num_children[states == _FREE].any(),
            "parents of cached blocks are cached": not cached[parents[children[cached[children]]]].all(),
            "a parent is one block before": (self._depths[children] != self._depths[parents[children]] + 1).any(),
            "first blocks have no parent": (self._depths[used[parents[used] < 0]] != 0).any(),
            f"evictable {evictable.sum()} = queued {len(self._queue)}": evictable.sum() != len(self._queue)
            or not all(b in self._queue for b in np.flatnonzero(evictable).tolist()),
            "the queue is a heap": not self._queue.is_consistent(),
        }
        for rule, is_broken in broken.items():
            if is_broken:
                raise EngineError(f"the prefix index is inconsistent; must hold: {rule}")
