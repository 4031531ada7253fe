"""Which replica a request goes to."""

import zlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from jprefill.bench.workloads import Arrival

Routing = Literal["random", "user", "prefix"]

SPILL = 2.0  # a replica with so many times the waiting tokens of the emptiest one, and more, takes no more
MIN_SHARE = 0.5  # of a prompt: a replica that has seen less of it is no better than any other
_MAX_HOMES = 2**20  # beginnings of prompts that are remembered


@runtime_checkable
class Loaded(Protocol):
    """What a router sees of a replica."""

    num_waiting_tokens: int


def static_route(routing: Routing, arrivals: Sequence[Arrival], num_replicas: int, seed: int) -> np.ndarray | None:
    """Replica numbers of all arrivals where they do not depend on what replicas do; None: they do.

    `user` sends nobody's requests anywhere: their prompts may all begin alike, as those of recorded traces do.
    """
    if routing == "prefix":
        return None
    route = np.random.default_rng([seed, 2]).integers(0, num_replicas, len(arrivals))
    if routing == "user":
        for place, arrival in enumerate(arrivals):
            if arrival.user >= 0:
                route[place] = _hash(arrival.user) % num_replicas
    return route


class PrefixRouter:
    """The replica that had most of the prompt last, unless that is little of it or the replica has too much to do.

    Then the emptiest one takes it. Source: the cache-aware router of SGLang, for the least share.

    Args:
      slack_tokens: that a replica may always have waiting.
    """

    def __init__(self, slack_tokens: int):
        self._slack_tokens = slack_tokens
        self._homes: OrderedDict[int, int] = OrderedDict()  # by a hash of a prompt's leading parts

    def __call__(self, arrival: Arrival, replicas: Sequence[Loaded]) -> int:
        """The number of a replica."""
        loads = [replica.num_waiting_tokens for replica in replicas]
        emptiest = loads.index(min(loads))
        fronts, ends = _fronts(arrival)
        home = self._home(fronts, ends)
        if home is None or loads[home] > max(SPILL * loads[emptiest], self._slack_tokens):
            home = emptiest
        for front in reversed(fronts):  # the longest first, so that it is forgotten first
            self._homes[front] = home
            self._homes.move_to_end(front)
        while len(self._homes) > _MAX_HOMES:
            self._homes.popitem(last=False)
        return home

    def _home(self, fronts: Sequence[int], ends: Sequence[int]) -> int | None:
        """Who had the longest of these beginnings, if it is long enough."""
        for front, end in zip(reversed(fronts), reversed(ends), strict=True):
            if end < MIN_SHARE * ends[-1]:
                return None
            if front in self._homes:
                return self._homes[front]
        return None


def _fronts(arrival: Arrival) -> tuple[list[int], list[int]]:
    """A hash of the first part, the first two, ..., and where each ends (tokens)."""
    fronts, ends, front, end = [], [], 0, 0
    for part in arrival.prompt:
        front, end = hash((front, *part)), end + part.num_tokens
        fronts.append(front)
        ends.append(end)
    return fronts, ends


def _hash(number: int) -> int:
    return zlib.crc32(number.to_bytes(8, "big"))
