"""The executables of one model: compiled ahead, called by the runner, never recompiled.

    embed      token ids -> x, an empty KV buffer, rope angles    per bucket
    layer      x, kv -> x, kv        called once per layer         per bucket
    fill_kv    x, kv -> kv           the last layer's first loop   per bucket, layout `stream`
    read       rows of x -> log-probabilities                      per bucket and head size

What triggers a compile: building `Programs`. A call with another shape or dtype raises `TypeError` instead.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import stages
from jaxtyping import Array, Float, Int32
from tqdm import tqdm

from jprefill.config import DType, Layout
from jprefill.model import heads
from jprefill.model.layer import Rows
from jprefill.model.layouts import KeyValues, LayoutSpec, layer_of
from jprefill.model.layouts.stream import fill_kv
from jprefill.model.rope import Angles, angles_at
from jprefill.model.weights import layer_shapes
from jprefill.pallas.attention import KeyRanges

COMPILE_STACK_BYTES = 64 * 2**20  # XLA's recursion has overflowed the default 8 MiB on deep programs


@dataclass(frozen=True)
class HeadSize:
    """One head call reads `num_rows` rows and `num_pairs` (row, id) pairs."""

    num_rows: int
    num_pairs: int


# A single decision must not pay for 64 rows of the vocabulary; a long continuation must not pay 8 calls instead of 1.
HEAD_SIZES = (HeadSize(8, 512), HeadSize(64, 4096))


@dataclass(frozen=True)
class BucketPrograms:
    """The executables of one bucket. `fill_kv` is None where every layer runs whole."""

    bucket: int
    chunk_size: int
    embed: stages.Compiled
    layer: stages.Compiled
    fill_kv: stages.Compiled | None
    read: dict[HeadSize, stages.Compiled]


class Programs:
    """All executables of one model, by bucket. Immutable once built; used by the engine thread."""

    def __init__(self, by_bucket: dict[int, BucketPrograms]):
        self._by_bucket = by_bucket
        self.buckets = tuple(sorted(by_bucket))

    def of(self, bucket: int) -> BucketPrograms:
        """The executables for a bucket that was compiled."""
        return self._by_bucket[bucket]

    @classmethod
    def compile(
        cls,
        spec: LayoutSpec,
        layout: Layout,
        dtype: DType,
        buckets: tuple[int, ...],
        *,
        progress: bool = False,
    ) -> "Programs":
        """Traces here, compiles in a small pool of threads with large stacks."""
        lowered = {(bucket, name): low for bucket in buckets for name, low in _lower(spec, layout, dtype, bucket)}
        with tqdm(total=len(lowered), desc="compiling", disable=None if progress else True) as bar:

            def build(low: stages.Lowered) -> stages.Compiled:
                compiled = low.compile()
                bar.update()
                return compiled

            pending = _submit_all(build, lowered)
            compiled = {key: future.result() for key, future in pending.items()}
        return cls({bucket: _bucket_programs(spec, bucket, compiled) for bucket in buckets})


def _submit_all[K](build: Callable[[stages.Lowered], stages.Compiled], lowered: dict[K, stages.Lowered]):
    """Runs `build` over all programs in two threads; the futures are done when this returns."""
    before = threading.stack_size(COMPILE_STACK_BYTES)
    try:
        with ThreadPoolExecutor(max_workers=2, thread_name_prefix="compile") as pool:
            pending: dict[K, Future[stages.Compiled]] = {key: pool.submit(build, low) for key, low in lowered.items()}
    finally:
        threading.stack_size(before)
    return pending


def _bucket_programs(spec: LayoutSpec, bucket: int, compiled: dict) -> BucketPrograms:
    return BucketPrograms(
        bucket=bucket,
        chunk_size=min(spec.chunk_size, bucket),
        embed=compiled[bucket, "embed"],
        layer=compiled[bucket, "layer"],
        fill_kv=compiled.get((bucket, "fill_kv")),
        read={size: compiled[bucket, size] for size in HEAD_SIZES},
    )


def _lower(spec: LayoutSpec, layout: Layout, dtype: DType, bucket: int):
    """Yields (name, lowered program) for one bucket."""
    spec = replace(spec, chunk_size=min(spec.chunk_size, bucket))  # a bucket below one chunk is one piece
    shapes = _Shapes(spec, jnp.dtype(dtype), bucket)
    layer = partial(layer_of(layout), spec)
    yield (
        "embed",
        jax.jit(partial(embed, spec)).lower(shapes.table, shapes.token_ids, shapes.positions_and_ranges),
    )
    donating = partial(jax.jit, donate_argnums=(0, 1))
    arguments = (shapes.x, shapes.kv, shapes.layer, shapes.rows, shapes.scalar)
    yield "layer", donating(layer).lower(*arguments)
    if layout == "stream":
        yield "fill_kv", jax.jit(partial(fill_kv, spec), donate_argnums=(1,)).lower(*arguments)
    for size in HEAD_SIZES:
        reads = shapes.reads(size)
        if layout == "stream":
            last = (shapes.x, shapes.kv, shapes.layer, shapes.head, shapes.rows, reads)
            yield size, jax.jit(partial(heads.read_last_layer, spec)).lower(*last)
        else:
            yield size, jax.jit(partial(heads.read_hidden, spec)).lower(shapes.x, shapes.head, reads)


def embed(
    spec: LayoutSpec, table: Float[Array, "V D"], token_ids: Int32[Array, " T"], rows: Rows
) -> tuple[Float[Array, "T D"], KeyValues, Rows]:
    """What a pass starts from: rows of the table, the KV buffer that its layers will share, and the rope angles."""
    config = spec.config
    shape = (token_ids.shape[0], config.num_kv_heads, config.head_dim)
    kv = KeyValues(jnp.zeros(shape, table.dtype), jnp.zeros(shape, table.dtype))
    if spec.keeps_angles:
        rows = rows._replace(angles=angles_at(rows.positions, config.rope, config.head_dim))
    return jnp.take(table, token_ids, axis=0), kv, rows


class _Shapes:
    """Abstract arguments of one bucket's programs."""

    def __init__(self, spec: LayoutSpec, dtype: jnp.dtype, bucket: int):
        config = spec.config

        # `Any`: they stand where the programs' arguments are declared arrays.
        def floats(*shape: int, dtype: jnp.dtype = dtype) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype)

        def ints(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        self.table = floats(config.vocab_size, config.embed_dim)
        self.token_ids = ints(bucket)
        self.scalar = ints()
        self.x = floats(bucket, config.embed_dim)
        buffer = floats(bucket, config.num_kv_heads, config.head_dim)
        self.kv = KeyValues(buffer, buffer)
        self.layer = {leaf: floats(*shape) for leaf, shape in layer_shapes(config).items()}
        self.head = heads.HeadWeights(floats(config.embed_dim), self.table)
        self.positions_and_ranges = Rows(ints(bucket), KeyRanges(*[ints(bucket)] * 4))
        self.rows = self.positions_and_ranges
        if spec.keeps_angles:
            half = floats(bucket, config.head_dim // 2, dtype=jnp.dtype(jnp.float32))
            self.rows = self.rows._replace(angles=Angles(half, half))
        self._ints = ints

    def reads(self, size: HeadSize) -> heads.Reads:
        """Arguments of a head call."""
        return heads.Reads(self._ints(size.num_rows), self._ints(size.num_pairs), self._ints(size.num_pairs))
