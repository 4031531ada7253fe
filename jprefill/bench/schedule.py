"""`jprefill bench schedule`: what one decision costs with thousands of requests waiting. No model, no JAX."""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import cycle
from pathlib import Path
from typing import get_args

import numpy as np

from jprefill.bench.local import positive, positive_list
from jprefill.config import EngineConfig, Policy
from jprefill.kvstore.eviction import make_order
from jprefill.kvstore.hashing import KeyMaker
from jprefill.kvstore.index import BlockIndex
from jprefill.kvstore.keep import KeepPolicy
from jprefill.kvstore.lower_tiers import Pending
from jprefill.kvstore.store import PrefixStore
from jprefill.scheduler.features import ChunkWalk
from jprefill.scheduler.jct import JctModel
from jprefill.scheduler.planning import Room
from jprefill.scheduler.queue import PendingRequest
from jprefill.scheduler.scheduler import Scheduler
from jprefill.types import Item, ScoreRequest

_BLOCK_SIZE = 16
_PROFILE_BLOCKS = 94  # 1,500 tokens
_POST_TOKENS = 64
_NUM_DECISIONS = 50
_NUM_LOOKED_AT = 32
_VOCAB_SIZE = 50_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `jprefill bench schedule`."""
    parser.add_argument("--waiting", type=positive, default=10_000, metavar="N", help="requests (default: 10000)")
    parser.add_argument("--blocks", type=positive, default=100_000, metavar="N", help="of the pool (default: 100000)")
    parser.add_argument(
        "--changed",
        type=positive_list,
        default=(1, 10, 40),
        metavar="N,...",
        help=f"profiles of {_PROFILE_BLOCKS} blocks that enter the full pool before a decision, for others that leave",
    )
    parser.add_argument("--policy", choices=get_args(Policy), default=EngineConfig.policy)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")


def run(args: argparse.Namespace) -> int:
    """Measures and prints; always 0."""
    records = measure(args.waiting, args.blocks, (0, *args.changed), args.policy)
    print("changed profiles  repriced  decision ms  slowest  plan ms  requests in it")
    for r in records:
        print(
            f"{r['num_changed']:16}  {r['num_repriced']:8.0f}  {r['decision_ms']:11.3f}  {r['slowest_ms']:7.3f}"
            f"  {r['plan_ms']:7.3f}  {r['num_taken']:14.0f}"
        )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    return 0


class _NoPool:
    """Blocks without arrays."""

    block_size, block_bytes = _BLOCK_SIZE, 1

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks

    def read(self, block_ids: Sequence[int]) -> Pending:
        """Nothing lies below, so nothing is read."""
        raise NotImplementedError

    def write(self, block_ids: Sequence[int], payloads: np.ndarray) -> None:
        """Nothing is restored."""
        raise NotImplementedError

    def reset(self) -> None:
        """Nothing is held."""


def measure(num_waiting: int, num_blocks: int, changes: Sequence[int], policy: Policy) -> list[dict[str, int | float]]:
    """Decisions in turns over `changes`: so many profiles enter the full pool, then the next pass is planned.

    A profile that is there already changes nothing; half of them are, so the requests of half as many are repriced.

    Half of the requests belong to profiles that are in the pool. Those of a pass wait again after it.

    Returns:
      For each number of changes `decision_ms`, the prices and order of all that wait, `num_repriced`, and `plan_ms` for
      the `num_taken` requests of the pass, whose blocks are leased; medians, and the `slowest_ms` decision.
    """
    maker = KeyMaker(b"bench", _BLOCK_SIZE)
    index = BlockIndex(num_blocks, _BLOCK_SIZE, make_order("saved_time", num_blocks))
    store = PrefixStore(_NoPool(num_blocks), index, KeepPolicy("prefix", 4 * num_blocks), b"bench")
    num_profiles = max(1, num_blocks // _PROFILE_BLOCKS)
    for seed in range(num_profiles):
        _enter(index, maker, seed)
    config = EngineConfig(policy=policy)
    scheduler = Scheduler(config, store, JctModel(), ChunkWalk(2048, (2048, 8192)), Room(8192, 16384))
    scheduler.arrive([_waiting(store, number, 2 * num_profiles) for number in range(num_waiting)])
    scheduler.coming(time.monotonic(), 1)
    new = cycle(range(2 * num_profiles))
    rounds: dict[int, list[dict[str, int | float]]] = {num_changed: [] for num_changed in changes}
    for _ in range(_NUM_DECISIONS):
        for num_changed, records in rounds.items():
            for _ in range(num_changed):
                _enter(index, maker, next(new))
            started_s = time.perf_counter()
            scheduler.coming(time.monotonic(), _NUM_LOOKED_AT)
            decided_s = time.perf_counter()
            num_repriced = scheduler.num_repriced
            pieces = scheduler.plan(time.monotonic())
            planned_s = time.perf_counter()
            records.append(
                {
                    "num_repriced": num_repriced,
                    "decision_ms": 1e3 * (decided_s - started_s),
                    "plan_ms": 1e3 * (planned_s - decided_s),
                    "num_taken": len(pieces),
                }
            )
            for piece in pieces:
                store.release(piece.lease, is_good=False)
            scheduler.arrive([piece.pending for piece in pieces])
            scheduler.coming(time.monotonic(), 1)
    return [_summary(num_changed, records) for num_changed, records in rounds.items()]


def _summary(num_changed: int, records: Sequence[dict[str, int | float]]) -> dict[str, int | float]:
    """Medians over the decisions, and the slowest one."""
    medians = {name: statistics.median(record[name] for record in records) for name in records[0]}
    return {"num_changed": num_changed, **medians, "slowest_ms": max(record["decision_ms"] for record in records)}


def _profile(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, _VOCAB_SIZE, _PROFILE_BLOCKS * _BLOCK_SIZE, np.int32)


def _enter(index: BlockIndex, maker: KeyMaker, seed: int) -> None:
    """A profile that was seen before comes into the pool."""
    keys = maker.keys(_profile(seed))
    index.commit(index.reserve(keys, 0, len(keys), num_seen=len(keys)))


def _waiting(store: PrefixStore, number: int, num_profiles: int) -> PendingRequest:
    post = np.random.default_rng([1, number]).integers(0, _VOCAB_SIZE, _POST_TOKENS, np.int32)
    item = Item(post, np.array([_POST_TOKENS - 1], np.int32), np.zeros((1, 1), np.int32))
    request = ScoreRequest(_profile(number % num_profiles), (item,))
    return PendingRequest(request, Future(), store.keys(request), submitted_s=time.monotonic())
