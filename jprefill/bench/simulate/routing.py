"""Which replica a request goes to."""

import zlib
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from jprefill.bench.simulate.replica import Replica
from jprefill.bench.workloads import Arrival

Routing = Literal["random", "user", "prefix"]
Router = Callable[[Arrival, Sequence[Replica]], int]

SPILL = 2.0  # a replica with so many times the waiting tokens of the emptiest one, and more, takes no more


def static_route(routing: Routing, arrivals: Sequence[Arrival], num_replicas: int, seed: int) -> np.ndarray | None:
    """Replica numbers of all arrivals where they do not depend on what replicas do; None: they do."""
    if routing == "random":
        return np.random.default_rng([seed, 2]).integers(0, num_replicas, len(arrivals))
    if routing == "user":
        return np.array([_hash(_owner(arrival)) % num_replicas for arrival in arrivals], np.int64)
    return None


class PrefixRouter:
    """The replica that had the prompt's first part last, unless it has too much to do.

    Args:
      slack_tokens: that a replica may always have waiting.
    """

    def __init__(self, slack_tokens: int):
        self._slack_tokens = slack_tokens
        self._homes: dict[int, int] = {}

    def __call__(self, arrival: Arrival, replicas: Sequence[Replica]) -> int:
        """The number of a replica."""
        return self._choose(arrival, [replica.num_waiting_tokens for replica in replicas])

    def _choose(self, arrival: Arrival, loads: Sequence[int]) -> int:
        source = arrival.prompt[0].source
        emptiest = min(range(len(loads)), key=loads.__getitem__)
        home = self._homes.get(source, emptiest)
        if loads[home] > max(SPILL * loads[emptiest], self._slack_tokens):
            home = emptiest
        self._homes[source] = home
        return home


def _owner(arrival: Arrival) -> int:
    """The user, or who shares the beginning of the prompt where nobody is named."""
    return arrival.user if arrival.user >= 0 else arrival.prompt[0].source


def _hash(number: int) -> int:
    return zlib.crc32(number.to_bytes(8, "big"))
