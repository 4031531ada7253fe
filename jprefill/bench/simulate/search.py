"""Throughput at equal p99: the largest rate at which a policy keeps to a bound."""

from collections.abc import Callable

from jprefill.bench.simulate.report import Record

_NUM_HALVINGS = 7  # of the range between a rate that is good and one that is not
_MOST = 64  # times the start: nobody looks further


def largest_rate(run: Callable[[float], Record], bound_s: float, start_qps: float) -> Record | None:
    """The run at the largest rate found, by doubling and halving; None: not even a small rate is good."""
    best, low, high = None, 0.0, start_qps
    while (one := run(high)).p99_s <= bound_s:
        best, low, high = one, high, 2 * high
        if high > _MOST * start_qps:
            return best
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        if (one := run(middle)).p99_s <= bound_s:
            best, low = one, middle
        else:
            high = middle
    return best
