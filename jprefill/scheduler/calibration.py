"""What passes take on this device: a short run at start, or what an earlier process has saved. No JAX."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np

from jprefill.kvstore.none import NoStore
from jprefill.scheduler.features import ChunkWalk
from jprefill.scheduler.jct import JctModel, Sample
from jprefill.scheduler.packer import pack
from jprefill.scheduler.pieces import Piece
from jprefill.scheduler.queue import PendingRequest
from jprefill.types import Batch, Item, ScoreRequest

MAX_S = 2.0  # that the run may take, about: longer passes are learnt when they come
NUM_ROUNDS = 3
_FIRST_LENGTH = 16


def calibrate(run: Callable[[Batch], object], walk: ChunkWalk) -> JctModel:
    """Times passes of growing length, each a few times, and fits a model to them.

    Args:
      run: one forward pass that blocks until it is done.
    """
    samples: list[Sample] = []
    spent_s = 0.0
    for num_tokens in _lengths(walk.buckets[-1]):
        piece = _one_prompt(num_tokens)
        batch = pack([piece], next(bucket for bucket in walk.buckets if bucket >= num_tokens))
        features, times = walk.of_pass([piece]), []
        for _ in range(NUM_ROUNDS):
            started_s = time.perf_counter()
            run(batch)
            times.append(time.perf_counter() - started_s)
        samples.append(Sample(features, float(np.median(times))))
        spent_s += sum(times)
        if spent_s + 2 * sum(times) > MAX_S:  # twice as long a prompt takes twice as long, or more
            break
    model = JctModel()
    model.fit(samples)
    return model


def _lengths(longest: int) -> Iterator[int]:
    """Whole and broken chunks: powers of two, and 3/4 of them."""
    length = _FIRST_LENGTH
    while length < longest:
        yield length
        if 3 * length // 2 < longest:
            yield 3 * length // 2
        length *= 2
    yield longest


def _one_prompt(num_tokens: int) -> Piece:
    """Token 0 again and again: what stands in a prompt makes no difference to its time."""
    rows, targets = np.array([num_tokens - 1], np.int32), np.zeros((1, 1), np.int32)
    request = ScoreRequest(np.zeros(0, np.int32), (Item(np.zeros(num_tokens, np.int32), rows, targets),))
    store = NoStore()
    keys = store.keys(request)
    return Piece(PendingRequest(request, Future(), keys), 0, 1, store.lease(keys, 0), store.block_size)
