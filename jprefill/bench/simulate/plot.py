"""The picture of `jprefill simulate`: latency against load."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import numpy as np

from jprefill.bench.simulate.report import Record


def draw(records: Sequence[Record], path: Path) -> None:
    """Writes a PNG, or what the ending says: mean and p99 against the rate, one line per policy, means over seeds."""
    import_module("matplotlib").use("Agg")  # no window system needed
    pyplot = import_module("matplotlib.pyplot")
    figure, plots = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for axes, name in zip(plots, ("mean_s", "p99_s"), strict=True):
        for policy in dict.fromkeys(one.policy for one in records):
            rates, seconds = _line(records, policy, name)
            axes.plot(rates, seconds, "o-", label=policy)
        axes.set(xlabel="requests a second, offered", ylabel=f"{name.removesuffix('_s')} latency, seconds")
        axes.set(xscale="log", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def _line(records: Sequence[Record], policy: str, name: str) -> tuple[list[float], list[float]]:
    """Rates, which differ a little between seeds, and seconds; bursts have no rate."""
    points: dict[int, list[tuple[float, float]]] = {}
    counts: dict[int, int] = {}
    for one in records:
        if one.policy == policy and one.qps is not None:
            number = counts[one.seed] = counts.get(one.seed, -1) + 1
            points.setdefault(number, []).append((one.qps, getattr(one, name)))
    means = sorted(tuple(np.mean(group, axis=0).tolist()) for group in points.values())
    return [qps for qps, _ in means], [value for _, value in means]
