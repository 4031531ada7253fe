"""`Scheduler`: who waits, what each would take now, who rides in the next pass. No JAX: the simulator runs it too.

    arrive ──> prices ──> order ──────> plan ──────> learn
               from what the store      a pass, its  the pass took so long
               holds now, and what      leases held
               passes have taken

The thread that owns the store owns it as well.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from jprefill.config import EngineConfig
from jprefill.kvstore.contract import Store
from jprefill.scheduler.features import ChunkWalk
from jprefill.scheduler.filling import Filling
from jprefill.scheduler.jct import JctModel
from jprefill.scheduler.pieces import Piece
from jprefill.scheduler.planning import Room, plan_batch
from jprefill.scheduler.policy import Rule
from jprefill.scheduler.preemption import MIN_S, RunningPass
from jprefill.scheduler.pricing import PriceBook
from jprefill.scheduler.queue import PendingRequest

NUM_REFRESHED = 8  # requests a decision whose blocks in lower tiers are counted again
NUM_CONSIDERED = 64  # requests, for a pass that goes first
_PREEMPTIVE = ("jct", "srjf")  # the others are not about time, or about time waited
MAX_FIXED_SHARE = 0.05  # of a pass's time: beyond the knee, packing more gains no more than this


class Scheduler:
    """See the module.

    Invariant: a request is here from `arrive` until `plan` takes it or `leave` names it.

    Attributes:
      model: of job completion times; it learns from every pass.
    """

    def __init__(self, config: EngineConfig, store: Store, model: JctModel, walk: ChunkWalk, room: Room):
        """Takes policy, fairness, bound and packing from `config`."""
        self._config = config
        self.model, self._walk, self._room, self._store = model, walk, room, store
        self._packs, self._max_budget = config.packing, config.max_batch_tokens or room.num_tokens
        self._nested_tokens = walk.buckets[-2] if len(walk.buckets) > 1 else 0
        self._may_preempt = config.preemption and config.policy in _PREEMPTIVE and self._nested_tokens > 0
        self._book = PriceBook(
            store,
            model,
            walk,
            Rule(config.policy, config.fairness, config.max_overtaken_s),
            block_bytes=store.block_bytes,
            num_refreshed=NUM_REFRESHED if store.has_lower_tiers else 0,
        )

    def __len__(self) -> int:
        """Number of waiting requests."""
        return len(self._book)

    def anew(self) -> "Scheduler":
        """The same with nobody waiting: after a failure that may have left this one halfway through a change."""
        return Scheduler(self._config, self._store, self.model, self._walk, self._room)

    def arrive(self, came: Iterable[PendingRequest]) -> None:
        """Requests wait from now on, or again."""
        for pending in came:
            if not pending.has_arrived:
                pending.has_arrived = True
                pending.num_shared_blocks = self._store.arrive(pending.request, pending.keys)
            self._book.add(pending)

    def leave(self, left: Iterable[PendingRequest]) -> None:
        """Requests wait no more; those that never came are passed over."""
        self._book.remove([pending for pending in left if pending in self._book])

    def late(self, now_s: float) -> list[PendingRequest]:
        """Requests whose deadline has passed; they stay until `leave`."""
        return self._book.late(now_s)

    def plan(self, now_s: float) -> list[Piece]:
        """The next pass: its requests leave, and the caller releases their leases.

        Nobody waits for others to come: a pass takes of what is there.
        """
        filling = self._filling(self.budget, self._max_budget)
        return self._take(plan_batch(self._book.order(now_s), self._room, self._store, filling=filling))

    def _filling(self, budget: int, max_tokens: int) -> Filling:
        return Filling(budget if self._packs else 0, max_tokens, len(self._book), self._walk.num_rows)

    def plan_before(self, passing: RunningPass, share_left: float, now_s: float) -> list[Piece]:
        """A pass that goes before the rest of one that runs, of requests that are so short; see `preemption`."""
        num_chunks = int((passing.allowance_s(share_left) - self.model.coefficients[0]) / self._chunk_s)
        most = max(0, min(num_chunks * self._walk.chunk_size, self._nested_tokens))
        filling = self._filling(min(self.budget, most), most)
        ordered = list(islice(self._book.order(now_s, at_most_s=passing.most_s(share_left)), NUM_CONSIDERED))
        riders, num_tokens = self._riders(ordered, filling)
        num_others = len(self._book) + len(passing.pieces) - len(riders)
        if not passing.is_worth(riders, self._wasted_s(num_tokens) * num_others, now_s):
            return []
        room, suspended = replace(self._room, num_tokens=self._nested_tokens), passing.pieces
        return self._take(plan_batch(ordered, room, self._store, filling=filling, suspended=suspended))

    def _riders(self, ordered: Sequence[PendingRequest], filling: Filling) -> tuple[list[PendingRequest], int]:
        """Who would ride in a pass, and its tokens, without a look into the store."""
        riders, num_tokens = [], 0
        for pending in ordered:
            num_new = self._book.num_new_tokens(pending)
            if not riders or filling.may_join(num_new, num_tokens, len(riders)):
                riders.append(pending)
                num_tokens += num_new
        return riders, num_tokens

    def _wasted_s(self, num_tokens: int) -> float:
        """Of a pass over short prompts, what they would not take in a full one: the fixed cost and padding."""
        padding = self._walk.num_rows(num_tokens) - num_tokens
        return self.model.coefficients[0] + padding / self._walk.chunk_size * self._chunk_s

    def _take(self, pieces: list[Piece]) -> list[Piece]:
        self._book.remove([piece.pending for piece in pieces])
        return pieces

    def can_wait(self, passing: RunningPass) -> bool:
        """Whether a pass that starts now may be held up between its layers."""
        return self._may_preempt and passing.predicted_s >= MIN_S

    def coming(self, now_s: float, count: int) -> Sequence[PendingRequest]:
        """Who would go next."""
        return list(islice(self._book.order(now_s), count))

    @property
    def budget(self) -> int:
        """Tokens up to which others join the first request of a pass: the knee of tokens a second.

        From there on the fixed cost of a pass is `MAX_FIXED_SHARE` of its time: more tokens in it gain next to nothing,
        and everybody in it waits for them. A whole number of chunks, as part of one costs as much.
        """
        chunk_size = self._walk.chunk_size
        num_chunks = self.model.coefficients[0] * (1 / MAX_FIXED_SHARE - 1) / self._chunk_s
        return min(int(np.ceil(max(1.0, min(num_chunks, 1e6)))) * chunk_size, self._max_budget)

    @property
    def _chunk_s(self) -> float:
        """Seconds that one more chunk of short prompts takes."""
        _, per_chunk_s, per_key_s, _ = self.model.coefficients
        return max(per_chunk_s + per_key_s * self._walk.chunk_size**2 / 2, 1e-9)

    def predict_s(self, pieces: Sequence[Piece]) -> float:
        """Seconds that a pass over the pieces takes."""
        return self.model.predict(self._walk.of_pass(pieces))

    def learn(self, pieces: Sequence[Piece], seconds: float) -> None:
        """A pass took so long, restores included. Call it while the pieces hold their leases."""
        num_restored = sum(piece.lease.num_restored for piece in pieces)
        self.model.observe(self._walk.of_pass(pieces, float(num_restored * self._store.block_bytes)), seconds)

    @property
    def num_repriced(self) -> int:
        """Requests whose price was looked up for the last decision."""
        return self._book.num_repriced

    @property
    def total_jct_s(self) -> float:
        """Seconds that everybody here would take one by one, at the last decision. Any thread."""
        return self._book.total_jct_s
