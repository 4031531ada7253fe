"""The order in which waiting requests are considered. Pure NumPy.

Whatever the policy, requests are taken by the first of these that differs:

    1. overdue ones first, by when they became so          the bounded wait, below
    2. priority class, the lower number first
    3. the policy's score, the lower first
    4. deadline, the earlier first
    5. arrival

**Bounded wait.** A request may be overtaken for B = `max_overtaken_s * (1 + max(priority, 0))` seconds after it was
submitted; then it is overdue.

*Claim.* Let O be the requests that wait or run at the moment when r becomes overdue (one that runs may come back for
the rest of its items) and whose own due time is not later than r's. From then on every pass takes the earliest of O
and r first, whatever arrives and whatever the scores are. So at most (passes that O needs by itself) + 1 passes start
before r does, the running one included; where every request fits into one pass: |O| + 1. (Not counted are passes that
run between two layers of one of these: together they take as long as it at most, see `preemption`.)
*Proof.* A request that is not in O has a later due time: if it waits or runs then, by the choice of O; if it arrives
later, because it is due after its arrival, which is after r's due time. (1) puts it behind r for as long as r waits. O
therefore only shrinks. `plan_batch` takes the first request in order into every pass and moves it forward by one item
at least, so each pass that starts while O is not empty is one of those that O needs. ∎
*Seconds.* With one bound for all, O has only requests that arrived before r. So r starts at most B + (the longest
pass) later than first come, first served would have started it, if passes take as long as they would have there;
twice that where they are held up between layers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

Keys = Float64[np.ndarray, " _"] | Int64[np.ndarray, " _"]
Slots = Int64[np.ndarray, " _"]

SAVED_WEIGHT = 10.0  # of seconds that the store saves; measured, see ARCHITECTURE
_HEAD = 64  # a pass seldom takes more; the rest is put in order only if it is asked for


class Waiting(NamedTuple):
    """What a policy may look at, one entry per waiting request.

    Attributes:
      jct_s: priced from what the store holds now.
      shared_jct_s: likewise, with a prefix that several wait for shared out among them.
      saved_s: what it would take longer if nothing were cached.
      arrival_jct_s: the price when the request came.
      num_new_tokens: that no tier of the store holds.
    """

    waited_s: Float64[np.ndarray, " n"]
    jct_s: Float64[np.ndarray, " n"]
    shared_jct_s: Float64[np.ndarray, " n"]
    saved_s: Float64[np.ndarray, " n"]
    arrival_jct_s: Float64[np.ndarray, " n"]
    num_cached_tokens: Int64[np.ndarray, " n"]
    num_new_tokens: Int64[np.ndarray, " n"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A policy and its settings.

    Attributes:
      name: in `SCORES`.
      fairness: seconds of job completion time that a second of waiting makes up for; `jct` alone has it.
      max_overtaken_s: see the module.
    """

    name: str
    fairness: float
    max_overtaken_s: float

    @property
    def brings_together(self) -> bool:
        """Whether requests with one prefix follow each other. First come, first served takes nobody out of turn."""
        return self.name != "fcfs"

    def scores(self, waiting: Waiting) -> Keys:
        """The lower one goes first."""
        return SCORES[self.name](waiting, self.fairness)

    def due_s(self, submitted_s: float, priority: int) -> float:
        """When a request becomes overdue."""
        return submitted_s + self.max_overtaken_s * (1 + max(priority, 0))


Score = Callable[[Waiting, float], Keys]


def first_come(waiting: Waiting, fairness: float) -> Keys:
    """Arrival order: the naive twin of every other policy."""
    del fairness
    return -waiting.waited_s


def longest_prefix_match(waiting: Waiting, fairness: float) -> Keys:
    """The most cached tokens first. Source: SGLang (arXiv 2312.07104), its default policy `lpm`."""
    del fairness
    return -waiting.num_cached_tokens


def highest_response_ratio_next(waiting: Waiting, fairness: float) -> Keys:
    """The largest (waited + service) / service, with uncached tokens for the service time.

    A ratio is 1 + waited / service, so the unit of the service does not change the order.
    Source: Brinch Hansen 1971; on uncached tokens in SGLang, `hrrn` (sgl-project/sglang pull request 32911).
    """
    del fairness
    return -waiting.waited_s / np.maximum(waiting.num_new_tokens, 1)


def shortest_remaining_job_first(waiting: Waiting, fairness: float) -> Keys:
    """The smallest job completion time as it was at arrival. Source: PrefillOnly (arXiv 2505.07203), its baseline."""
    del fairness
    return waiting.arrival_jct_s


def continuous_jct(waiting: Waiting, fairness: float) -> Keys:
    """The smallest jct - fairness * waited, priced from what the store holds now, and two things besides.

    What a prefix takes is spent once for all that wait for it, so a pass that many wait for goes before one that is as
    long and serves one: the order by (seconds / requests served), which makes the mean wait shortest (Smith 1956).

    What the store saves now it may not save later: who waits with a cached prefix loses it to those who go before.
    Source: PrefillOnly (arXiv 2505.07203), algorithm 1. What is printed there keeps the smallest jct and compares it
    with scores; here the score is compared with scores, as its text says.
    """
    return waiting.shared_jct_s - fairness * waiting.waited_s - SAVED_WEIGHT * waiting.saved_s


SCORES: dict[str, Score] = {
    "fcfs": first_come,
    "lpm": longest_prefix_match,
    "hrrn": highest_response_ratio_next,
    "srjf": shortest_remaining_job_first,
    "jct": continuous_jct,
}


def smallest_first(slots: Slots, keys: Sequence[Keys]) -> Iterator[int]:
    """The entries of `slots` by `keys`, the first key before the second and so on, sorted only as far as asked.

    Args:
      keys: of all slots: `keys[i][slots]` are looked at. The last one is different for each slot.
    """
    size = _HEAD
    while len(slots):
        values = keys[0][slots]
        if len(keys) > 1 and values.min() == values.max():
            yield from smallest_first(slots, keys[1:])
            return
        if len(slots) <= size:
            yield from slots[np.lexsort([key[slots] for key in reversed(keys)])].tolist()
            return
        edge = np.partition(values, size - 1)[size - 1]
        below, tied = slots[values < edge], slots[values == edge]
        yield from below[np.lexsort([key[below] for key in reversed(keys)])].tolist()
        if len(tied) > 1:
            yield from smallest_first(tied, keys[1:])
        else:
            yield int(tied[0])
        slots = slots[values > edge]
        size *= 4
