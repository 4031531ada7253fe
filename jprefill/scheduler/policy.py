"""The order in which waiting requests are considered."""

from collections.abc import Callable, Sequence

from jprefill.config import Policy
from jprefill.scheduler.queue import PendingRequest

Order = Callable[[Sequence[PendingRequest]], Sequence[PendingRequest]]


def first_come_first_served(waiting: Sequence[PendingRequest]) -> Sequence[PendingRequest]:
    """Arrival order: the naive twin of every other policy."""
    return waiting


POLICIES: dict[Policy, Order] = {"fcfs": first_come_first_served}
