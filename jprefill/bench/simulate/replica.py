"""One device in virtual time: the real scheduler over the real prefix store, and a clock that passes move."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jprefill.config import EngineConfig
from jprefill.kvstore.contract import Store
from jprefill.kvstore.eviction import make_order
from jprefill.kvstore.index import BlockIndex
from jprefill.kvstore.keep import KeepPolicy
from jprefill.kvstore.lower_tiers import Pending
from jprefill.kvstore.none import NoStore
from jprefill.kvstore.store import PrefixStore
from jprefill.scheduler.features import ChunkWalk
from jprefill.scheduler.jct import JctModel
from jprefill.scheduler.pieces import Piece
from jprefill.scheduler.planning import Room
from jprefill.scheduler.preemption import RunningPass
from jprefill.scheduler.queue import PendingRequest
from jprefill.scheduler.scheduler import Scheduler

_GHOSTS_PER_BLOCK, _MIN_GHOSTS = 8, 65_536  # as `kvstore.build` has them, which imports JAX


class NoPool:
    """Blocks without arrays, and nothing below them."""

    block_bytes = 1

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks, self.block_size = num_blocks, block_size

    def read(self, block_ids: Sequence[int]) -> Pending:
        """Only lower tiers ask."""
        raise NotImplementedError

    def write(self, block_ids: Sequence[int], payloads: np.ndarray) -> None:
        """Only lower tiers bring anything."""
        raise NotImplementedError

    def reset(self) -> None:
        """Nothing is held."""


@dataclass(eq=False, slots=True)
class _Running:
    """A pass under way.

    Attributes:
      left_s: of its own time, from `since_s` on.
      layer_s: between two of its boundaries.
    """

    passing: RunningPass
    total_s: float
    left_s: float
    since_s: float
    layer_s: float
    can_wait: bool


@dataclass(slots=True)
class Answer:
    """Of one request."""

    pending: PendingRequest
    at_s: float
    cached_tokens: int


@dataclass(eq=False)
class Replica:
    """See the module. `next_s` is when something happens here by itself; infinite: only an arrival can wake it.

    Args:
      true: what passes take.
      believed: what the scheduler starts from; it learns.
      crossover_tokens: of the eviction order.
      noise: makes a factor for each pass.
    """

    config: EngineConfig
    true: JctModel
    believed: JctModel
    walk: ChunkWalk
    num_layers: int
    num_blocks: int
    crossover_tokens: int
    noise: Callable[[], float] = lambda: 1.0
    next_s: float = float("inf")
    busy_s: float = 0.0
    num_passes: int = 0
    num_waiting_tokens: int = 0
    _stack: list[_Running] = field(default_factory=list)

    def __post_init__(self) -> None:
        last = self.walk.buckets[-1]
        self._store = self._make_store()
        self._scheduler = Scheduler(self.config, self._store, self.believed, self.walk, Room(last, last))

    def _make_store(self) -> Store:
        if not self.num_blocks:
            return NoStore()
        block_size = self.config.block_size
        index = BlockIndex(
            self.num_blocks, block_size, make_order(self.config.eviction, self.num_blocks, self.crossover_tokens)
        )
        policy = KeepPolicy(self.config.keep, max(_MIN_GHOSTS, _GHOSTS_PER_BLOCK * self.num_blocks))
        return PrefixStore(NoPool(self.num_blocks, block_size), index, policy, b"")

    def arrive(self, pending: PendingRequest, now_s: float) -> None:
        """A request comes. An idle replica starts; a long pass looks at it at its next layer boundary."""
        self._scheduler.arrive([pending])
        self.num_waiting_tokens += pending.request.num_tokens
        if not self._stack:
            self._start(self._scheduler.plan(now_s), now_s, may_wait=True)
        else:
            self._look_at(now_s)

    def _look_at(self, at_s: float) -> None:
        """Stops the pass on top at its first boundary from then on, if it has one and may wait."""
        top = self._stack[-1]
        done_s = at_s - top.since_s
        if top.can_wait and done_s < top.left_s:
            to_boundary_s = -(top.total_s - top.left_s + done_s) % top.layer_s
            if done_s + to_boundary_s < top.left_s - 1e-12:
                self.next_s = min(self.next_s, at_s + to_boundary_s)

    def wake(self, now_s: float) -> list[Answer]:
        """What `next_s` announced: a pass ends, or is at a boundary where shorter ones wait."""
        top = self._stack[-1]
        top.left_s -= now_s - top.since_s
        top.since_s = now_s
        if top.left_s > 1e-9:
            self._go_on(now_s)
            return []
        answers = self._end(self._stack.pop(), now_s)
        if self._stack:
            self._stack[-1].passing.delayed_s += now_s - self._stack[-1].since_s
            self._stack[-1].since_s = now_s
            self._go_on(now_s)
        else:
            self._start(self._scheduler.plan(now_s), now_s, may_wait=True)
        return answers

    def _go_on(self, now_s: float) -> None:
        """Before the next layer of the pass on top: something shorter, or the layer."""
        top = self._stack[-1]
        share_left = top.left_s / top.total_s
        if top.can_wait and (pieces := self._scheduler.plan_before(top.passing, share_left, now_s)):
            self._start(pieces, now_s, may_wait=False)
        else:
            self.next_s = now_s + top.left_s
            self._look_at(top.passing.look_again_s)

    def _start(self, pieces: list[Piece], now_s: float, *, may_wait: bool) -> None:
        if not pieces:
            self.next_s = float("inf")
            return
        seconds = self.true.predict(self.walk.of_pass(pieces)) * self.noise()
        passing = RunningPass(pieces, self._scheduler.predict_s(pieces), now_s)
        can_wait = may_wait and self._scheduler.can_wait(passing)
        self._stack.append(_Running(passing, seconds, seconds, now_s, seconds / self.num_layers, can_wait))
        self.busy_s += seconds
        self.num_passes += 1
        self.next_s = now_s + seconds

    def _end(self, running: _Running, now_s: float) -> list[Answer]:
        """As the engine ends a pass: learn, release, answer; what has items left waits again."""
        pieces = running.passing.pieces
        self._scheduler.learn(pieces, running.total_s)
        answers, unfinished = [], []
        for piece in pieces:
            self._store.release(piece.lease, is_good=True)
            pending = piece.pending
            pending.next_item = piece.end_item
            pending.num_cached_tokens += piece.num_saved_tokens
            if pending.num_items_left:
                unfinished.append(pending)
            else:
                self.num_waiting_tokens -= pending.request.num_tokens
                answers.append(Answer(pending, now_s, pending.num_cached_tokens))
        self._scheduler.arrive(unfinished)
        return answers
