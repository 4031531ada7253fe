"""What the flags of `jprefill simulate` ask for: workloads, fleets, and one run of the one on the other."""

import argparse
from dataclasses import dataclass, replace

import numpy as np

from jprefill.bench.simulate.device import GPUS, crossover_tokens, device_model, measured_model
from jprefill.bench.simulate.fleet import Fleet, simulate
from jprefill.bench.simulate.report import Record, record
from jprefill.bench.workloads import Arrival, Part, Workload, make_workload
from jprefill.config import EngineConfig, Keep, Policy, chunk_size_for, default_buckets
from jprefill.errors import ConfigError
from jprefill.model.config import ModelConfig
from jprefill.planner.models import find_model
from jprefill.scheduler.features import ChunkWalk
from jprefill.scheduler.jct import JctModel


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy and what is kept under it.

    Attributes:
      name: as it was asked for: `POLICY` or `POLICY:KEEP`.
    """

    name: str
    policy: Policy
    keep: Keep = "prefix"


def workload_of(args: argparse.Namespace, seed: int) -> Workload:
    """The requests, in copies; at the times of a trace if it is one."""
    workload = make_workload(args.workload, seed, num_requests=args.requests, scale=args.scale)
    arrivals = [
        _copy(replace(arrival, at_s=arrival.at_s / args.rate_scale), number)
        for arrival in workload.arrivals
        for number in range(args.copies)
    ]
    return replace(workload, arrivals=tuple(arrivals))


def _copy(arrival: Arrival, number: int) -> Arrival:
    """The same request of other users with other texts."""
    if not number:
        return arrival
    shift = number << 32
    user = arrival.user if arrival.user < 0 else arrival.user + shift
    return replace(arrival, user=user, prompt=tuple(Part(p.source + shift, p.num_tokens) for p in arrival.prompt))


def run_at(args: argparse.Namespace, variant: Variant, workload: Workload, qps: float | None) -> Record:
    """One run.

    Args:
      qps: offered, on average; infinite: all at once; None: at the workload's own times.
    """
    if qps is None:
        timed, qps = workload, len(workload.arrivals) / (workload.arrivals[-1].at_s or np.inf)
    else:
        timed = workload.at_rate(qps, workload.seed)
    fleet = _fleet(args, variant, workload)
    return record(variant.name, fleet, timed, qps, simulate(fleet, timed, num_processes=args.processes))


def _fleet(args: argparse.Namespace, variant: Variant, workload: Workload) -> Fleet:
    model = find_model(args.model)
    chunk_size = args.chunk_size or chunk_size_for(GPUS[args.gpu].memory_bytes)
    longest = max(arrival.num_tokens for arrival in workload.arrivals)
    config = EngineConfig(
        policy=variant.policy,
        keep=variant.keep,
        fairness=args.fairness,
        max_overtaken_s=args.max_overtaken,
        packing=args.packing,
        preemption=args.preemption,
        block_size=args.block_size,
        chunk_size=chunk_size,
    )
    return Fleet(
        config=config,
        model=_times(args, model, chunk_size),
        walk=ChunkWalk(chunk_size, default_buckets(max(longest, 4 * chunk_size), chunk_size)),
        num_layers=model.num_layers,
        num_blocks=args.pool_tokens // args.block_size,
        crossover_tokens=crossover_tokens(model),
        is_calibrated=args.calibrated,
        num_replicas=args.replicas,
        routing=args.routing,
        noise=args.noise,
        seed=workload.seed,
    )


def _times(args: argparse.Namespace, model: ModelConfig, chunk_size: int) -> JctModel:
    """What passes take."""
    if args.jct is not None:
        return measured_model(args.jct)
    if args.coefficients is None:
        return device_model(args.gpu, model, args.dtype, chunk_size, args.efficiency)
    if len(args.coefficients) not in (3, 4):  # a restored byte, the fourth, costs nothing here
        raise ConfigError(
            f"--coefficients: {len(args.coefficients)} numbers; needed are seconds per pass, chunk and key"
        )
    try:
        return JctModel.of(*args.coefficients)
    except ValueError as error:
        raise ConfigError(f"--coefficients: {error}") from None
