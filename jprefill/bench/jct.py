"""`jprefill bench jct`: how well the job completion model foretells what a pass takes.

jprefill bench jct --check
jprefill bench jct --lengths 64,256,1024,4096 --hits 1024,4096 --plot jct.png

The engine runs prompts one by one: cold ones, and ones whose front lies in the prefix store. The model is fitted to
some lengths and then asked about others, in between, that it has not seen. Every length is timed once a round, in an
order that is shuffled, and counts with its median: what disturbs the machine for a while disturbs all lengths alike.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

import jprefill
from jprefill.bench.local import (
    DEMO_MODEL,
    load_checkpoint,
    num_threads,
    positive,
    positive_list,
    running_engine,
)
from jprefill.bench.parity import Scorer
from jprefill.config import EngineConfig
from jprefill.errors import ConfigError, EngineError
from jprefill.flags import add_flags, from_args
from jprefill.scheduler.features import ChunkWalk, Features, Load
from jprefill.scheduler.jct import JctModel, Sample
from jprefill.types import Item, ScoreRequest, TokenIds

Clock = Literal["wall", "cpu"]
MIN_PEARSON, MIN_SPEARMAN, MAX_ERROR = 0.99, 0.98, 0.10
_LENGTHS = (32, 128, 256, 512, 1024, 2048)
_HITS = (400, 2000)  # no multiples of the key blocks of attention: real prefixes are none either
_LABEL_IDS = (0, 1)  # any two: what is asked for does not change the time


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt: its tokens in the store, and those that must be computed."""

    num_cached: int
    num_new: int
    is_unseen: bool

    @property
    def num_tokens(self) -> int:
        """Of the prompt."""
        return self.num_cached + self.num_new


@dataclass(frozen=True, slots=True)
class Record:
    """One case, as the report and the JSON file show it.

    Attributes:
      seconds: every measured time; `measured_s` is the median, `spread` is (slowest - fastest) / median.
      error: (predicted - measured) / measured.
    """

    num_cached: int
    num_new: int
    is_unseen: bool
    seconds: tuple[float, ...]
    measured_s: float
    spread: float
    predicted_s: float
    error: float


@dataclass(frozen=True, slots=True)
class Quality:
    """How predictions and measurements agree: correlations, and the mean of |error|."""

    num_cases: int
    pearson: float
    spearman: float
    mean_error: float
    max_error: float

    @property
    def is_good(self) -> bool:
        """Whether a scheduler may trust it."""
        return self.pearson >= MIN_PEARSON and self.spearman >= MIN_SPEARMAN and self.mean_error <= MAX_ERROR


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `jprefill bench jct`."""
    parser.add_argument("--model", default=DEMO_MODEL, help=f"default: {DEMO_MODEL}")
    parser.add_argument(
        "--lengths", type=positive_list, default=_LENGTHS, metavar="N,N,...", help="new tokens that it is fitted to"
    )
    parser.add_argument(
        "--hits", type=positive_list, default=_HITS, metavar="N,N,...", help="cached tokens that it is fitted to"
    )
    parser.add_argument(
        "--clock",
        choices=get_args(Clock),
        default="wall",
        help="what is measured: seconds on the device, or CPU seconds of this process, which other processes on a "
        "busy machine disturb less (default: wall)",
    )
    parser.add_argument("--repeat", type=positive, default=5, metavar="N", help="timed rounds (default: 5)")
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"exit 1 on unseen lengths below Pearson {MIN_PEARSON:g}, Spearman {MIN_SPEARMAN:g} or above "
        f"{MAX_ERROR:.0%} mean error",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw errors against times there")
    add_flags(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Measures, fits and prints; 1 if `--check` is given and missed, else 0.

    Raises:
      ConfigError: a flag cannot be used.
      CheckpointError: the model cannot be used.
      EngineError: the store does not hold what it should.
    """
    config = from_args(args, EngineConfig)
    cases = list(make_cases(args.lengths, args.hits, config.block_size))
    config = replace(config, max_model_len=config.max_model_len or max(case.num_tokens for case in cases))
    setting = _setting(args, config)
    print("\n".join(f"{key}: {value}" for key, value in setting.items()), flush=True)
    checkpoint = load_checkpoint(args.model, config.dtype, config.quantization)
    with running_engine(checkpoint, config) as engine:
        seconds, walk = measure(engine, engine.vocab_size, cases, args.repeat, args.clock), engine.walk
    model, records = fit(cases, seconds, walk)
    qualities = {name: quality([r for r in records if r.is_unseen == is_unseen]) for name, is_unseen in _SETS}
    _print(model, records, qualities)
    if args.json:
        report = setting | {
            "coefficients": model.coefficients,
            "quality": {name: asdict(one) for name, one in qualities.items()},
            "records": [asdict(record) for record in records],
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        draw(records, args.plot)
    return 1 if args.check and not qualities["unseen"].is_good else 0


_SETS = (("fitted", False), ("unseen", True))


def make_cases(lengths: Sequence[int], hits: Sequence[int], block_size: int) -> Iterator[Case]:
    """Every length, cold and on every hit; the unseen ones lie between two neighbours, at their geometric mean.

    One more unseen hit is half as long as the shortest.

    Raises:
      ConfigError: too few lengths, or a hit that is not whole blocks.
    """
    if len(set(lengths)) < 3:
        raise ConfigError(f"--lengths {','.join(map(str, lengths))}: three different ones are needed for a fit")
    if bad := [hit for hit in hits if hit % block_size]:
        raise ConfigError(f"--hits {bad[0]}: must be a multiple of block_size={block_size}")
    for is_unseen in (False, True):
        new = _between(lengths, 1) if is_unseen else sorted(set(lengths))
        cached = _between((min(hits) // 4, *hits), block_size) if is_unseen else sorted(set(hits))
        for num_cached in sorted({0, *cached}):
            yield from (Case(num_cached, num_new, is_unseen) for num_new in new)


def _between(lengths: Sequence[int], step: int) -> list[int]:
    means = [int((a * b) ** 0.5) for a, b in pairwise(sorted(set(lengths)))]
    return [mean - mean % step for mean in means]


def measure(
    engine: Scorer, vocab_size: int, cases: Sequence[Case], num_rounds: int, clock: Clock = "wall"
) -> list[list[float]]:
    """Seconds, for each case one a round. A first round is not counted: it warms the machine up.

    Raises:
      EngineError: another number of tokens came from the store than the case has.
    """
    rng = np.random.default_rng(0)
    profile = _token_ids(rng, max(case.num_cached for case in cases), vocab_size)
    if len(profile):
        marked = _request(np.concatenate([profile, _token_ids(rng, 1, vocab_size)]), len(profile))
        engine.submit(marked).result()
    seconds: list[list[float]] = [[] for _ in cases]
    for number in range(num_rounds + 1):
        for i in rng.permutation(len(cases)).tolist():
            case = cases[i]
            tail = _token_ids(rng, case.num_new, vocab_size)
            started_s = time.process_time()
            answer = engine.submit(_request(np.concatenate([profile[: case.num_cached], tail]))).result()
            cpu_s = time.process_time() - started_s
            if answer.usage.num_cached_tokens != case.num_cached:
                raise EngineError(
                    f"{answer.usage.num_cached_tokens} tokens came from the store, not {case.num_cached}: "
                    "is there a store, and does it hold the longest of --hits?"
                )
            if number:
                seconds[i].append(answer.timings.device_s if clock == "wall" else cpu_s)
    return seconds


def _token_ids(rng: np.random.Generator, length: int, vocab_size: int) -> TokenIds:
    return rng.integers(0, vocab_size, length).astype(np.int32)


def _request(token_ids: TokenIds, num_marked_tokens: int = 0) -> ScoreRequest:
    item = Item(token_ids, np.array([len(token_ids) - 1], np.int32), np.array([_LABEL_IDS], np.int32))
    return ScoreRequest(token_ids[:0], (item,), num_marked_tokens=num_marked_tokens)


def fit(cases: Sequence[Case], seconds: Sequence[Sequence[float]], walk: ChunkWalk) -> tuple[JctModel, list[Record]]:
    """Fits the model to the cases that are not unseen, and asks it about all."""
    features = [case_features(case, walk) for case in cases]
    medians = [statistics.median(times) for times in seconds]
    timed = zip(cases, features, medians, strict=True)
    model = JctModel()
    model.fit([Sample(one, median_s) for case, one, median_s in timed if not case.is_unseen])
    records = []
    for case, one, times, median_s in zip(cases, features, seconds, medians, strict=True):
        predicted_s = model.predict(one)
        spread, error = (max(times) - min(times)) / median_s, predicted_s / median_s - 1
        records.append(
            Record(
                **asdict(case),
                seconds=tuple(times),
                measured_s=median_s,
                spread=spread,
                predicted_s=predicted_s,
                error=error,
            )
        )
    return model, records


def case_features(case: Case, walk: ChunkWalk) -> Features:
    """What the case costs."""
    load = Load(np.array([case.num_tokens]), np.array([0]), np.array([0.0]))
    chunks, area = walk.features(load, np.array([case.num_cached]))
    return Features(float(chunks[0]), float(area[0]))


def quality(records: Sequence[Record]) -> Quality:
    """Over the cases of `records`."""
    measured, predicted = (np.array([getattr(r, name) for r in records]) for name in ("measured_s", "predicted_s"))
    errors = np.abs([record.error for record in records])
    return Quality(
        num_cases=len(records),
        pearson=float(np.corrcoef(measured, predicted)[0, 1]),
        spearman=float(np.corrcoef(_ranks(measured), _ranks(predicted))[0, 1]),
        mean_error=float(errors.mean()),
        max_error=float(errors.max()),
    )


def _ranks(values: np.ndarray) -> np.ndarray:
    """Places in ascending order; equal values share the mean of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[places]


def draw(records: Sequence[Record], path: Path) -> None:
    """Writes a PNG, or what the ending says: errors against measured times."""
    import_module("matplotlib").use("Agg")  # no window system needed
    pyplot = import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for (name, is_unseen), marker in zip(_SETS, "x.", strict=True):
        shown = [record for record in records if record.is_unseen == is_unseen]
        axes.plot([r.measured_s for r in shown], [100 * r.error for r in shown], marker, markersize=9, label=name)
    axes.axhline(0, color="black", linewidth=1)
    axes.set(xscale="log", xlabel="measured, seconds", ylabel="error of the prediction, %")
    axes.legend()
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def _setting(args: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    """What a reader needs to repeat the run."""
    versions = {"jprefill": jprefill.__version__} | {name: version(name) for name in ("jax", "jaxlib")}
    return {
        "model": str(args.model),
        "dtype": config.dtype,
        "clock": args.clock,
        "rounds": args.repeat,
        "threads": num_threads(),
        "versions": versions | {"python": sys.version.split()[0]},
        "command": " ".join(["jprefill", *sys.argv[1:]]),
    }


def _print(model: JctModel, records: Sequence[Record], qualities: dict[str, Quality]) -> None:
    print(" cached     new  unseen  measured s  spread  predicted s   error")
    for r in sorted(records, key=lambda record: (record.is_unseen, record.num_cached, record.num_new)):
        print(
            f"{r.num_cached:7,d} {r.num_new:7,d}  {'yes' if r.is_unseen else '':6}  {r.measured_s:10.4f} "
            f"{r.spread:7.1%} {r.predicted_s:12.4f} {r.error:+7.1%}"
        )
    a, b, c, d = model.coefficients
    print(f"seconds = {a:.3g} + {b:.3g} * chunks + {c:.3g} * attention area + {d:.3g} * restored bytes")
    for name, one in qualities.items():
        print(
            f"{name} ({one.num_cases} cases): Pearson {one.pearson:.4f}, Spearman {one.spearman:.4f}, "
            f"mean error {one.mean_error:.1%}, largest {one.max_error:.1%}"
        )
