"""What a simulated run says."""

from dataclasses import dataclass

import numpy as np

from jprefill.bench.simulate.fleet import Fleet, Outcome
from jprefill.bench.workloads import Workload
from jprefill.scheduler.features import Load


@dataclass(frozen=True, slots=True)
class Record:
    """One run.

    Attributes:
      policy: the variant, as it was asked for.
      qps: offered, on average; None: all at once.
      hit_rate: of the prompt tokens, those from the store.
      fairness: Jain's index of the users' mean slowdowns, 1 where all are slowed alike; a slowdown is latency over the
        time that the request would take alone and uncached.
      busy_share: of the replicas' time until the last answer.
      equal_p99_load: of a run at the largest rate that keeps to the reference's p99 under that load.
      equal_p99_ratio: and the requests that it answers a second, over those of the reference.
    """

    policy: str
    workload: str
    seed: int
    qps: float | None
    requests_per_s: float
    mean_s: float
    p50_s: float
    p99_s: float
    longest_s: float
    hit_rate: float
    fairness: float
    busy_share: float
    num_passes: int
    equal_p99_load: float | None = None
    equal_p99_ratio: float | None = None


def record(policy: str, fleet: Fleet, workload: Workload, qps: float, outcome: Outcome) -> Record:
    """Sums a run up."""
    latency_s = outcome.latency_s
    lengths = np.array([arrival.num_tokens for arrival in workload.arrivals])
    users = np.array([arrival.user for arrival in workload.arrivals])
    slowdowns = latency_s / cold_s(fleet, lengths)
    by_user = [slowdowns[users == user].mean() for user in np.unique(users)] if (users >= 0).all() else slowdowns
    return Record(
        policy=policy,
        workload=workload.name,
        seed=workload.seed,
        qps=None if np.isinf(qps) else qps,
        requests_per_s=len(latency_s) / outcome.end_s,
        mean_s=float(latency_s.mean()),
        p50_s=float(np.quantile(latency_s, 0.5)),
        p99_s=float(np.quantile(latency_s, 0.99)),
        longest_s=float(latency_s.max()),
        hit_rate=float(outcome.cached_tokens.sum() / lengths.sum()),
        fairness=jain(np.asarray(by_user)),
        busy_share=outcome.busy_s / (outcome.end_s * fleet.num_replicas),
        num_passes=outcome.num_passes,
    )


def cold_s(fleet: Fleet, lengths: np.ndarray) -> np.ndarray:
    """Seconds of each prompt alone, with nothing cached."""
    nothing = np.zeros_like(lengths)
    chunks, area = fleet.walk.features(Load(lengths, nothing, nothing.astype(np.float64)), nothing)
    return fleet.model.predict_all(chunks, area, np.zeros(len(lengths)))


def jain(values: np.ndarray) -> float:
    """1 where all are equal, 1/n where one has everything. Source: Jain, Chiu, Hawe 1984."""
    return float(values.sum() ** 2 / (len(values) * (values**2).sum()))


HEADER = (
    "workload                 seed  policy            qps    req/s    mean s     p50 s     p99 s  longest s  from store"
    "  fairness   busy   passes"
)


def row(r: Record) -> str:
    """One line of the table."""
    qps = "burst" if r.qps is None else f"{r.qps:.3f}"
    return (
        f"{r.workload:24} {r.seed:4}  {r.policy:12} {qps:>8} {r.requests_per_s:8.3f} {r.mean_s:9.2f} {r.p50_s:9.2f}"
        f" {r.p99_s:9.2f} {r.longest_s:10.2f} {r.hit_rate:11.1%} {r.fairness:9.3f} {r.busy_share:6.1%} {r.num_passes:8}"
    )
