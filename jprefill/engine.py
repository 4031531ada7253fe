"""The spine. Read this first.

    submit ──> queue ──> plan ──────> pack ──> run ──> unpack ──> release ──> answer
                          │ lease cached blocks, reserve room       │ commit what was kept
    callers' threads  │                  engine thread                        │  futures

One thread owns the device, and what the prefix store holds on it. A request is checked before it is queued; from then
on it gets exactly one answer: its scores, or one typed error.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from jprefill.assembly import assemble
from jprefill.config import EngineConfig
from jprefill.errors import DeadlineExceededError, EngineError, NotReadyError
from jprefill.kvstore.contract import Store
from jprefill.kvstore.none import NoStore
from jprefill.model.compiles import CompileCounter
from jprefill.pallas.device import default_chunk_size
from jprefill.scheduler.admission import check
from jprefill.scheduler.features import ChunkWalk
from jprefill.scheduler.jct import JctModel
from jprefill.scheduler.packer import pack, unpack
from jprefill.scheduler.pieces import Piece
from jprefill.scheduler.planning import Room
from jprefill.scheduler.preemption import RunningPass
from jprefill.scheduler.queue import Changes, PendingRequest, WaitingQueue, fail
from jprefill.scheduler.scheduler import Scheduler
from jprefill.types import (
    Batch,
    BatchScores,
    ClassHead,
    EngineStats,
    ItemScores,
    ScoreRequest,
    ScoreResult,
    Timings,
    TokenIds,
    Usage,
)

if TYPE_CHECKING:
    from jprefill.model.checkpoints import Checkpoint

log = logging.getLogger("jprefill.engine")

LOOK_AHEAD = 4  # requests whose stored blocks are brought up early


@runtime_checkable
class BatchRunner(Protocol):
    """What the engine thread needs of a device. `model.runner.Runner` is the real one."""

    buckets: tuple[int, ...]
    vocab_size: int

    def run(
        self,
        batch: Batch,
        meanwhile: Callable[[], None] | None = None,
        between_layers: Callable[[float], bool] | None = None,
    ) -> BatchScores | None:
        """One forward pass; calls `meanwhile` while the device works, and blocks until the scores are on the host.

        Calls `between_layers` with the share of the layers that are left; False ends the pass without scores.
        """
        ...


class Engine:
    """Scores requests on one device.

    Thread safety: `submit`, `stats` and `close` may be called from any thread.
    Invariant: submitted = answered + waiting + running, at every moment.

    Attributes:
      walk: how passes walk their token rows, which is what they are priced by.
    """

    def __init__(
        self,
        runner: BatchRunner,
        config: EngineConfig,
        *,
        model_name: str,
        max_model_len: int,
        class_head: ClassHead | None = None,
        store: Store | None = None,
        grid: int = 1,
        jct: JctModel | None = None,
        save_jct: Callable[[JctModel], None] | None = None,
    ):
        """Starts the engine thread.

        Args:
          store: of prefixes; None: there is none. The runner moves its blocks.
          grid: KV rows on which segments start; see `scheduler.pieces`.
          jct: what passes take; None: a guess, which passes correct.
          save_jct: called with it when the engine closes.
        """
        self.model_name = model_name
        self.max_model_len = max_model_len
        self.vocab_size = runner.vocab_size
        self.class_head = class_head
        self.config = config
        self._runner = runner
        self._save_jct = save_jct
        self._store = store or NoStore()
        room = Room(runner.buckets[-1], runner.buckets[-1], grid)
        self.walk = ChunkWalk(config.chunk_size or default_chunk_size(), runner.buckets)
        self._scheduler = Scheduler(config, self._store, jct or JctModel(), self.walk, room)
        self._queue = WaitingQueue(config.max_queued_requests, config.max_queued_tokens)
        self._running: Sequence[PendingRequest] = ()
        self._counts = dict.fromkeys(
            (
                "num_finished",
                "num_failed",
                "num_batches",
                "num_prompt_tokens",
                "num_cached_tokens",
                "num_kept_tokens",
                "num_given_up",
                "num_preemptions",
            ),
            0,
        )
        self._num_computed_tokens = 0
        self._device_busy_s = 0.0
        self._compiles = CompileCounter()
        self._thread = threading.Thread(target=self._loop, name="jprefill-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_checkpoint(cls, checkpoint: "Checkpoint", config: EngineConfig, *, progress: bool = False) -> "Engine":
        """Compiles every program for the checkpoint, runs each once, and starts the engine thread.

        Raises:
          ConfigError: lengths that contradict each other, the model or the device's memory.
        """
        parts = assemble(checkpoint, config, progress=progress)
        return cls(
            parts.runner,
            parts.config,
            model_name=checkpoint.name,
            max_model_len=parts.max_model_len,
            class_head=checkpoint.config.class_head,
            store=parts.store,
            grid=parts.runner.grid,
            jct=parts.jct,
            save_jct=parts.save_jct,
        )

    def submit(self, request: ScoreRequest) -> "Future[ScoreResult]":
        """Queues a request. Cancelling the future drops it if it has not started.

        Raises:
          InvalidRequestError: (and its subclasses) the request could never run; nothing was queued.
          QueueFullError: back-pressure.
          NotReadyError: the engine is shutting down or dead.
        """
        check(request, self.config, self.vocab_size, self.max_model_len, self.class_head)
        if not self.is_alive:
            raise NotReadyError("the engine is not running")
        pending = PendingRequest(request, Future(), self._store.keys(request))
        self._queue.put(pending, retry_after_s=self._retry_after_s())
        self._store.prefetch(pending.keys)
        return pending.future

    def set_shared_tokens(self, token_ids: TokenIds) -> None:
        """Leading tokens that salts do not separate in the prefix store. Call it before the first request."""
        self._store.set_shared_tokens(token_ids)

    # ---- the engine thread ----------------------------------------------------------------------------------------

    def _loop(self) -> None:
        """Runs batches until the queue is closed and empty."""
        while (changes := self._queue.wait()) is not None:
            try:
                self._step(changes)
            except Exception as error:  # the loop's edge: whatever it was, every request gets its answer
                log.exception("a batch of %d requests failed", len(self._running))
                self._recover(EngineError(f"the engine failed: {type(error).__name__}"))
            self._running = ()

    def _step(self, changes: Changes) -> None:
        """One pass, if anybody waits."""
        started_s = time.monotonic()
        self._follow(changes, started_s)
        if pieces := self._take(self._scheduler.plan(started_s)):
            self._run(pieces, started_s)

    def _follow(self, changes: Changes, now_s: float) -> None:
        """Tells the scheduler who came and left, and sheds those whose deadline has passed."""
        self._scheduler.leave(changes.left)
        self._scheduler.arrive(changes.came)
        late = self._scheduler.late(now_s)
        self._queue.shed(late, now_s)
        self._scheduler.leave(late)

    def _take(self, pieces: list[Piece]) -> list[Piece]:
        """Takes the requests of a planned pass out of the queue; their pieces hold leases on the store."""
        taken = self._queue.take(piece.pending for piece in pieces)
        for piece in pieces:
            if piece.pending not in taken:  # it was dropped meanwhile: the engine is closing
                self._store.release(piece.lease, is_good=False)
        self._running = [*self._running, *taken]
        return [piece for piece in pieces if piece.pending in taken]

    def _run(self, pieces: list[Piece], started_s: float, *, may_wait: bool = True) -> None:
        """Packs, runs, unpacks, answers. A failure stays with the requests of this batch."""
        passing = RunningPass(pieces, self._scheduler.predict_s(pieces), started_s)
        bucket = next(b for b in self._runner.buckets if b >= sum(piece.num_tokens for piece in pieces))
        batch = pack(pieces, bucket)
        may_wait = may_wait and self._scheduler.can_wait(passing)
        between_layers = partial(self._between_layers, passing) if may_wait else None
        scores = self._runner.run(batch, self._look_ahead, between_layers)
        elapsed_s = time.monotonic() - started_s - passing.delayed_s
        if scores is None:
            self._give_up(pieces)
            return
        self._counts["num_batches"] += 1
        self._num_computed_tokens += batch.num_tokens
        self._device_busy_s += elapsed_s
        self._scheduler.learn(pieces, elapsed_s)
        unfinished = []
        for piece, items in zip(pieces, unpack(pieces, scores), strict=True):
            is_good = all(np.isfinite(item.logprobs).all() for item in items)
            may_retry = len(pieces) > 1 or piece.num_cached > 0
            is_complete = is_good and self._collect(piece, items, started_s, elapsed_s)
            self._store.release(piece.lease, is_good=is_good)
            if not is_good:
                self._retry(
                    [piece.pending], EngineError("the model gave a value that is not finite"), may_retry=may_retry
                )
            elif is_complete:
                self._answer(piece.pending)
            else:
                unfinished.append(piece.pending)
        self._queue.put_back(unfinished)

    def _between_layers(self, passing: RunningPass, share_left: float) -> bool:
        """Lets shorter passes go before the rest of a long one; False if nobody waits for that any more."""
        mine, has_run = self._running, False
        while (changes := self._queue.poll()).came or has_run or time.monotonic() >= passing.look_again_s:
            started_s = time.monotonic()
            self._follow(changes, started_s)
            pieces = self._take(self._scheduler.plan_before(passing, share_left, started_s))
            if has_run := bool(pieces):
                self._counts["num_preemptions"] += 1
                self._run(pieces, started_s, may_wait=False)
            self._running = mine
            passing.delayed_s += time.monotonic() - started_s
        self._scheduler.leave(changes.left)
        return passing.is_wanted(time.monotonic())

    def _give_up(self, pieces: list[Piece]) -> None:
        """Ends a pass that stopped between two layers: its callers have left, or their deadlines passed."""
        for piece in pieces:
            self._store.release(piece.lease, is_good=False)
            self._counts["num_given_up"] += 1
            fail(piece.pending, DeadlineExceededError("the deadline passed while the request ran"))

    def _collect(self, piece: Piece, items: list[ItemScores], started_s: float, elapsed_s: float) -> bool:
        """Books a piece's scores; True when the request is complete."""
        pending = piece.pending
        pending.started_s = pending.started_s or started_s
        pending.device_s += elapsed_s
        pending.scores += items
        pending.next_item = piece.end_item
        pending.num_cached_tokens += piece.num_saved_tokens
        pending.num_kept_tokens += piece.num_kept_tokens
        return pending.num_items_left == 0

    def _answer(self, pending: PendingRequest) -> None:
        """The one answer of a finished request."""
        now = time.monotonic()
        usage = Usage(pending.request.num_prompt_tokens, pending.num_cached_tokens, pending.num_kept_tokens)
        timings = Timings(
            queue_s=(pending.started_s or now) - pending.submitted_s,
            device_s=pending.device_s,
            total_s=now - pending.submitted_s,
        )
        self._counts["num_finished"] += 1
        self._counts["num_prompt_tokens"] += usage.num_prompt_tokens
        self._counts["num_cached_tokens"] += usage.num_cached_tokens
        self._counts["num_kept_tokens"] += usage.num_kept_tokens
        if pending.future.set_running_or_notify_cancel():
            pending.future.set_result(ScoreResult(tuple(pending.scores), usage, timings))

    def _recover(self, error: EngineError) -> None:
        """After a failed pass or plan: the store and the book start anew, and each request of the pass is answered."""
        self._store.recover()
        failed, waiting = self._running, self._queue.take_all()
        if not failed:  # the plan failed: the first one in arrival order goes
            failed, waiting = waiting[:1], waiting[1:]
        self._scheduler = self._scheduler.anew()
        self._queue.put_back(waiting)
        self._retry(failed, error, may_retry=True)

    def _retry(self, failed: Sequence[PendingRequest], error: EngineError, *, may_retry: bool) -> None:
        """Each request runs once more, alone and without the store; one that fails so gets the error."""
        for pending in failed:
            if pending.future.done():  # it was answered before the failure, or its caller left
                continue
            if may_retry and not pending.must_run_alone:
                pending.must_run_alone = True
                self._queue.put_back([pending])
            else:
                self._counts["num_failed"] += 1
                fail(pending, error)

    def _look_ahead(self) -> None:
        """Brings blocks of the next requests up from lower tiers while the device works."""
        if self._store.has_lower_tiers:
            for pending in self._scheduler.coming(time.monotonic(), LOOK_AHEAD):
                self._store.restore(pending.keys)

    # ---- around it ------------------------------------------------------------------------------------------------

    def _retry_after_s(self) -> float:
        """How long the waiting requests will take, those that came since the last decision included."""
        num_priced = max(1, len(self._scheduler))
        return max(1.0, self._scheduler.total_jct_s * max(1.0, self._queue.num_requests / num_priced))

    @property
    def is_alive(self) -> bool:
        """Whether the engine thread runs."""
        return self._thread.is_alive()

    def stats(self) -> EngineStats:
        """Counters and gauges now."""
        counts = dict(self._counts)
        return EngineStats(
            num_waiting=self._queue.num_requests,
            num_waiting_tokens=self._queue.num_tokens,
            num_running=len(self._running),
            num_shed=self._queue.num_shed + counts.pop("num_given_up"),
            num_computed_tokens=self._num_computed_tokens,
            num_compiles_after_start=self._compiles.count,
            device_busy_s=self._device_busy_s,
            tiers=self._store.stats(),
            **counts,
        )

    def close(self, timeout_s: float = 0.0) -> None:
        """Takes no new requests, finishes what was accepted for up to `timeout_s`, answers the rest with 503."""
        self._queue.close()
        self._thread.join(timeout_s)
        self._queue.drop_all(NotReadyError("the engine was shut down before this request could run"))
        self._thread.join()
        self._store.close(timeout_s)
        if self._save_jct is not None:
            self._save_jct(self._scheduler.model)
        self._compiles.close()
