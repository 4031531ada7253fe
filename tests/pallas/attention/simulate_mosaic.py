"""Runs the Hopper kernel in Pallas' simulation of a GPU on the CPU; prints what the tests check, as JSON.

A process of its own, because a warpgroup that waits for a barrier holds a thread of XLA's pool: with as many threads as
a small machine has cores the simulation hangs (so: NPROC), and a kernel with a wrong barrier hangs for ever.
"""

import json
import sys
from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from jprefill.pallas.attention import KeyRanges
from jprefill.pallas.attention.mosaic import attend_mosaic
from jprefill.pallas.attention.reference import attend_reference

BFLOAT16, FLOAT16 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)
# (heads, KV heads, head_dim), dtype
HEADS = {
    "two query heads share the keys": ((2, 1, 64), BFLOAT16),
    "one query head, rows are split": ((1, 1, 128), BFLOAT16),
    "three query heads": ((3, 1, 64), FLOAT16),
    "two KV heads": ((4, 2, 128), FLOAT16),
    "small key blocks": ((2, 1, 256), BFLOAT16),
}


def random_case(shape, rows, num_keys, dtype=BFLOAT16):
    heads, kv_heads, head_dim = shape
    rng = np.random.default_rng(0)
    sizes = (len(rows), heads), (num_keys, kv_heads), (num_keys, kv_heads)
    q, k, v = (jnp.asarray(rng.normal(size=(*size, head_dim)), dtype) for size in sizes)
    return q, k, v, KeyRanges(*(jnp.asarray(column, jnp.int32) for column in zip(*rows, strict=True)))


def segments(prefix_len, lengths, num_padding):
    """Items over one prefix whose keys lie at the start of the buffer; then rows that see nothing."""
    rows, start = [], prefix_len
    for length in lengths:
        rows += [(0, prefix_len, start, start + t) for t in range(length)]
        start += length
    return rows + [(0, 0, 0, -1)] * num_padding


def run(q, k, v, ranges):
    out = jax.jit(attend_mosaic)(q, k, v, ranges)
    assert out.dtype == q.dtype
    return np.asarray(out, np.float32)


def error(q, k, v, ranges):
    exact = attend_reference(*(x.astype(jnp.float32) for x in (q, k, v)), ranges)
    return float(np.abs(run(q, k, v, ranges) - np.asarray(exact)).max())


def packed_with_nan_behind(shape, dtype):
    """Prefix, items and buffer end inside key blocks, the rows inside a query block."""
    q, k, v, ranges = random_case(shape, segments(150, [40, 1, 64], 31), 300, dtype)
    return error(q, k.at[255:].set(jnp.nan), v.at[255:].set(jnp.nan), ranges)


def deep_in_a_prompt():
    """More key blocks than stages, most of them without a mask."""
    return error(*random_case((2, 1, 128), [(0, 0, 70, 700 + t) for t in range(64)], 768))


def random_ranges():
    rows = np.sort(np.random.default_rng(1).integers(0, 520, (40, 4)), axis=1)
    return error(*random_case((2, 1, 64), [(a, b, c, d - 1) for a, b, c, d in rows], 523))


def bits_changed_by_tile_mates():
    alone = [(0, 128, 128, 128 + t) for t in range(20)]
    mates = [(0, 30, 200, 200 + t) for t in range(30)]
    q, k, v, ranges = random_case((2, 1, 64), alone + mates, 256)
    single = run(q[:20], k, v, KeyRanges(*(column[:20] for column in ranges)))
    return int((run(q, k, v, ranges)[:20] != single).sum())


def error_with_races_detected():
    """Raises where a read or write of shared memory is not ordered by a barrier. Each stage is used twice.

    Ranges end with their blocks: the warpgroups clear a block in an unordered way, by intent (see `_clear`).
    """
    q, k, v, ranges = random_case((2, 1, 128), [(0, 256, 384, 639)] * 128, 640)
    out = jax.jit(partial(attend_mosaic, interpret=plgpu.InterpretGPUParams(detect_races=True)))(q, k, v, ranges)
    exact = attend_reference(*(x.astype(jnp.float32) for x in (q, k, v)), ranges)
    return float(np.abs(np.asarray(out, np.float32) - np.asarray(exact)).max())


def nonzero_of_rows_that_see_nothing():
    q, k, v, ranges = random_case((2, 1, 64), [(0, 0, 0, -1)] * 70, 64)
    return int(np.count_nonzero(run(q, k * jnp.nan, v * jnp.nan, ranges)))


if __name__ == "__main__":
    results: dict[str, float] = {name: packed_with_nan_behind(*heads) for name, heads in HEADS.items()}
    for measure in (
        deep_in_a_prompt,
        random_ranges,
        error_with_races_detected,
        bits_changed_by_tile_mates,
        nonzero_of_rows_that_see_nothing,
    ):
        results[measure.__name__] = measure()
    json.dump(results, sys.stdout)
