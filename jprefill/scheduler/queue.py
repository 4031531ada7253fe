"""The waiting room between the callers' threads and the engine thread."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from jprefill.errors import DeadlineExceededError, NotReadyError, QueueFullError
from jprefill.kvstore.hashing import BlockKeys
from jprefill.types import ItemScores, ScoreRequest, ScoreResult


@dataclass(eq=False, slots=True)
class PendingRequest:
    """A request on its way to its one answer. Only the engine thread changes it after `put`.

    `group` is the key of the last block of its prompt that others have too; None: of none, as far as was known when it
    arrived.

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
    group: bytes | None = None
    scores: list[ItemScores] = field(default_factory=list)

    @property
    def num_items_left(self) -> int:
        """Items that no pass has computed yet."""
        return len(self.request.items) - self.next_item


class WaitingQueue:
    """Bounded, thread-safe. Callers `put`; the engine thread alone calls `wait`, `remove` and `put_back`.

    Invariant: a request leaves by `remove` (alive), or is shed with a typed error in its future; never silently.
    """

    def __init__(self, max_requests: int, max_tokens: int):
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._waiting: list[PendingRequest] = []
        self._num_tokens = 0
        self._is_closed = False
        self._parting: Exception | None = None
        self._changed = threading.Condition()
        self.num_shed = 0

    def put(self, pending: PendingRequest, retry_after_s: float = 1.0) -> None:
        """Adds a request at the end.

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
            self._waiting.append(pending)
            self._num_tokens += num_tokens
            self._changed.notify()

    def put_back(self, pending: Sequence[PendingRequest]) -> None:
        """Returns requests that were removed, to the front and whatever the limits: they had been accepted."""
        with self._changed:
            if self._parting is None:
                self._waiting[:0] = pending
                self._num_tokens += sum(p.request.num_tokens for p in pending)
                return
        for one in pending:
            fail(one, self._parting)

    def wait(self) -> Sequence[PendingRequest]:
        """Blocks until there is work, shedding what is dead; the waiting requests, or () once closed and empty."""
        with self._changed:
            while True:
                self._shed()
                if self._waiting or self._is_closed:
                    return tuple(self._waiting)
                self._changed.wait()

    def peek(self) -> Sequence[PendingRequest]:
        """The waiting requests now, dead ones included."""
        with self._changed:
            return tuple(self._waiting)

    def remove(self, chosen: Sequence[PendingRequest]) -> None:
        """Takes requests out that `wait` has shown."""
        taken = set(map(id, chosen))
        with self._changed:
            self._waiting = [p for p in self._waiting if id(p) not in taken]
            self._num_tokens -= sum(p.request.num_tokens for p in chosen)

    def _shed(self) -> None:
        """Drops requests whose caller left or whose deadline passed."""
        now = time.monotonic()
        kept = []
        for pending in self._waiting:
            deadline_s = pending.request.deadline_s
            if pending.future.cancelled():
                self.num_shed += 1
            elif deadline_s is not None and now > deadline_s:
                self.num_shed += 1
                late_ms = 1000 * (now - deadline_s)
                fail(
                    pending,
                    DeadlineExceededError(f"the deadline passed {late_ms:.0f} ms before the batch started"),
                )
            else:
                kept.append(pending)
                continue
            self._num_tokens -= pending.request.num_tokens
        self._waiting = kept

    def close(self) -> None:
        """Refuses new requests from now on; `wait` goes on until nothing waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def drop_all(self, error: Exception) -> None:
        """Answers everything that waits, and whatever is put back later, with `error`."""
        with self._changed:
            self._parting = error
            dropped, self._waiting, self._num_tokens = self._waiting, [], 0
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
