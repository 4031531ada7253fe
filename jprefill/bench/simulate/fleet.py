"""Many replicas and one stream of arrivals: the event loop."""

import heapq
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

import numpy as np

from jprefill.bench.simulate.prompts import PromptMaker
from jprefill.bench.simulate.replica import Answer, Replica
from jprefill.bench.simulate.routing import PrefixRouter, Routing, static_route
from jprefill.bench.workloads import Arrival, Workload
from jprefill.config import EngineConfig
from jprefill.scheduler.features import ChunkWalk
from jprefill.scheduler.jct import JctModel


@dataclass(frozen=True)
class Fleet:
    """What is simulated.

    Attributes:
      model: what passes take.
      num_blocks: of each replica's pool; 0: no prefix store.
      crossover_tokens: see `kvstore.eviction.SavedTime`.
      is_calibrated: schedulers know `model` from the start; else they begin with a guess, and learn.
      noise: standard deviation of the logarithm of a pass's time.
    """

    config: EngineConfig
    model: JctModel
    walk: ChunkWalk
    num_layers: int
    num_blocks: int
    crossover_tokens: int
    is_calibrated: bool = True
    num_replicas: int = 1
    routing: Routing = "user"
    noise: float = 0.0
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Outcome:
    """One entry per arrival, and totals.

    Attributes:
      latency_s: from arrival to answer.
      cached_tokens: of the prompt.
      busy_s: of all replicas together.
    """

    latency_s: np.ndarray
    cached_tokens: np.ndarray
    busy_s: float
    num_passes: int
    end_s: float


def simulate(fleet: Fleet, workload: Workload, *, num_processes: int = 1) -> Outcome:
    """Runs the whole workload.

    Args:
      num_processes: at most, where replicas do not depend on each other.
    """
    arrivals = workload.arrivals
    route = static_route(fleet.routing, arrivals, fleet.num_replicas, fleet.seed)
    if route is None:
        router = PrefixRouter(fleet.walk.buckets[-1])
        return _run(fleet, arrivals, np.arange(len(arrivals)), router=router)
    num_groups = min(num_processes, fleet.num_replicas, os.cpu_count() or 1)
    chosen = [np.flatnonzero(route % num_groups == group) for group in range(num_groups)]
    jobs = [([arrivals[i] for i in rows.tolist()], route[rows]) for rows in chosen]
    if num_groups == 1:
        outcomes = [_run(fleet, *jobs[0])]
    else:
        with ProcessPoolExecutor(num_groups, get_context("spawn")) as pool:
            outcomes = list(pool.map(partial(_run, fleet), *zip(*jobs, strict=True)))
    return _joined(outcomes, chosen, len(arrivals))


def _joined(outcomes: Sequence[Outcome], chosen: Sequence[np.ndarray], size: int) -> Outcome:
    latency_s, cached_tokens = np.zeros(size), np.zeros(size, np.int64)
    for outcome, rows in zip(outcomes, chosen, strict=True):
        latency_s[rows], cached_tokens[rows] = outcome.latency_s, outcome.cached_tokens
    return Outcome(
        latency_s,
        cached_tokens,
        sum(outcome.busy_s for outcome in outcomes),
        sum(outcome.num_passes for outcome in outcomes),
        max(outcome.end_s for outcome in outcomes),
    )


def _run(
    fleet: Fleet, arrivals: Sequence[Arrival], route: np.ndarray, *, router: PrefixRouter | None = None
) -> Outcome:
    """Arrivals in order, and between them what replicas do by themselves, earliest first.

    Args:
      route: the replica of each arrival; a router decides when they come.
    """
    numbers = range(fleet.num_replicas) if router else sorted(set(route.tolist()))
    replicas = {number: _replica(fleet, number) for number in numbers}
    listed = list(replicas.values())
    makers, places, events = PromptMaker(fleet.config.block_size), {}, []
    latency_s, cached_tokens, end_s = np.zeros(len(arrivals)), np.zeros(len(arrivals), np.int64), 0.0

    def note(answers: Sequence[Answer]) -> None:
        nonlocal end_s
        for answer in answers:
            place = places.pop(answer.pending)
            latency_s[place] = answer.at_s - answer.pending.submitted_s
            cached_tokens[place] = answer.cached_tokens
            end_s = max(end_s, answer.at_s)

    def run_until(limit_s: float) -> None:
        while events and events[0][0] <= limit_s:
            at_s, number = heapq.heappop(events)
            one = replicas[number]
            if at_s == one.next_s:  # else it was put off
                note(one.wake(at_s))
                schedule(number)

    def schedule(number: int) -> None:
        if replicas[number].next_s < np.inf:
            heapq.heappush(events, (replicas[number].next_s, number))

    for place, arrival in enumerate(arrivals):
        run_until(arrival.at_s)
        pending = makers.pending(arrival)
        places[pending] = place
        number = int(route[place]) if router is None else router(arrival, listed)
        before_s = replicas[number].next_s
        replicas[number].arrive(pending, arrival.at_s)
        if replicas[number].next_s != before_s:
            schedule(number)
    run_until(np.inf)
    busy_s = sum(one.busy_s for one in listed)
    return Outcome(latency_s, cached_tokens, busy_s, sum(one.num_passes for one in listed), end_s)


def _replica(fleet: Fleet, number: int) -> Replica:
    rng = np.random.default_rng([fleet.seed, 1, number])

    def noise() -> float:
        return float(np.exp(rng.normal(0.0, fleet.noise))) if fleet.noise else 1.0

    believed = fleet.model.copy() if fleet.is_calibrated else JctModel()
    return Replica(
        fleet.config,
        fleet.model,
        believed,
        fleet.walk,
        fleet.num_layers,
        fleet.num_blocks,
        fleet.crossover_tokens,
        noise,
    )
