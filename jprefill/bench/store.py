"""`jprefill bench store`: what keys and the index of the prefix store cost. No model, no JAX."""

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np

from jprefill.bench.local import positive
from jprefill.config import EngineConfig, Eviction
from jprefill.kvstore.eviction import make_order
from jprefill.kvstore.hashing import BlockKeys, KeyMaker
from jprefill.kvstore.index import BlockIndex

_NUM_TOKENS = 60_000
_NUM_BLOCKS = 100_000
_NUM_REPEATS = 9
_VOCAB_SIZE = 50_000
_BLOCKS_PER_PROFILE = 94  # 1,500 tokens of 16 a block


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `jprefill bench store`."""
    parser.add_argument("--tokens", type=positive, default=_NUM_TOKENS, metavar="N", help="of the long prompt")
    parser.add_argument("--blocks", type=positive, default=_NUM_BLOCKS, metavar="N", help="of the pool")
    parser.add_argument("--block-size", type=positive, default=EngineConfig.block_size, metavar="N")
    parser.add_argument("--eviction", choices=get_args(Eviction), default=EngineConfig.eviction)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record there")


def run(args: argparse.Namespace) -> int:
    """Measures and prints; always 0."""
    record = measure(args.tokens, args.blocks, args.block_size, args.eviction)
    for name, value in record.items():
        print(f"{name:28} {value:,.1f}" if isinstance(value, float) else f"{name:28} {value}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(
    num_tokens: int = _NUM_TOKENS,
    num_blocks: int = _NUM_BLOCKS,
    block_size: int = EngineConfig.block_size,
    eviction: Eviction = EngineConfig.eviction,
) -> dict[str, float | int | str]:
    """Times are the fastest of a few runs: what the code costs, not what else the machine does.

    Returns:
      `keys_ns_per_token`, `match_ms` and `num_matched_us` of the long prompt while it is cached,
      `index_bytes_per_block` of a full pool (tokens and keys included, at most while it fills), `eviction_us` per
      block of a new prompt that takes the place of others, and the arguments.
    """
    maker = KeyMaker(b"bench", block_size)
    prompt = _tokens(0, num_tokens)
    keys = maker.keys(prompt)
    index = BlockIndex(max(len(keys), 1), block_size, make_order(eviction, len(keys)))
    index.commit(index.reserve(keys, 0, len(keys)))
    key_s = _fastest(lambda: maker.keys(prompt))
    match_s = _fastest(lambda: index.match(keys))
    price_s = _fastest(lambda: index.num_matched(keys))
    full, num_bytes = _filled(maker, num_blocks, eviction)
    return {
        "keys_ns_per_token": key_s / num_tokens * 1e9,
        "match_ms": match_s * 1e3,
        "num_matched_us": price_s * 1e6,
        "index_bytes_per_block": num_bytes / num_blocks,
        "eviction_us": _eviction_s(full, maker, min(10_000, num_blocks)) * 1e6,
        "num_tokens": num_tokens,
        "num_blocks": num_blocks,
        "block_size": block_size,
        "eviction": eviction,
    }


def _tokens(seed: int, num_tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, _VOCAB_SIZE, num_tokens, np.int32)


def _fastest(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_NUM_REPEATS):
        started_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started_s)
    return min(seconds)


def _profile(maker: KeyMaker, seed: int) -> BlockKeys:
    return maker.keys(_tokens(seed, _BLOCKS_PER_PROFILE * maker.block_size))


def _filled(maker: KeyMaker, num_blocks: int, eviction: Eviction) -> tuple[BlockIndex, int]:
    """A pool full of profiles, and the memory that its index took. One profile of keys in the making is in it."""
    tracemalloc.start()
    try:
        index = BlockIndex(num_blocks, maker.block_size, make_order(eviction, num_blocks))
        seed = 0
        while index.num_free:
            seed += 1
            index.commit(index.reserve(_profile(maker, seed), 0, _BLOCKS_PER_PROFILE))
        return index, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _eviction_s(index: BlockIndex, maker: KeyMaker, num_blocks: int) -> float:
    """Seconds per block to reserve and commit new blocks where each takes the place of another."""
    keys = maker.keys(_tokens(-1 % 2**32, num_blocks * maker.block_size))
    started_s = time.perf_counter()
    reservation = index.reserve(keys, 0, num_blocks, num_seen=num_blocks)
    index.commit(reservation)
    return (time.perf_counter() - started_s) / max(len(reservation.evicted), 1)
