"""The waiting room between the callers' threads and the engine thread."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from jprefill.errors import DeadlineExceededError, NotReadyError, QueueFullError
from jprefill.kvstore.hashing import BlockKeys
from jprefill.types import ItemScores, ScoreRequest, ScoreResult


@dataclass(eq=False, slots=True)
class PendingRequest:
    """A request on its way to its one answer. Only the engine thread changes it after `put`.

    `num_shared_blocks` of its prompt others have too, as far as was known when it arrived.

    Invariant: items `[0, next_item)` are in `scores`; the request is in the queue until `next_item` reaches the end.
    """

    request: ScoreRequest
    future: "Future[ScoreResult]"
    keys: BlockKeys
    submitted_s: float = field(default_factory=time.monotonic)
    started_s: float | None = None
    device_s: float = 0.0
    next_item: int = 0
    num_cached_tokens: int = 0
    num_kept_tokens: int = 0
    must_run_alone: bool = False
    has_arrived: bool = False
    num_shared_blocks: int = 0
    scores: list[ItemScores] = field(default_factory=list)

    @property
    def group(self) -> bytes | None:
        """The key of the last block that others have too; None: of none."""
        return self.keys.hashes[self.num_shared_blocks - 1] if self.num_shared_blocks else None

    @property
    def num_items_left(self) -> int:
        """Items that no pass has computed yet."""
        return len(self.request.items) - self.next_item


class Changes(NamedTuple):
    """What happened to the queue since the engine thread looked last.

    Attributes:
      came: requests that wait from now on, or again.
      left: requests whose caller has left, or that were dropped; one that never came may be among them.
    """

    came: list[PendingRequest]
    left: list[PendingRequest]


class WaitingQueue:
    """Bounded, thread-safe. Callers `put`; the engine thread alone calls `wait`, `poll`, `take` and `put_back`.

    Every call but `drop_all` costs the same however many wait. The order is not known here: see `Scheduler`.

    Invariant: a request leaves by `take` (alive), or with a typed error or a cancelled future; never silently.
    """

    def __init__(self, max_requests: int, max_tokens: int):
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._waiting: dict[PendingRequest, None] = {}
        self._came: list[PendingRequest] = []
        self._cancelled: deque[PendingRequest] = deque()  # a caller's thread appends without the lock
        self._dropped: list[PendingRequest] = []
        self._num_tokens = 0
        self._is_closed = False
        self._parting: Exception | None = None
        self._changed = threading.Condition()
        self.num_shed = 0

    def put(self, pending: PendingRequest, retry_after_s: float = 1.0) -> None:
        """Adds a request.

        Raises:
          QueueFullError: it would pass `max_requests` or `max_tokens`; nothing was queued.
          NotReadyError: the queue is closed.
        """
        num_tokens = pending.request.num_tokens
        with self._changed:
            if self._is_closed:
                raise NotReadyError("the engine is shutting down and takes no new requests")
            if len(self._waiting) >= self._max_requests:
                raise QueueFullError(
                    f"{len(self._waiting)} requests are waiting, the limit", retry_after_s=retry_after_s
                )
            if self._waiting and self._num_tokens + num_tokens > self._max_tokens:
                raise QueueFullError(
                    f"{self._num_tokens} tokens are waiting and {num_tokens} more would pass the limit of "
                    f"{self._max_tokens}",
                    retry_after_s=retry_after_s,
                )
            self._add(pending)
            self._changed.notify()
        pending.future.add_done_callback(partial(self._note_cancelled, pending))

    def _add(self, pending: PendingRequest) -> None:
        self._waiting[pending] = None
        self._came.append(pending)
        self._num_tokens += pending.request.num_tokens

    def _note_cancelled(self, pending: PendingRequest, future: "Future[ScoreResult]") -> None:
        if future.cancelled():
            self._cancelled.append(pending)

    def put_back(self, pending: Sequence[PendingRequest]) -> None:
        """Returns requests that were taken, whatever the limits: they had been accepted."""
        with self._changed:
            if self._parting is None:
                for one in pending:
                    self._add(one)
                return
        for one in pending:
            fail(one, self._parting)

    def wait(self) -> Changes | None:
        """Blocks until somebody waits, and says what changed; None once closed and empty."""
        with self._changed:
            while True:
                changes = self._take_changes()
                if self._waiting:
                    return changes
                if self._is_closed:
                    return None
                self._changed.wait()

    def poll(self) -> Changes:
        """What changed; does not block."""
        with self._changed:
            return self._take_changes()

    def _take_changes(self) -> Changes:
        left, self._dropped = self._dropped, []
        while self._cancelled:
            pending = self._cancelled.popleft()
            if self._remove(pending):
                self.num_shed += 1
                left.append(pending)
        came, self._came = self._came, []
        return Changes([pending for pending in came if pending in self._waiting], left)

    def _remove(self, pending: PendingRequest) -> bool:
        """False if it does not wait."""
        if pending not in self._waiting:
            return False
        del self._waiting[pending]
        self._num_tokens -= pending.request.num_tokens
        return True

    def take(self, chosen: Iterable[PendingRequest]) -> set[PendingRequest]:
        """Takes requests out; those that still waited."""
        with self._changed:
            return {pending for pending in chosen if self._remove(pending)}

    def take_all(self) -> list[PendingRequest]:
        """Takes everything out, in order of arrival."""
        with self._changed:
            self._came = []
            waiting = sorted(self._waiting, key=lambda pending: pending.submitted_s)
            return [pending for pending in waiting if self._remove(pending)]

    def shed(self, late: Iterable[PendingRequest], now_s: float) -> None:
        """Answers requests whose deadline has passed."""
        for pending in self.take(late):
            self.num_shed += 1
            late_ms = 1000 * (now_s - (pending.request.deadline_s or now_s))
            fail(pending, DeadlineExceededError(f"the deadline passed {late_ms:.0f} ms before the batch started"))

    def close(self) -> None:
        """Refuses new requests from now on; `wait` goes on until nothing waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def drop_all(self, error: Exception) -> None:
        """Answers everything that waits, and whatever is put back later, with `error`."""
        with self._changed:
            self._parting = error
            dropped = list(self._waiting)
            self._waiting, self._num_tokens = {}, 0
            self._dropped += dropped
        for pending in dropped:
            fail(pending, error)

    @property
    def num_requests(self) -> int:
        """Requests waiting now."""
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        """Tokens waiting now."""
        return self._num_tokens


def fail(pending: PendingRequest, error: Exception) -> None:
    """Gives a request its one answer: an error. A caller that has left is not told."""
    if pending.future.set_running_or_notify_cancel():
        pending.future.set_exception(error)
