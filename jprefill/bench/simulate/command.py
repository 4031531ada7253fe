"""`jprefill simulate`: policies and routing on a fleet that is not there.

jprefill simulate --gpu l4 --policies jct,hrrn,fcfs,fcfs:all --loads 0.5,0.8,1.5 --seeds 5
jprefill simulate --workload trace:FILE --recorded --rate-scale 40 --replicas 1000 --routing prefix
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np

from jprefill.bench.local import positive
from jprefill.bench.simulate.device import EFFICIENCY, GPUS, WEIGHT_BYTES
from jprefill.bench.simulate.plot import draw
from jprefill.bench.simulate.report import HEADER, Record, row
from jprefill.bench.simulate.routing import Routing
from jprefill.bench.simulate.search import largest_rate
from jprefill.bench.simulate.setting import Variant, run_at, workload_of
from jprefill.bench.workloads import WORKLOADS, Workload
from jprefill.config import EngineConfig, Keep, Policy
from jprefill.errors import ConfigError

_LOADS = (0.7,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `jprefill simulate`."""
    _add_device_arguments(parser)
    _add_load_arguments(parser)
    add = parser.add_argument
    add("--policies", type=_variants, default=_variants("jct,hrrn,srjf,lpm,fcfs"), metavar="POLICY[:KEEP],...")
    add("--packing", action=argparse.BooleanOptionalAction, default=True)
    add("--preemption", action=argparse.BooleanOptionalAction, default=True)
    add("--fairness", type=_at_least_0, default=EngineConfig.fairness, metavar="X")
    add("--max-overtaken", type=_at_least_0, default=EngineConfig.max_overtaken_s, metavar="SECONDS")
    add("--seeds", type=positive, default=1, metavar="N")
    add("--processes", type=positive, default=1, metavar="N", help="where replicas do not depend on each other")
    add("--json", type=Path, metavar="FILE", help="write the records there")
    add("--plot", type=Path, metavar="FILE", help="draw mean and p99 against rates there")


def _add_device_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("devices")
    add, times = group.add_argument, group.add_mutually_exclusive_group()
    add("--gpu", choices=tuple(GPUS), default="h100")
    add("--model", default="llama-3.1-8b", help="name in `jprefill plan`, or a folder (default: llama-3.1-8b)")
    add("--dtype", choices=tuple(WEIGHT_BYTES), default="bf16", help="of the weights")
    add(
        "--efficiency",
        type=_above_0,
        default=EFFICIENCY,
        metavar="X",
        help=f"share of the peak (default: {EFFICIENCY})",
    )
    times.add_argument(
        "--coefficients", type=_numbers, metavar="A,B,C", help="seconds per pass, chunk, key, in place of a roofline"
    )
    times.add_argument("--jct", type=Path, metavar="FILE", help="likewise, from an engine's file or `bench jct --json`")
    add(
        "--calibrated",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="schedulers know these times from the start; else they guess, and learn",
    )
    add("--noise", type=_at_least_0, default=0.05, metavar="X", help="of pass times: deviation of the logarithm (0.05)")
    add("--chunk-size", type=positive, metavar="N", help="default: as the engine chooses it for the GPU")
    add(
        "--pool-tokens",
        type=_count,
        default=100_000,
        metavar="N",
        help="of each replica's prefix pool, as `jprefill plan` gives it; 0: no store (100000)",
    )
    add("--block-size", type=positive, default=EngineConfig.block_size, metavar="N")
    add("--replicas", type=positive, default=1, metavar="N")
    add("--routing", choices=get_args(Routing), default="user", help="under `user`, requests without one go anywhere")


def _add_load_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    add, when = group.add_argument, group.add_mutually_exclusive_group()
    add("--workload", default="post_recommendation", help=f"{', '.join(WORKLOADS)}, or trace:FILE")
    add("--scale", type=_above_0, default=1.0, metavar="X", help="divides all token counts")
    add("--requests", type=positive, metavar="N", help="the first ones only")
    add("--copies", type=positive, default=1, metavar="N", help="of the workload at once, each with users of its own")
    when.add_argument(
        "--loads", type=_rates, metavar="X,...", help="of the reference's burst throughput; inf too (0.7)"
    )
    when.add_argument("--rates", type=_rates, metavar="QPS,...", help="requests a second; inf too")
    when.add_argument("--recorded", action="store_true", help="at the times of the trace")
    add("--rate-scale", type=_above_0, default=1.0, metavar="X", help="with --recorded: so many times as fast")
    add("--reference", type=_one_variant, default="fcfs", metavar="POLICY[:KEEP]", help="load 1 is its burst (fcfs)")
    add(
        "--equal-p99",
        type=_rates,
        default=(),
        metavar="LOAD,...",
        help="also the largest rates at the reference's p99 under each LOAD",
    )


# ---- argparse types ----------------------------------------------------------------------------------------


def _variants(text: str) -> tuple[Variant, ...]:
    return tuple(map(_one_variant, text.split(",")))


def _one_variant(text: str) -> Variant:
    name, colon, keep = text.partition(":")
    policies, keeps = get_args(Policy), get_args(Keep)
    if name not in policies or (colon and keep not in keeps):
        allowed = f"{', '.join(policies)}, with :{', :'.join(keeps)} or nothing"
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are {allowed}")
    policy = policies[policies.index(name)]
    return Variant(text, policy, keeps[keeps.index(keep)]) if colon else Variant(text, policy)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number") from None


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(_number, text.split(",")))


def _rates(text: str) -> tuple[float, ...]:
    rates = _numbers(text)
    if not all(rate > 0 for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r}: must be above 0")
    return rates


def _above_0(text: str) -> float:
    if not 0 < (number := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: must be above 0")
    return number


def _at_least_0(text: str) -> float:
    if not 0 <= (number := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: must be at least 0")
    return number


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, at least 0")
    return int(text)


# ---- runs --------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """Simulates and prints.

    Raises:
      ConfigError: a flag cannot be used.
    """
    if args.recorded and not args.workload.startswith("trace:"):
        raise ConfigError(f"--recorded: workload {args.workload} has no times of its own, only trace:FILE has")
    if args.rate_scale != 1 and not args.recorded:
        raise ConfigError("--rate-scale: only with --recorded; --loads and --rates say how fast requests come")
    command = " ".join(["jprefill", *sys.argv[1:]])
    print(f"command: {command}\n{HEADER}", flush=True)
    records = _shown(one for seed in range(args.seeds) for one in _runs(args, seed))
    if args.seeds > 1:
        _print_summary(records)
    if args.plot:
        draw(records, args.plot)
    for load in args.equal_p99:
        print(f"\nlargest rates at the p99 of {args.reference.name} under load {load:g}\n{HEADER}", flush=True)
        found = _shown(one for seed in range(args.seeds) for one in _largest(args, load, seed))
        _print_ratios(args.policies, found)
        records += found
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        lines = [asdict(one) | {"command": command} for one in records]
        args.json.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")
    return 0


def _shown(records: Iterator[Record]) -> list[Record]:
    """All of them, each printed when it is there."""
    shown = []
    for one in records:
        print(row(one), flush=True)
        shown.append(one)
    return shown


def _runs(args: argparse.Namespace, seed: int) -> Iterator[Record]:
    """Every policy at every rate."""
    workload = workload_of(args, seed)
    rates: Sequence[float | None] = (None,) if args.recorded else args.rates
    if rates is None:
        burst_qps = _burst_qps(args, workload)
        rates = [load * burst_qps for load in args.loads or _LOADS]
    for qps in rates:
        for variant in args.policies:
            yield run_at(args, variant, workload, qps)


def _burst_qps(args: argparse.Namespace, workload: Workload) -> float:
    return run_at(args, args.reference, workload, math.inf).requests_per_s


def _largest(args: argparse.Namespace, load: float, seed: int) -> Iterator[Record]:
    """For each policy the run at the largest rate that keeps to the p99 of the reference under that load."""
    workload = workload_of(args, seed)
    qps = load * _burst_qps(args, workload)
    reference = run_at(args, args.reference, workload, qps)
    for variant in args.policies:
        one = largest_rate(partial(run_at, args, variant, workload), reference.p99_s, qps)
        if one is not None:
            yield replace(one, equal_p99_load=load, equal_p99_ratio=one.requests_per_s / reference.requests_per_s)


# ---- sums --------------------------------------------------------------------------------------------------


def _print_summary(records: Sequence[Record]) -> None:
    """Means over seeds, and (largest - smallest)."""
    groups: dict[tuple[str, int], list[Record]] = {}
    counts: dict[tuple[str, int], int] = {}
    for one in records:  # the n-th rate of a seed is the n-th of another
        number = counts[one.policy, one.seed] = counts.get((one.policy, one.seed), -1) + 1
        groups.setdefault((one.policy, number), []).append(one)
    print("\npolicy        rate no    req/s    mean s (spread)     p99 s (spread)  from store  fairness")
    for (policy, number), group in groups.items():
        speed, mean, p99, hits, fairness = (
            np.array([getattr(one, name) for one in group])
            for name in ("requests_per_s", "mean_s", "p99_s", "hit_rate", "fairness")
        )
        print(
            f"{policy:13} {number:7} {speed.mean():8.3f}  {mean.mean():8.2f} ({np.ptp(mean):6.2f})"
            f"  {p99.mean():8.2f} ({np.ptp(p99):6.2f})  {hits.mean():10.1%} {fairness.mean():9.3f}"
        )


def _print_ratios(policies: Sequence[Variant], found: Sequence[Record]) -> None:
    """Throughput at equal p99, over that of the reference."""
    print()
    for variant in policies:
        ratios = [one.equal_p99_ratio or 0.0 for one in found if one.policy == variant.name] or [0.0]
        print(f"{variant.name:13} {np.mean(ratios):6.2f}x  ({min(ratios):.2f} to {max(ratios):.2f})")
