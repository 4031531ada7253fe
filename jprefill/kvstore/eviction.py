"""Which block leaves a full pool: what a block is worth, and the queue of blocks that may leave. No JAX.

An order says what a block is worth, as a number that only comparisons read. Time is the index's clock, in blocks:
it runs while room for new blocks is asked for, and stands still while nothing wants to come in.
"""

from array import array
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64, Int32

from jprefill.config import Eviction

_NUM_DEPTH_CLASSES = 32
_FIRST_CHANCE = 1 / 4
_LEAST_CHANCE = 1 / 64


@runtime_checkable
class EvictionOrder(Protocol):
    """The contract. It knows no clock and no chance of its own: the same operations always evict the same blocks."""

    def values(
        self, num_hits: Int32[np.ndarray, " n"], positions: Int32[np.ndarray, " n"], now: float
    ) -> Float64[np.ndarray, " n"]:
        """Worth of blocks that are stored or used at `now`; it stays comparable at any later time.

        Args:
          num_hits: uses after the block was stored, this one included.
          positions: of the block's first token in its prompt.
          now: the clock.
        """
        ...

    def learn(self, positions: Int32[np.ndarray, " n"], *, is_used: bool) -> None:
        """Tells the end of blocks that were stored and not used so far: a first use, or an eviction without any."""
        ...


class LeastRecentlyUsed:
    """The naive twin: the block unused for longest leaves, and whatever is new comes in."""

    def values(
        self, num_hits: Int32[np.ndarray, " n"], positions: Int32[np.ndarray, " n"], now: float
    ) -> Float64[np.ndarray, " n"]:
        """The time of the last use."""
        return np.full(len(positions), now, np.float64)

    def learn(self, positions: Int32[np.ndarray, " n"], *, is_used: bool) -> None:
        """Learns nothing."""


class SavedTime:
    """Expected compute time that a block saves. All blocks have the same bytes, so this is also per byte.

        saved = chance * cost * 2 ** -(age / half_life)

        cost   = 1 + position / crossover_tokens    a token's matrix products, and attention over all tokens before it
        chance = (num_hits + 1/4) / (num_hits + 1)  0.63, 0.75, 0.81 ... after 1, 2, 3 uses
               = used / (used + lost)               before the first use: what became of blocks as deep as this one

    The age is the time since the last use, in blocks that asked for room; a turnover of the pool halves the chance.
    The order of two idle blocks therefore never changes, and the logarithm of what each saved when it was last used,
    plus that time over the half-life, compares them for ever: nothing is computed again as time goes on.

    Most decisions are about blocks that nobody used yet, and no constant fits them: where each profile comes twice,
    holding new blocks for useless would never serve one, and where prompts of 60,000 tokens come once, holding them
    for useful would flush every profile. So their chance is counted, by the power of two of the position, over about
    the last turnover. Before there is anything to count it is 1/4 over the cost: reading a block means reading all
    blocks before it, so that deep ones are used more rarely.

    Args:
      half_life: in blocks; the size of the pool.
      crossover_tokens: the position from which on attention costs a token more than everything else: parameters of a
        layer over (2 * num_heads * head_dim). About 27,000 for Llama-3.1-8B, 3,000 for SmolLM2-135M.
    """

    def __init__(self, half_life: int, crossover_tokens: int = 16_384):
        self._half_life = half_life
        self._crossover_tokens = crossover_tokens
        first_chance = _FIRST_CHANCE / (1 + 2.0 ** np.arange(_NUM_DEPTH_CLASSES) / crossover_tokens)
        trust = max(half_life / 64, 1.0)  # the first chance counts as so many blocks
        self._num_used = trust * first_chance
        self._num_lost = trust * (1 - first_chance)

    def values(
        self, num_hits: Int32[np.ndarray, " n"], positions: Int32[np.ndarray, " n"], now: float
    ) -> Float64[np.ndarray, " n"]:
        """Base-2 logarithm of the saved time, in units of one token's matrix products, at time 0."""
        counted = np.maximum(self._num_used / (self._num_used + self._num_lost), _LEAST_CHANCE)
        chance = np.where(num_hits > 0, (num_hits + _FIRST_CHANCE) / (num_hits + 1), counted[_depth_classes(positions)])
        return np.log2(chance * (1 + positions / self._crossover_tokens)) + now / self._half_life

    def learn(self, positions: Int32[np.ndarray, " n"], *, is_used: bool) -> None:
        """Counts; a class that has counted a whole pool forgets half."""
        counts = self._num_used if is_used else self._num_lost
        counts += np.bincount(_depth_classes(positions), minlength=_NUM_DEPTH_CLASSES)
        is_full = self._num_used + self._num_lost > self._half_life
        self._num_used[is_full] /= 2
        self._num_lost[is_full] /= 2


def _depth_classes(positions: Int32[np.ndarray, " n"]) -> Int32[np.ndarray, " n"]:
    """0 for position 0, else one more than the logarithm to base 2, rounded down."""
    return np.frexp(positions)[1]


def make_order(name: Eviction, num_blocks: int, crossover_tokens: int = 16_384) -> EvictionOrder:
    """The order that `EngineConfig.eviction` names, for a pool of `num_blocks`."""
    if name == "lru":
        return LeastRecentlyUsed()
    return SavedTime(max(num_blocks, 1), crossover_tokens)


class EvictionQueue:
    """Blocks that may leave, the least valuable first: a binary heap that knows where each block stands.

    A heap of (value, block) tuples would be shorter, but takes 100 bytes per entry and fills with stale ones.

    Attributes:
      values: by block, in the queue or not. Write a queued block's value only between `discard` and `add`.
    """

    def __init__(self, num_blocks: int):
        self.values: Float64[np.ndarray, " num_blocks"] = np.zeros(num_blocks, np.float64)
        self._value = memoryview(self.values)  # reads one number four times faster than the array
        self._heap = array("i")
        self._places = array("i", [-1]) * num_blocks

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, block: int) -> bool:
        return self._places[block] >= 0

    def peek(self) -> int:
        """The block that leaves next; -1 if none may."""
        return self._heap[0] if self._heap else -1

    def add(self, block: int) -> None:
        """Lets a block leave, at its present value. It must not be in the queue."""
        self._heap.append(block)
        self._rise(len(self._heap) - 1, block)

    def discard(self, block: int) -> None:
        """Takes a block out, if it is in."""
        place = self._places[block]
        if place < 0:
            return
        self._places[block] = -1
        last = self._heap.pop()
        if last != block:
            self._sink(place, last)
            self._rise(self._places[last], last)

    def _rise(self, place: int, block: int) -> None:
        """Puts `block` where `place` is, or nearer to the top."""
        heap, places, value = self._heap, self._places, self._value
        own = value[block]
        while place:
            parent = heap[up := (place - 1) >> 1]
            if value[parent] <= own:
                break
            heap[place], places[parent] = parent, place
            place = up
        heap[place], places[block] = block, place

    def _sink(self, place: int, block: int) -> None:
        """Puts `block` where `place` is, or further from the top."""
        heap, places, value = self._heap, self._places, self._value
        own, size = value[block], len(heap)
        while (down := 2 * place + 1) < size:
            if down + 1 < size and value[heap[down + 1]] < value[heap[down]]:
                down += 1
            child = heap[down]
            if own <= value[child]:
                break
            heap[place], places[child] = child, place
            place = down
        heap[place], places[block] = block, place

    def is_consistent(self) -> bool:
        """Whether every block is at most as valuable as those below it and knows its place. For tests; slow."""
        heap = np.asarray(self._heap, np.int64)
        places = np.asarray(self._places)
        below = np.arange(1, len(heap))
        return (
            bool((places[heap] == np.arange(len(heap))).all())
            and int((places >= 0).sum()) == len(heap)
            and bool((self.values[heap[(below - 1) // 2]] <= self.values[heap[below]]).all())
        )
