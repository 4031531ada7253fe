"""What passes take on this device: a short run at start, or what an earlier process has saved. No JAX."""

import statistics
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

MAX_S = 3.0  # that the run may take, about: longer passes are learnt when they come
NUM_ROUNDS = 3  # of the shortest, which a moment of other work disturbs most


def calibrate(run: Callable[[Batch], object], walk: ChunkWalk) -> JctModel:
    """Times passes of growing length and fits a model to them.

    Args:
      run: one forward pass that blocks until it is done.
    """
    samples: list[Sample] = []
    spent_s = 0.0
    for number, num_tokens in enumerate(_lengths(walk)):
        piece = _one_prompt(num_tokens)
        batch = pack([piece], next(bucket for bucket in walk.buckets if bucket >= num_tokens))
        seconds = _median_s(run, batch, max(1, NUM_ROUNDS - number))
        samples.append(Sample(walk.of_pass([piece]), seconds))
        spent_s += seconds
        if spent_s + 2.5 * seconds > MAX_S and number >= 2:  # twice as long a prompt takes twice as long, or more
            break
    model = JctModel()
    model.fit(samples)
    return model


def _median_s(run: Callable[[Batch], object], batch: Batch, num_rounds: int) -> float:
    times = []
    for _ in range(num_rounds):
        started_s = time.perf_counter()
        run(batch)
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)


def _lengths(walk: ChunkWalk) -> Iterator[int]:
    """Of the shortest walk, then 1, 2, 4, ... whole chunks."""
    longest = walk.buckets[-1]
    if walk.buckets[0] < walk.chunk_size:
        yield walk.buckets[0]
    length = walk.chunk_size
    while length < longest:
        yield length
        length *= 2
    yield longest


def _one_prompt(num_tokens: int) -> Piece:
    """Token 0 again and again: what stands in a prompt makes no difference to its time."""
    rows, targets = np.array([num_tokens - 1], np.int32), np.zeros((1, 1), np.int32)
    request = ScoreRequest(np.zeros(0, np.int32), (Item(np.zeros(num_tokens, np.int32), rows, targets),))
    store = NoStore()
    keys = store.keys(request)
    return Piece(PendingRequest(request, Future(), keys), 0, 1, store.lease(keys, 0), store.block_size)
