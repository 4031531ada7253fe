"""`jprefill bench ablate`: the engine with one part switched off at a time, under the same requests at the same times.

    everything on | policy -> fcfs, srjf, hrrn, lpm | store off | keep all | no packing | no preemption | other layouts

Open loop: requests come when the workload says, whatever has been answered; a latency starts when a request was due.
Runs take turns over the variants within a seed, so that a slow minute of the machine meets all of them. Each run starts
with an empty store.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jprefill.bench.ablation_table import markdown, read_records
from jprefill.bench.local import DEMO_MODEL, demo_label_ids, load_checkpoint, load_tokenizer, positive
from jprefill.bench.parity import Scorer
from jprefill.bench.prose import prose
from jprefill.bench.workloads import Arrival, Workload, make_workload, token_ids
from jprefill.config import EngineConfig
from jprefill.flags import add_flags, from_args
from jprefill.types import Item, ScoreRequest, ScoreResult, TokenIds

if TYPE_CHECKING:
    from jprefill.engine import Engine
    from jprefill.model.checkpoints import Checkpoint

BASE = "jct"  # everything on
VARIANTS: dict[str, dict[str, Any]] = {
    BASE: {},
    "fcfs": {"policy": "fcfs"},
    "srjf": {"policy": "srjf"},
    "hrrn": {"policy": "hrrn"},
    "lpm": {"policy": "lpm"},
    "no store": {"kv_cache_memory_bytes": 0},
    "keep all": {"keep": "all"},
    "no packing": {"packing": False},
    "no preemption": {"preemption": False},
    "hybrid": {"layout": "hybrid"},
    "full": {"layout": "full"},
}
# Sizes that two cores answer in a minute or so: token counts are divided by `scale`.
SHAPES: dict[str, dict[str, Any]] = {
    "post_recommendation": {"scale": 40.0, "num_users": 20, "num_posts": 10},
    "credit_verification": {"scale": 40.0, "num_users": 20},
    "short_labels": {"scale": 1.0, "num_requests": 60, "max_tokens": 1_024},
    "mixed": {"scale": 1.0, "num_requests": 80},
}


@dataclass(frozen=True, slots=True)
class Record:
    """One run.

    Attributes:
      policy: the variant.
      load: requests offered over those that fcfs answers of a burst.
      qps: offered; infinite: all at once.
      requests_per_s: answered, from the first request to the last answer.
      hit_rate: of the prompt tokens, those from the store.
      short_p99_s: over requests of at most 1/4 of the longest; `long_mean_s`: of the others.
    """

    policy: str
    workload: str
    seed: int
    qps: float
    requests_per_s: float
    mean_s: float
    p50_s: float
    p99_s: float
    hit_rate: float
    short_p50_s: float
    short_p99_s: float
    long_mean_s: float
    num_batches: int
    num_preemptions: int
    load: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `jprefill bench ablate`."""
    parser.add_argument("--model", default=DEMO_MODEL, help=f"default: {DEMO_MODEL}")
    parser.add_argument("--workloads", type=_names(SHAPES), default=tuple(SHAPES), metavar="NAME,...", help="of these")
    parser.add_argument("--variants", type=_names(VARIANTS), default=tuple(VARIANTS), metavar="NAME,...", help="and of")
    parser.add_argument(
        "--loads",
        type=_loads,
        default=(0.7,),
        metavar="X,...",
        help="requests a second, in multiples of what fcfs answers of a burst; inf: a burst (default: 0.7)",
    )
    parser.add_argument("--seeds", type=positive, default=1, metavar="N", help="workloads and arrival times (1)")
    parser.add_argument("--requests", type=positive, metavar="N", help="of each run, at most")
    parser.add_argument("--pool-share", type=float, default=0.25, help="of the profiles that the pool holds (0.25)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
    parser.add_argument("--read", type=Path, nargs="+", metavar="FILE", help="of --json: print tables, run nothing")
    add_flags(parser, EngineConfig)


def _names(known: Sequence[str] | dict[str, Any]):
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(part.strip() for part in text.split(","))
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r}: allowed are {', '.join(known)}")
        return names

    return parse


def _loads(text: str) -> tuple[float, ...]:
    loads = tuple(float(part) for part in text.split(","))
    if not all(load > 0 for load in loads):
        raise argparse.ArgumentTypeError(f"{text!r}: must be numbers above 0, or inf")
    return loads


def run(args: argparse.Namespace) -> int:
    """Measures and prints, or prints what was measured.

    Raises:
      ConfigError: a flag cannot be used.
      CheckpointError: the model cannot be used.
    """
    if args.read:
        print(markdown(read_records(args.read)))
        return 0
    config = from_args(args, EngineConfig)
    checkpoint = load_checkpoint(args.model, config.dtype, config.quantization)
    tokenizer = load_tokenizer(checkpoint)
    english = np.asarray(tokenizer.encode(prose(), add_bos=False), np.int32)
    bench = Bench(checkpoint, english, demo_label_ids(tokenizer))
    print(f"command: {' '.join(['jprefill', *sys.argv[1:]])}\n{_HEADER}", flush=True)
    records = []
    for name in args.workloads:
        for seed in range(args.seeds):
            for record in bench.measure(_workload(name, seed, args.requests), config, args):
                print(row(record), flush=True)
                records.append(record)
                if args.json:  # after each run: a cut-off loses nothing
                    args.json.parent.mkdir(parents=True, exist_ok=True)
                    lines = [asdict(one) | {"command": " ".join(["jprefill", *sys.argv[1:]])} for one in records]
                    args.json.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")
    return 0


def _workload(name: str, seed: int, num_requests: int | None) -> Workload:
    workload = make_workload(name, seed, **SHAPES[name])
    return workload if num_requests is None else workload.first(num_requests)


class Bench:
    """The engines of all variants over one model; those that differ in host code alone share their programs."""

    def __init__(self, checkpoint: "Checkpoint", prose: TokenIds, label_ids: Sequence[int]):
        self._checkpoint, self._prose, self._label_ids = checkpoint, prose, label_ids
        self._parts: dict[EngineConfig, Any] = {}

    def measure(self, workload: Workload, config: EngineConfig, args: argparse.Namespace) -> Iterator[Record]:
        """One run of each variant at each load."""
        longest = max(arrival.num_tokens for arrival in workload.arrivals)
        config = replace(
            config,
            max_model_len=config.max_model_len or longest,
            max_queued_requests=max(config.max_queued_requests, len(workload.arrivals)),
            kv_cache_memory_bytes=self._pool_bytes(workload, config, args.pool_share),
        )
        requests = [self._request(workload, arrival) for arrival in workload.arrivals]
        base_qps = self._run("fcfs", replace(config, policy="fcfs"), workload, requests, np.inf).requests_per_s
        for load in args.loads:
            for variant in args.variants:
                chosen = replace(config, **VARIANTS[variant])
                yield replace(self._run(variant, chosen, workload, requests, load * base_qps), load=load)

    def _run(
        self, variant: str, config: EngineConfig, workload: Workload, requests: Sequence[ScoreRequest], qps: float
    ) -> Record:
        times_s = [arrival.at_s for arrival in workload.at_rate(qps, workload.seed).arrivals]
        with self._engine(config) as engine:
            latencies_s, answers, elapsed_s = drive(engine, requests, times_s)
            stats = engine.stats()
        lengths = np.array([arrival.num_tokens for arrival in workload.arrivals])
        is_short = lengths <= lengths.max() / 4
        usages = [answer.usage for answer in answers]
        return Record(
            policy=variant,
            workload=workload.name,
            seed=workload.seed,
            qps=qps,
            requests_per_s=len(requests) / elapsed_s,
            mean_s=float(latencies_s.mean()),
            p50_s=float(np.quantile(latencies_s, 0.5)),
            p99_s=float(np.quantile(latencies_s, 0.99)),
            hit_rate=sum(u.num_cached_tokens for u in usages) / sum(u.num_prompt_tokens for u in usages),
            short_p50_s=_quantile(latencies_s[is_short], 0.5),
            short_p99_s=_quantile(latencies_s[is_short], 0.99),
            long_mean_s=float(latencies_s[~is_short].mean()),
            num_batches=stats.num_batches,
            num_preemptions=stats.num_preemptions,
            load=np.nan,  # who knows the rate of load 1 fills it in
        )

    @contextmanager
    def _engine(self, config: EngineConfig) -> Iterator["Engine"]:
        """With an empty store, over programs that an earlier engine may have used."""
        from jprefill.assembly import assemble  # here: they import JAX, which `--help` must not
        from jprefill.engine import Engine
        from jprefill.kvstore.build import make_store

        key = replace(config, policy="jct", packing=True, preemption=True, keep="prefix", fairness=0.0)
        if key not in self._parts:
            self._parts[key] = assemble(self._checkpoint, key)
        parts, checkpoint = self._parts[key], self._checkpoint
        store = None
        if parts.runner.pool is not None:
            store = make_store(checkpoint.config, checkpoint.weights, config, parts.runner.pool, checkpoint.name)
        engine = Engine(
            parts.runner,
            config,
            model_name=checkpoint.name,
            max_model_len=parts.max_model_len,
            store=store,
            grid=parts.runner.grid,
            jct=parts.jct,
        )
        try:
            yield engine
        finally:
            engine.close()

    def _pool_bytes(self, workload: Workload, config: EngineConfig, share: float) -> int:
        """For that share of the parts that come more than once."""
        from jprefill.kvstore.device_pool import block_bytes  # here: it imports JAX, which `--help` must not

        if config.kv_cache_memory_bytes is not None:
            return config.kv_cache_memory_bytes
        first_parts = {arrival.prompt[0] for arrival in workload.arrivals if len(arrival.prompt) > 1}
        num_blocks = sum(-(-part.num_tokens // config.block_size) for part in first_parts)
        num_bytes = block_bytes(self._checkpoint.config, config.dtype, config.block_size)
        return max(8, int(share * num_blocks)) * num_bytes

    def _request(self, workload: Workload, arrival: Arrival) -> ScoreRequest:
        ids = token_ids(workload, arrival, self._prose)
        num_prefix = arrival.prompt[0].num_tokens if len(arrival.prompt) > 1 else 0
        rows = np.array([len(ids) - num_prefix - 1], np.int32)
        item = Item(ids[num_prefix:], rows, np.array([self._label_ids], np.int32))
        return ScoreRequest(ids[:num_prefix], (item,))


def drive(
    engine: Scorer, requests: Sequence[ScoreRequest], times_s: Sequence[float]
) -> tuple[np.ndarray, list[ScoreResult], float]:
    """Submits each request when it is due.

    Returns:
      Latencies in seconds from when each was due, the answers, and the seconds from the start to the last answer.
    """
    ends_s = np.zeros(len(requests))
    futures = []
    start_s = time.perf_counter()
    for number, (request, at_s) in enumerate(zip(requests, times_s, strict=True)):
        time.sleep(max(0.0, start_s + at_s - time.perf_counter()))
        future = engine.submit(request)
        future.add_done_callback(lambda _, i=number: ends_s.__setitem__(i, time.perf_counter()))
        futures.append(future)
    answers = [future.result() for future in futures]
    time.sleep(0.01)  # a result is there a moment before its callbacks have run
    return ends_s - start_s - np.asarray(times_s), answers, float(ends_s.max() - start_s)


def _quantile(values: np.ndarray, share: float) -> float:
    return float(np.quantile(values, share)) if len(values) else float("nan")


_HEADER = (
    "workload             seed  variant           qps   req/s   mean s    p50 s    p99 s  from store  "
    "short p50  short p99  long mean  passes  preempted"
)


def row(r: Record) -> str:
    """One line of the table."""
    return (
        f"{r.workload:20} {r.seed:4}  {r.policy:13} {r.qps:7.2f} {r.requests_per_s:7.2f} {r.mean_s:8.2f} {r.p50_s:8.2f}"
        f" {r.p99_s:8.2f} {r.hit_rate:11.1%} {r.short_p50_s:10.2f} {r.short_p99_s:10.2f} {r.long_mean_s:10.2f}"
        f" {r.num_batches:7} {r.num_preemptions:10}"
    )
