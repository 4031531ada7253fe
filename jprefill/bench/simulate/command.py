"""`jprefill simulate`: policies against each other on a fleet that is not there."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import numpy as np

from jprefill.bench.local import positive
from jprefill.bench.simulate.device import EFFICIENCY, GPUS, WEIGHT_BYTES, device_model
from jprefill.bench.simulate.fleet import Fleet, simulate
from jprefill.bench.simulate.report import HEADER, Record, record, row
from jprefill.bench.simulate.routing import Routing
from jprefill.bench.workloads import WORKLOADS, Arrival, Part, Workload, make_workload
from jprefill.config import EngineConfig, Keep, Policy, chunk_size_for, default_buckets
from jprefill.errors import ConfigError
from jprefill.planner.models import find_model
from jprefill.scheduler.features import ChunkWalk
from jprefill.scheduler.jct import JctModel

_NUM_HALVINGS = 7  # of the range in which the largest rate is looked for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `jprefill simulate`."""
    add = parser.add_argument
    add("--gpu", choices=tuple(GPUS), default="h100")
    add("--model", default="llama-3.1-8b", help="name in `jprefill plan`, or a folder (default: llama-3.1-8b)")
    add("--dtype", choices=tuple(WEIGHT_BYTES), default="bf16", help="of the weights")
    add("--efficiency", type=float, default=EFFICIENCY, metavar="X", help=f"share of the peak (default: {EFFICIENCY})")
    add(
        "--coefficients", type=_numbers, metavar="A,B,C", help="seconds per pass, chunk and key, in place of a roofline"
    )
    add("--chunk-size", type=positive, metavar="N", help="default: as the engine chooses it for the GPU")
    add("--pool-tokens", type=int, default=100_000, metavar="N", help="of each replica's prefix pool; 0: none (100000)")
    add("--block-size", type=positive, default=EngineConfig.block_size, metavar="N")
    add("--replicas", type=positive, default=1, metavar="N")
    add("--routing", choices=get_args(Routing), default="user")
    add("--workload", default="post_recommendation", help=f"{', '.join(WORKLOADS)}, or trace:FILE")
    add("--scale", type=float, default=1.0, metavar="X", help="divides all token counts")
    add("--requests", type=positive, metavar="N", help="the first ones only")
    add("--copies", type=positive, default=1, metavar="N", help="of the workload at once, each with users of its own")
    add("--policies", type=_variants, default=_variants("jct,hrrn,srjf,lpm,fcfs"), metavar="POLICY[:KEEP],...")
    add("--reference", type=_variants, default=_variants("fcfs"), metavar="POLICY[:KEEP]", help="load 1 is its burst")
    add("--loads", type=_numbers, default=(0.7,), metavar="X,...", help="of the reference's burst throughput; inf too")
    add("--recorded", action="store_true", help="at the times of the trace")
    add("--equal-p99", type=float, metavar="LOAD", help="the largest rates at the reference's p99 under this load")
    add("--packing", action=argparse.BooleanOptionalAction, default=True)
    add("--preemption", action=argparse.BooleanOptionalAction, default=True)
    add("--fairness", type=float, default=EngineConfig.fairness, metavar="X")
    add("--noise", type=float, default=0.05, metavar="X", help="of pass times: deviation of the logarithm (0.05)")
    add("--seeds", type=positive, default=1, metavar="N")
    add("--processes", type=positive, default=1, metavar="N", help="where replicas do not depend on each other")
    add("--json", type=Path, metavar="FILE", help="write the records there")
    add("--plot", type=Path, metavar="FILE", help="draw mean and p99 against rates there")


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _variants(text: str) -> dict[str, dict[str, Any]]:
    """`POLICY[:KEEP]` to settings, by spelling."""
    variants = {}
    for part in text.split(","):
        policy, _, keep = part.partition(":")
        if policy not in get_args(Policy) or keep not in ("", *get_args(Keep)):
            allowed = f"{', '.join(get_args(Policy))}, with :{', :'.join(get_args(Keep))} or nothing"
            raise argparse.ArgumentTypeError(f"{part!r}: allowed are {allowed}")
        variants[part] = {"policy": policy, "keep": keep or "prefix"}
    return variants


def run(args: argparse.Namespace) -> int:
    """Simulates and prints.

    Raises:
      ConfigError: a flag cannot be used.
    """
    records: list[dict[str, Any]] = []
    command = " ".join(["jprefill", *sys.argv[1:]])
    print(f"command: {command}\n{HEADER}", flush=True)
    for seed in range(args.seeds):
        for one in _runs(args, seed):
            print(row(one), flush=True)
            records.append(asdict(one))
    _print_summary(records)
    if args.equal_p99 is not None:
        _print_equal_p99(args)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        lines = [one | {"command": command} for one in records]
        args.json.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        draw(records, args.plot)
    return 0


def _runs(args: argparse.Namespace, seed: int) -> Iterator[Record]:
    workload = _workload(args, seed)
    if args.recorded:
        for policy, settings in args.policies.items():
            span_s = workload.arrivals[-1].at_s or np.inf
            yield _record(args, policy, settings, workload, len(workload.arrivals) / span_s, is_recorded=True)
        return
    burst_qps = _burst(args, workload)
    for load in args.loads:
        for policy, settings in args.policies.items():
            yield _record(args, policy, settings, workload, load * burst_qps)


def _burst(args: argparse.Namespace, workload: Workload) -> float:
    [(policy, settings)] = args.reference.items()
    return _record(args, policy, settings, workload, np.inf).requests_per_s


def _record(
    args: argparse.Namespace,
    policy: str,
    settings: dict[str, Any],
    workload: Workload,
    qps: float,
    *,
    is_recorded: bool = False,
) -> Record:
    timed = workload if is_recorded else workload.at_rate(qps, workload.seed)
    fleet = _fleet(args, settings, workload)
    return record(policy, fleet, timed, qps, simulate(fleet, timed, num_processes=args.processes))


def _workload(args: argparse.Namespace, seed: int) -> Workload:
    workload = make_workload(args.workload, seed, num_requests=args.requests, scale=args.scale)
    arrivals = [_copy(arrival, number) for arrival in workload.arrivals for number in range(args.copies)]
    return replace(workload, arrivals=tuple(arrivals))


def _copy(arrival: Arrival, number: int) -> Arrival:
    """The same request of other users with other texts."""
    if not number:
        return arrival
    shift = number << 32
    user = arrival.user if arrival.user < 0 else arrival.user + shift
    return replace(arrival, user=user, prompt=tuple(Part(p.source + shift, p.num_tokens) for p in arrival.prompt))


def _fleet(args: argparse.Namespace, settings: dict[str, Any], workload: Workload) -> Fleet:
    model = find_model(args.model)
    chunk_size = args.chunk_size or chunk_size_for(GPUS[args.gpu].memory_bytes)
    if args.coefficients is None:
        times = device_model(args.gpu, model, args.dtype, chunk_size, args.efficiency)
    elif len(args.coefficients) == 3:
        times = JctModel.of(*args.coefficients)
    else:
        raise ConfigError(f"--coefficients: {len(args.coefficients)} numbers; needed are seconds per pass, chunk, key")
    longest = max(arrival.num_tokens for arrival in workload.arrivals)
    config = EngineConfig(
        fairness=args.fairness,
        packing=args.packing,
        preemption=args.preemption,
        block_size=args.block_size,
        chunk_size=chunk_size,
        **settings,
    )
    return Fleet(
        config,
        times,
        ChunkWalk(chunk_size, default_buckets(max(longest, 4 * chunk_size), chunk_size)),
        model.num_layers,
        args.pool_tokens // args.block_size,
        args.replicas,
        args.routing,
        args.noise,
        workload.seed,
    )


def _print_summary(records: Sequence[dict[str, Any]]) -> None:
    """Means over seeds, and the spread."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    counts: dict[tuple[str, int], int] = {}
    for one in records:  # the n-th rate of a seed is the n-th of another
        key = (one["policy"], one["seed"])
        counts[key] = counts.get(key, -1) + 1
        groups.setdefault((one["policy"], counts[key]), []).append(one)
    if max((len(group) for group in groups.values()), default=0) < 2:
        return
    print("\npolicy        rate no  mean s (spread)     p99 s (spread)      from store")
    for (policy, number), group in groups.items():
        mean, p99 = (np.array([one[name] for one in group]) for name in ("mean_s", "p99_s"))
        hits = np.mean([one["hit_rate"] for one in group])
        print(
            f"{policy:13} {number:7}  {mean.mean():8.2f} ({np.ptp(mean):6.2f})  {p99.mean():8.2f} ({np.ptp(p99):6.2f})"
            f"  {hits:11.1%}"
        )


def _print_equal_p99(args: argparse.Namespace) -> None:
    """For each policy the largest rate at which its p99 is not above that of the reference under the load given."""
    [(name, settings)] = args.reference.items()
    print(f"\nlargest rates at the p99 of {name} under load {args.equal_p99:g}")
    ratios: dict[str, list[float]] = {policy: [] for policy in args.policies}
    for seed in range(args.seeds):
        workload = _workload(args, seed)
        qps = args.equal_p99 * _burst(args, workload)
        bound_s = _record(args, name, settings, workload, qps).p99_s
        for policy, chosen in args.policies.items():
            is_good = partial(_keeps, args, policy, chosen, workload, bound_s)
            ratios[policy].append(_largest(is_good, qps) / qps)
    for policy, values in ratios.items():
        print(f"{policy:13} {np.mean(values):6.2f}x  ({min(values):.2f} to {max(values):.2f})")


def _keeps(
    args: argparse.Namespace, policy: str, settings: dict[str, Any], workload: Workload, bound_s: float, qps: float
) -> bool:
    return _record(args, policy, settings, workload, qps).p99_s <= bound_s


def _largest(is_good: Callable[[float], bool], start: float) -> float:
    """By doubling and halving; a burst counts as 64 times the start."""
    low, high = 0.0, start
    while is_good(high):
        low, high = high, 2 * high
        if high > 64 * start:
            return low
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_good(middle) else (low, middle)
    return low


def draw(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes a PNG, or what the ending says: mean and p99 against the rate, one line per policy."""
    import_module("matplotlib").use("Agg")  # no window system needed
    pyplot = import_module("matplotlib.pyplot")
    figure, plots = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for axes, name in zip(plots, ("mean_s", "p99_s"), strict=True):
        for policy in dict.fromkeys(one["policy"] for one in records):
            points = sorted((r["qps"], r[name]) for r in records if r["policy"] == policy and r["qps"] is not None)
            axes.plot([qps for qps, _ in points], [value for _, value in points], "o-", label=policy)
        axes.set(
            xlabel="requests a second, offered", ylabel=f"{name.removesuffix('_s')} latency, seconds", yscale="log"
        )
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
