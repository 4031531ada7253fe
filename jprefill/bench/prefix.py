"""`jprefill bench prefix`: what the prefix store gives where many requests share a long profile.

    arrival     post 0 of user 0, of user 1, ...  post 1 of user 0, of user 1, ...  all submitted at once
    a request   | profile of the user           | post |  one decision: two labels after the last token

jprefill bench prefix --min-ratio 6
jprefill bench prefix --pool-profiles 2 --kv-host-bytes 1000000000       a pool that holds a quarter of the profiles

The same engine answers with its store and without one, in turns. With the store every round starts cold: its requests
carry a salt of their own, so that each profile is computed in that round. Without a store a request costs the same
whatever came before, so that side answers the first few posts of every user, unless `--full` is given.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

import jprefill
from jprefill.bench.local import (
    DEMO_MODEL,
    demo_label_ids,
    load_checkpoint,
    load_tokenizer,
    num_threads,
    positive,
    running_engine,
)
from jprefill.bench.parity import Scorer
from jprefill.bench.prose import prose_windows
from jprefill.config import EngineConfig
from jprefill.errors import ConfigError
from jprefill.flags import add_flags, from_args
from jprefill.tokenization.api import Tokenizer
from jprefill.types import EngineStats, Item, ScoreRequest, ScoreResult

if TYPE_CHECKING:
    from jprefill.model.checkpoints import Checkpoint

OFF = "store off"
MAX_FLOAT32_DELTA = 5e-5  # nats; cached is uncached
_PAUSE_S = 0.1  # worker threads of the side that just ran spin for a moment before they sleep


@runtime_checkable
class Engine(Scorer, Protocol):
    """What is measured."""

    def stats(self) -> EngineStats:
        """Counters now."""
        ...


@dataclass(frozen=True, slots=True)
class Shape:
    """The workload: `num_users` profiles, and `num_posts` posts for each of them."""

    num_users: int
    num_posts: int
    profile_tokens: int
    post_tokens: int

    @property
    def num_requests(self) -> int:
        """Of one round."""
        return self.num_users * self.num_posts


@dataclass(slots=True)
class Side:
    """One engine, and what it did in the rounds so far.

    Attributes:
      answers: one list a round, in the order of arrival.
      seconds: one a round, from the first submit to the last answer.
    """

    engine: Engine
    answers: list[list[ScoreResult]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    num_batches: int = 0
    num_computed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """One side, as the report and the JSON file show it.

    Attributes:
      num_requests: of one round; so are `num_batches` and `num_computed_tokens`, on average.
      cached_share: of the prompts' tokens, those that came from the store.
      requests_per_s: of the median round; `spread` is (slowest - fastest) / median.
      ratio: our speed over that without a store.
      max_logprob_delta: largest |difference| of a label's log-probability to the side without a store.
      tiers: counters of the store's tiers over all rounds.
    """

    side: str
    num_requests: int
    cached_share: float
    requests_per_s: float
    spread: float
    seconds: tuple[float, ...]
    num_batches: float
    num_computed_tokens: float
    ratio: float | None = None
    max_logprob_delta: float | None = None
    tiers: dict[str, Any] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `jprefill bench prefix`."""
    parser.add_argument("--model", default=DEMO_MODEL, help=f"default: {DEMO_MODEL}")
    for flag, default, text in (
        ("--users", 8, "profiles"),
        ("--posts", 40, "requests of each user"),
        ("--profile-tokens", 1500, "of each profile"),
        ("--post-tokens", 60, "of each post"),
        ("--repeat", 2, "rounds"),
    ):
        parser.add_argument(flag, type=positive, default=default, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument("--off-posts", type=positive, default=3, metavar="N", help="posts without the store (3)")
    parser.add_argument("--full", action="store_true", help="all posts without the store too")
    parser.add_argument("--pool-profiles", type=positive, metavar="N", help="that the device pool holds (default: all)")
    parser.add_argument("--min-ratio", type=float, metavar="X", help="exit 1 where the store gives less than X times")
    parser.add_argument("--min-share", type=float, metavar="X", help="exit 1 where less of the tokens is cached")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
    add_flags(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 1 if `--min-ratio`, `--min-share` or, in float32, the limit of differences is missed.

    Raises:
      ConfigError: a flag cannot be used.
      CheckpointError: the model cannot be used.
    """
    shape = Shape(args.users, args.posts, args.profile_tokens, args.post_tokens)
    config = from_args(args, EngineConfig)
    num_off = shape.num_users * (shape.num_posts if args.full else min(args.off_posts, shape.num_posts))
    checkpoint = load_checkpoint(args.model, config.dtype, config.quantization)
    requests = workload(load_tokenizer(checkpoint), shape)
    configs = side_configs(_with_pool(config, checkpoint, shape, args.pool_profiles))
    setting = _setting(args, config, shape, num_off)
    print("\n".join(f"{key}: {value}" for key, value in setting.items()), flush=True)
    with ExitStack() as stack:
        engines = {name: stack.enter_context(running_engine(checkpoint, chosen)) for name, chosen in configs.items()}
        records = measure(engines, requests, num_off, args.repeat)
    print(_HEADER)
    print("\n".join(map(row, records)))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps([asdict(r) | setting for r in records], indent=1) + "\n", encoding="utf-8")
    return _exit_status(records, config.dtype, args.min_ratio, args.min_share)


def workload(tokenizer: Tokenizer, shape: Shape) -> list[ScoreRequest]:
    """One request per post, in the order of arrival, which takes turns between the users.

    Raises:
      ConfigError: a profile or a post is longer than the prose at hand.
    """
    profiles = _windows(tokenizer, "--profile-tokens", shape.profile_tokens, shape.num_users)
    posts = _windows(tokenizer, "--post-tokens", shape.post_tokens, shape.num_requests)
    rows, targets = np.array([shape.post_tokens - 1], np.int32), np.array([demo_label_ids(tokenizer)], np.int32)
    return [
        ScoreRequest(profiles[number % shape.num_users], (Item(post, rows, targets),))
        for number, post in enumerate(posts)
    ]


def _windows(tokenizer: Tokenizer, flag: str, length: int, num_windows: int) -> list[np.ndarray]:
    try:
        windows = prose_windows(tokenizer, (length,), num_windows)[length]
    except ConfigError as error:
        raise ConfigError(error.message.replace("--lengths", flag)) from None
    return [np.asarray(window, np.int32) for window in windows]


def _with_pool(config: EngineConfig, checkpoint: "Checkpoint", shape: Shape, num_profiles: int | None) -> EngineConfig:
    """The settings with a pool for so many profiles, or for all of them if no size was asked for."""
    from jprefill.kvstore.device_pool import block_bytes  # here: it imports JAX, which `--help` must not

    if num_profiles is not None and config.kv_cache_memory_bytes is not None:
        raise ConfigError("--pool-profiles and --kv-cache-memory-bytes: give one of them")
    if config.kv_cache_memory_bytes is not None:
        return config
    num_blocks = (num_profiles or shape.num_users) * -(-shape.profile_tokens // config.block_size)
    num_bytes = num_blocks * block_bytes(checkpoint.config, config.dtype, config.block_size)
    return replace(config, kv_cache_memory_bytes=num_bytes)


def side_configs(config: EngineConfig) -> dict[str, EngineConfig]:
    """What is compared, by name: no store first, then the device pool alone, then the lower tiers where asked for."""
    bare = replace(config, kv_host_bytes=0, kv_disk_path=None)
    sides = {OFF: replace(bare, kv_cache_memory_bytes=0), "store": bare}
    tiers = [name for name, is_on in (("host", config.kv_host_bytes), ("disk", config.kv_disk_path)) if is_on]
    return sides | ({" + ".join(["store", *tiers]): config} if tiers else {})


def measure(
    engines: Mapping[str, Engine], requests: Sequence[ScoreRequest], num_off: int, num_rounds: int
) -> list[Record]:
    """Rounds of: half of the requests without a store, all of them with each store, the other half without.

    Args:
      engines: by the names of `side_configs`.
      num_off: leading requests that the side without a store answers.
    """
    sides = {name: Side(engine) for name, engine in engines.items()}
    run_id = time.time_ns()  # a disk tier may remember the last run
    for name, side in sides.items():
        _ask(side.engine, requests[:1], f"{run_id} {name} warm-up")
    halves = requests[: num_off // 2], requests[num_off // 2 : num_off]
    for number in range(num_rounds):
        for half in (0, 1):
            _answer(sides[OFF], halves[half], "", is_new_round=half == 0)
            for name, side in sides.items() if half == 0 else ():
                if name != OFF:
                    _answer(side, requests, f"{run_id} {name} {number}")
    return [_record(name, side, sides[OFF]) for name, side in sides.items()]


def _answer(side: Side, requests: Sequence[ScoreRequest], salt: str, *, is_new_round: bool = True) -> None:
    """Runs one phase and adds it to the side's rounds."""
    before = side.engine.stats()
    answers, seconds = _ask(side.engine, requests, salt)
    after = side.engine.stats()
    side.num_batches += after.num_batches - before.num_batches
    side.num_computed_tokens += after.num_computed_tokens - before.num_computed_tokens
    if is_new_round:
        side.answers.append([])
        side.seconds.append(0.0)
    side.answers[-1] += answers
    side.seconds[-1] += seconds


def _ask(engine: Engine, requests: Sequence[ScoreRequest], salt: str) -> tuple[list[ScoreResult], float]:
    """All answers, and the seconds from the first submit to the last answer."""
    salted = [replace(request, salt=salt) for request in requests]
    time.sleep(_PAUSE_S)
    started_s = time.perf_counter()
    futures = [engine.submit(request) for request in salted]
    answers = [future.result() for future in futures]
    return answers, time.perf_counter() - started_s


def _record(name: str, side: Side, off: Side) -> Record:
    usages = [answer.usage for answers in side.answers for answer in answers]
    median_s, num_rounds, num_requests = statistics.median(side.seconds), len(side.seconds), len(side.answers[0])
    record = Record(
        side=name,
        num_requests=num_requests,
        cached_share=sum(u.num_cached_tokens for u in usages) / sum(u.num_prompt_tokens for u in usages),
        requests_per_s=num_requests / median_s,
        spread=(max(side.seconds) - min(side.seconds)) / median_s,
        seconds=tuple(side.seconds),
        num_batches=side.num_batches / num_rounds,
        num_computed_tokens=side.num_computed_tokens / num_rounds,
        tiers={tier: asdict(stats) for tier, stats in side.engine.stats().tiers.items()},
    )
    if side is off:
        return record
    off_speed = len(off.answers[0]) / statistics.median(off.seconds)
    return replace(record, ratio=record.requests_per_s / off_speed, max_logprob_delta=_max_delta(side, off))


def _max_delta(side: Side, off: Side) -> float:
    """Over the requests that both answered."""
    return max(
        float(np.abs(ours.items[0].logprobs - theirs.items[0].logprobs).max())
        for our_round, their_round in zip(side.answers, off.answers, strict=True)
        for ours, theirs in zip(our_round, their_round, strict=False)
    )


def _setting(args: argparse.Namespace, config: EngineConfig, shape: Shape, num_off: int) -> dict[str, Any]:
    """What a reader needs to repeat the run; the same for all its records."""
    versions = {"jprefill": jprefill.__version__} | {name: version(name) for name in ("jax", "jaxlib")}
    return {
        "model": str(args.model),
        "dtype": config.dtype,
        **asdict(shape),
        "num_requests_without_store": num_off,
        "pool_profiles": args.pool_profiles,
        "threads": num_threads(),
        "versions": versions | {"python": sys.version.split()[0]},
        "command": " ".join(["jprefill", *sys.argv[1:]]),
    }


_HEADER = "side                 requests   req/s  spread   ratio  from store  tokens computed  passes  max|Δ label|"


def row(record: Record) -> str:
    """One line of the table."""
    ratio = "" if record.ratio is None else f"{record.ratio:.2f}x"
    delta = "" if record.max_logprob_delta is None else f"{record.max_logprob_delta:.1e}"
    return (
        f"{record.side:20} {record.num_requests:8,d} {record.requests_per_s:7.2f} {record.spread:7.1%} {ratio:>7}"
        f" {record.cached_share:11.1%} {record.num_computed_tokens:16,.0f} {record.num_batches:7.0f} {delta:>13}"
    )


def _exit_status(records: Sequence[Record], dtype: str, min_ratio: float | None, min_share: float | None) -> int:
    """0, or 1 with a line about everything that is missed."""
    missed = []
    for record in records:
        if record.ratio is None or record.max_logprob_delta is None:
            continue
        if min_ratio is not None and record.ratio < min_ratio:
            missed.append(f"{record.side}: ratio {record.ratio:.2f} is below {min_ratio:g}")
        if min_share is not None and record.cached_share < min_share:
            missed.append(f"{record.side}: {record.cached_share:.1%} from the store is below {min_share:.1%}")
        if dtype == "float32" and not record.max_logprob_delta <= MAX_FLOAT32_DELTA:
            missed.append(f"{record.side}: difference {record.max_logprob_delta:.1e} is above {MAX_FLOAT32_DELTA:g}")
    print("\n".join(missed), end="\n" if missed else "")
    return 1 if missed else 0
