"""Blocks in host memory: bounded in bytes, least recently used first out. No JAX."""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from jprefill.kvstore.block_file import Tokens
from jprefill.types import TierStats


@dataclass(eq=False, slots=True)
class HostBlock:
    """A block as host memory holds it.

    Attributes:
      payload: `[L, 2, block_size, K, H]`, contiguous, an array of its own; nobody may write to it.
      is_prefetched: it came from disk and nobody has fetched it since.
    """

    key: bytes
    tokens: Tokens
    payload: np.ndarray
    is_prefetched: bool = False

    @property
    def num_bytes(self) -> int:
        """Of the payload."""
        return self.payload.nbytes


class HostTier:
    """Key -> block, at most `max_bytes` of payloads.

    Thread safety: every method may be called from any thread; each holds the lock for a few dictionary operations.
    Invariant: `num_bytes` is the sum over the blocks held, and at most `max_bytes`.
    """

    def __init__(self, max_bytes: int):
        self._lock = threading.Lock()
        self._blocks: OrderedDict[bytes, HostBlock] = OrderedDict()  # the next to go is first
        self._stats = TierStats(max_bytes=max_bytes)

    def has(self, key: bytes) -> bool:
        """Whether the block is here now; no hit."""
        return key in self._blocks  # one dictionary look-up: atomic without the lock

    def peek(self, key: bytes) -> HostBlock | None:
        """The block, whatever its tokens; no hit."""
        return self._blocks.get(key)  # likewise

    def get(self, key: bytes, tokens: Tokens) -> HostBlock | None:
        """The block, if it is here and its tokens are these. A hit makes it the last to go."""
        with self._lock:
            block = self._blocks.get(key)
            if block is None or not np.array_equal(block.tokens, tokens):
                return None
            self._blocks.move_to_end(key)
            return block

    def put(self, block: HostBlock) -> list[HostBlock]:
        """Takes a block over and gives back those that had to go for it, oldest first.

        Args:
          block: its payload is no view of something larger: that would stay in memory with it.

        Returns:
          The block itself where it is larger than the whole tier. A block that is here already is only renewed.
        """
        block.payload.flags.writeable = False
        with self._lock:
            if block.key in self._blocks:
                self._blocks.move_to_end(block.key)
                return []
            if block.num_bytes > self._stats.max_bytes:
                return [block]
            evicted = []
            while self._stats.num_bytes + block.num_bytes > self._stats.max_bytes:
                evicted.append(self._pop_oldest())
            self._blocks[block.key] = block
            self._add(num_bytes=block.num_bytes, num_insertions=1)
            return evicted

    def touch(self, keys: Iterable[bytes]) -> None:
        """Makes those that are here the last to go; the last key goes last."""
        with self._lock:
            for key in keys:
                if key in self._blocks:
                    self._blocks.move_to_end(key)

    def blocks(self) -> list[HostBlock]:
        """All of them, the next to go first."""
        with self._lock:
            return list(self._blocks.values())

    def stats(self) -> TierStats:
        """One look at the counters; hits, misses and restores are counted by `LowerTiers`, who knows the plan."""
        with self._lock:
            return replace(self._stats, num_blocks=len(self._blocks))

    def _pop_oldest(self) -> HostBlock:
        _, block = self._blocks.popitem(last=False)
        self._add(num_bytes=-block.num_bytes, num_evictions=1)
        return block

    def _add(self, **changes: int) -> None:
        self._stats = replace(self._stats, **{key: getattr(self._stats, key) + by for key, by in changes.items()})
