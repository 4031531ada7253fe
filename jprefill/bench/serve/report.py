"""What a run is reduced to: a record for the JSON file, a line of the table, a point of the plot."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np

from jprefill.bench.serve.driver import Outcome


@dataclass(frozen=True, slots=True)
class Run:
    """One seed at one rate.

    Attributes:
      qps: requests per second that were offered; infinite: all at once.
    """

    seed: int
    qps: float
    outcomes: tuple[Outcome, ...]

    @property
    def duration_s(self) -> float:
        """From the start to the end of the last answer."""
        return max((one.intended_s + one.latency_s for one in self.outcomes), default=0.0)


@dataclass(frozen=True, slots=True)
class Record:
    """One run, or all runs at one rate. Times are None where nothing was answered.

    Attributes:
      policy: what the user calls the server's settings.
      seed: None for several.
      qps: offered requests per second; None: all at once.
      achieved_qps: good answers per second, from the start to the last answer.
      statuses: how many requests ended how: "200" is a good answer.
      mean_s: of good answers, as the percentiles are, from the time when the request was to be sent.
      hit_rate: of the prompt tokens of good answers, the share that was not computed; None if the server doesn't tell.
      goodput: share of all requests that had a good answer in time; None if no time was set.
      max_lag_s: the most that a request was sent too late.
    """

    policy: str
    workload: str
    seed: int | None
    qps: float | None
    num_requests: int
    num_ok: int
    statuses: dict[str, int]
    achieved_qps: float
    mean_s: float | None
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None
    hit_rate: float | None
    goodput: float | None
    max_lag_s: float


def summarise(policy: str, workload: str, runs: Sequence[Run], slo_s: float | None) -> Record:
    """One record of runs at one rate; their requests count together.

    Args:
      runs: at least one, with at least one request each.
      slo_s: the latency that an answer must keep to count for `goodput`.
    """
    outcomes = [one for run in runs for one in run.outcomes]
    good = [one for one in outcomes if one.is_ok]
    latencies = np.array([one.latency_s for one in good])
    p50_s, p90_s, p99_s = np.percentile(latencies, (50, 90, 99)).tolist() if good else (None, None, None)
    num_in_time = sum(slo_s is not None and one.latency_s <= slo_s for one in good)
    return Record(
        policy=policy,
        workload=workload,
        seed=runs[0].seed if len(runs) == 1 else None,
        qps=runs[0].qps if math.isfinite(runs[0].qps) else None,
        num_requests=len(outcomes),
        num_ok=len(good),
        statuses=dict(sorted(Counter(one.answer.status for one in outcomes).items())),
        achieved_qps=len(good) / sum(run.duration_s for run in runs),
        mean_s=float(latencies.mean()) if good else None,
        p50_s=p50_s,
        p90_s=p90_s,
        p99_s=p99_s,
        hit_rate=_hit_rate(good),
        goodput=None if slo_s is None else num_in_time / len(outcomes),
        max_lag_s=max(one.lag_s for one in outcomes),
    )


def _hit_rate(good: Sequence[Outcome]) -> float | None:
    """Over the answers that tell both numbers."""
    told = [
        (answer.num_cached_tokens, answer.num_prompt_tokens)
        for answer in (one.answer for one in good)
        if answer.num_cached_tokens is not None and answer.num_prompt_tokens
    ]
    return sum(cached for cached, _ in told) / sum(total for _, total in told) if told else None


HEADER = (
    " offered  achieved       ok  failed    mean ms     p50 ms     p90 ms     p99 ms  cached  goodput  max lag ms"
    "  failures"
)


def row(record: Record) -> str:
    """One line of the table."""
    offered = "burst" if record.qps is None else f"{record.qps:.2f}"
    times = [_or_dash(time_s, "10,.1f", 1000.0) for time_s in (record.mean_s, record.p50_s, record.p90_s, record.p99_s)]
    failures = ", ".join(f"{status}: {count}" for status, count in record.statuses.items() if status != "200")
    return (
        f"{offered:>8} {record.achieved_qps:9.2f} {record.num_ok:8,d} {record.num_requests - record.num_ok:7,d} "
        f"{' '.join(times)} {_or_dash(record.hit_rate, '7.1%')} {_or_dash(record.goodput, '8.1%')} "
        f"{1000 * record.max_lag_s:11,.1f}  {failures}"
    ).rstrip()


def _or_dash(value: float | None, form: str, factor: float = 1.0) -> str:
    width = int(form.split(".")[0].rstrip(","))
    return "-".rjust(width) if value is None else format(factor * value, form)


def draw(records: Sequence[Record], path: Path) -> None:
    """Writes a PNG, or what the ending says: mean and tail latency against the offered rate. A burst has no place."""
    import_module("matplotlib").use("Agg")  # no window system needed
    pyplot = import_module("matplotlib.pyplot")
    shown = sorted((record for record in records if record.qps is not None), key=lambda record: record.qps or 0.0)
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for field, label in (("mean_s", "mean"), ("p99_s", "99th percentile")):
        values = [getattr(record, field) for record in shown]
        axes.plot([r.qps for r in shown], [math.nan if v is None else v for v in values], "o-", label=label)
    axes.set(xlabel="offered, requests per second", ylabel="latency, seconds", yscale="log")
    axes.set_title(", ".join(dict.fromkeys(f"{record.workload}, {record.policy}" for record in shown)))
    axes.legend()
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
