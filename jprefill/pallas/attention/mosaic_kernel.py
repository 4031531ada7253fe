"""The Mosaic GPU kernel: attention of one block of queries on Hopper.

Three warpgroups of a block split the work, as in FlashAttention-3 (arXiv 2407.08608):

    warpgroup   0                           1                           2
    does        64 query rows               64 query rows               copies keys and values
                Q K^T | softmax | P V | ..  ..  | Q K^T | softmax | ..  K, V -> shared memory

0 and 1 take turns: while one fills the tensor cores, the other computes its softmax. Both hold rows of the same KV head
and walk the same key blocks, so a block is copied once for 128 rows and nobody waits for anybody at the end.

Blocks are visited in ascending order, and a mask changes nothing for the keys that a row sees, so a row's result does
not depend on which other rows share its tile.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jprefill.pallas.attention.bounds import NUM_BOUNDS

ROWS = 64  # query rows of a warpgroup: the M of one wgmma
COLUMNS = 64  # of the shared-memory swizzle
NUM_COMPUTE = 2
NUM_WARPGROUPS = NUM_COMPUTE + 1
MASKED = -1e30  # finite, so that a row that sees nothing never meets inf - inf
LOWEST_PEAK = -1e20  # above every masked score, below every real one
LOG2_E = 1.4426950408889634

Ref = Any  # references to device and shared memory, as Pallas passes them


@dataclass(frozen=True)
class Plan:
    """The static choices of one kernel.

    Attributes:
      dtype: of q, k, v and the output.
      num_groups: query heads per KV head.
      heads_per_block: 2: the warpgroups take two query heads of the same rows; 1: one head, 64 rows each.
      num_stages: key blocks in flight.
      is_interpreted: multiply by `jnp.dot` where interpret mode has no `wgmma` (left operand in registers).
    """

    dtype: jnp.dtype
    head_dim: int
    num_groups: int
    heads_per_block: int
    block_kv: int
    num_stages: int
    is_interpreted: bool = False

    @property
    def block_q(self) -> int:
        """Query rows (tokens) of a block: those that share one row of the bounds."""
        return ROWS * NUM_COMPUTE // self.heads_per_block


class Shared(NamedTuple):
    """Shared memory of a block, and the barriers that say when a part may be read, overwritten, or the core used."""

    q: Ref
    k: Ref
    v: Ref
    q_landed: Ref
    k_landed: Ref
    v_landed: Ref
    k_read: Ref
    v_read: Ref
    turn: Ref


class Range(NamedTuple):
    """One of a block's two key ranges (scalars), in keys and in key blocks. See `tile_bounds`."""

    first_key: jax.Array
    end_key: jax.Array
    first_whole: jax.Array
    end_whole: jax.Array
    first: jax.Array
    end: jax.Array


class Walk(NamedTuple):
    """The key blocks of a query block, in the order they are visited: those of the prefix, then its own."""

    prefix: Range
    own: Range

    @classmethod
    def read(cls, bounds_ref: Ref, tile: jax.Array, block_kv: int) -> "Walk":
        """The row of `tile_bounds` that belongs to this block."""

        def range_at(start: int) -> Range:
            first_key, end_key, first_whole, end_whole = (bounds_ref[tile, start + i] for i in range(NUM_BOUNDS))
            first = lax.div(first_key, jnp.int32(block_kv))
            end = lax.div(end_key + (block_kv - 1), jnp.int32(block_kv))
            return Range(first_key, end_key, first_whole, end_whole, first, jnp.maximum(first, end))

        return cls(range_at(0), range_at(NUM_BOUNDS))

    @property
    def num_prefix_blocks(self) -> jax.Array:
        """Blocks of the first part of the walk."""
        return self.prefix.end - self.prefix.first

    @property
    def num_blocks(self) -> jax.Array:
        """Length of the walk."""
        return self.num_prefix_blocks + self.own.end - self.own.first

    def at(self, index: jax.Array) -> tuple[jax.Array, Range, jax.Array]:
        """The key block at `index`, its range, and whether that is the prefix."""
        is_prefix = index < self.num_prefix_blocks
        of = Range(*(lax.select(is_prefix, *pair) for pair in zip(self.prefix, self.own, strict=True)))
        return of.first + lax.select(is_prefix, index, index - self.num_prefix_blocks), of, is_prefix


class Softmax(NamedTuple):
    """Online softmax of 64 rows: weighted values, running peak (log2 units), sum of the weights."""

    values: jax.Array
    peak: jax.Array
    total: jax.Array


class Rows(NamedTuple):
    """Half-open key range of each of 64 rows."""

    low: jax.Array
    high: jax.Array


class Step(NamedTuple):
    """One key block of the walk: its stage in shared memory, its first key, and what is seen of it."""

    stage: jax.Array
    start: jax.Array
    of: Range
    rows: Rows
    is_masked: jax.Array
    is_last: jax.Array


def attend_block(bounds_ref: Ref, *refs: Ref, plan: Plan) -> None:
    """Kernel body. `refs`: the `KeyRanges`, q, k, v and the output, all in device memory."""
    swizzled = plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
    queries = plgpu.SMEM((NUM_COMPUTE, ROWS, plan.head_dim), plan.dtype, transforms=swizzled)
    keys = plgpu.SMEM((plan.num_stages, plan.block_kv, plan.head_dim), plan.dtype, transforms=swizzled)
    landed = plgpu.Barrier(num_barriers=plan.num_stages)
    read = plgpu.Barrier(num_arrivals=NUM_COMPUTE, num_barriers=plan.num_stages)
    pl.run_scoped(
        lambda *shared: _split(bounds_ref, refs, Shared(*shared), plan),
        *(queries, keys, keys, plgpu.Barrier(num_barriers=NUM_COMPUTE)),
        *(landed, landed, read, read, plgpu.Barrier(num_arrivals=NUM_COMPUTE)),
        collective_axes="warpgroup",
    )


def _split(bounds_ref: Ref, refs: tuple[Ref, ...], shared: Shared, plan: Plan) -> None:
    """Gives each warpgroup its part."""
    *range_refs, q_ref, k_ref, v_ref, out_ref = refs
    # The last rows of a causal prompt see most: they start first, and short blocks fill the end.
    tile = (bounds_ref.shape[0] - 1) - lax.axis_index("tile")
    warpgroup, head = lax.axis_index("warpgroup"), lax.axis_index("heads") * plan.heads_per_block
    walk = Walk.read(bounds_ref, tile, plan.block_kv)

    @pl.when(warpgroup < NUM_COMPUTE)
    def _():
        plgpu.set_max_registers(232, action="increase")
        is_by_head = plan.heads_per_block == NUM_COMPUTE
        rows = pl.ds(tile * plan.block_q + (0 if is_by_head else warpgroup * ROWS), ROWS)
        here = rows, head + (warpgroup if is_by_head else 0)
        layout = plgpu.Layout.WGMMA.reduce(1)
        ranges = [plgpu.load(ref.at[rows], layout=layout, optimized=False) for ref in range_refs]
        own = Rows(ranges[2], ranges[3] + 1)
        _compute(q_ref.at[here], out_ref.at[here], Rows(*ranges[:2]), own, walk, shared, plan)

    @pl.when(warpgroup == NUM_COMPUTE)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        kv_head = lax.div(head, jnp.int32(plan.num_groups))
        _copy(k_ref, v_ref, kv_head, walk, shared, plan)


def _copy(k_ref: Ref, v_ref: Ref, kv_head: jax.Array, walk: Walk, shared: Shared, plan: Plan) -> None:
    """Keeps `num_stages` key blocks in flight. What lies beyond the buffer arrives as zeros."""

    @pl.loop(0, walk.num_blocks)
    def _(index: jax.Array) -> None:
        block, *_ = walk.at(index)
        stage = lax.rem(index, jnp.int32(plan.num_stages))
        source = pl.ds(block * plan.block_kv, plan.block_kv), kv_head
        for ref, target, landed, read in (
            (k_ref, shared.k, shared.k_landed, shared.k_read),
            (v_ref, shared.v, shared.v_landed, shared.v_read),
        ):
            pl.when(index >= plan.num_stages)(partial(plgpu.barrier_wait, read.at[stage]))
            plgpu.copy_gmem_to_smem(ref.at[source], target.at[stage], landed.at[stage])


def _compute(q_ref: Ref, out_ref: Ref, prefix: Rows, own: Rows, walk: Walk, shared: Shared, plan: Plan) -> None:
    """64 rows over all key blocks, then the division by the sum, and the store."""
    warpgroup = lax.axis_index("warpgroup")
    q = shared.q.at[warpgroup]
    plgpu.copy_gmem_to_smem(q_ref, q, shared.q_landed.at[warpgroup])
    plgpu.barrier_wait(shared.q_landed.at[warpgroup])

    def step(index: jax.Array, softmax: Softmax) -> Softmax:
        block, of, is_prefix = walk.at(index)
        is_prefix_row = lax.broadcast_in_dim(is_prefix, (ROWS,), ())
        view = Step(
            stage=lax.rem(index, jnp.int32(plan.num_stages)),
            start=block * plan.block_kv,
            of=of,
            rows=Rows(*(jnp.where(is_prefix_row, *pair) for pair in zip(prefix, own, strict=True))),
            is_masked=(block < of.first_whole) | (block >= of.end_whole),
            is_last=index + 1 == walk.num_blocks,
        )
        return _add_block(softmax, q, view, shared, plan)

    pl.when(walk.num_blocks > 0)(lambda: plgpu.barrier_wait(shared.k_landed.at[0]))
    pl.when(warpgroup == 1)(lambda: _take_turns(shared))  # half a step behind warpgroup 0
    softmax = lax.fori_loop(0, walk.num_blocks, step, _empty_softmax(plan))
    pl.when(warpgroup == 0)(lambda: _take_turns(shared))

    total = jnp.where(softmax.total == 0.0, 1.0, softmax.total)
    q[...] = (softmax.values * _spread(1.0 / total, softmax.values)).astype(plan.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q, out_ref)
    plgpu.wait_smem_to_gmem(0)


def _empty_softmax(plan: Plan) -> Softmax:
    of_row = plgpu.Layout.WGMMA.reduce(1)
    return Softmax(
        values=plgpu.layout_cast(jnp.zeros((ROWS, plan.head_dim), jnp.float32), plgpu.Layout.WGMMA),
        peak=plgpu.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), of_row),
        total=plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), of_row),
    )


def _spread(of_row: jax.Array, like: jax.Array) -> jax.Array:
    """One number per row, repeated along it."""
    return lax.broadcast_in_dim(of_row, like.shape, (0,))


def _take_turns(shared: Shared) -> None:
    plgpu.barrier_arrive(shared.turn)
    plgpu.barrier_wait(shared.turn)


def _add_block(softmax: Softmax, q: Ref, step: Step, shared: Shared, plan: Plan) -> Softmax:
    """Adds one key block, whose keys have landed."""

    def multiply(scores: Ref) -> jax.Array:
        plgpu.wgmma(scores, q, shared.k.at[step.stage].transpose((1, 0)))
        _take_turns(shared)
        return scores[...]

    scores = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, plan.block_kv), jnp.float32))
    plgpu.barrier_arrive(shared.k_read.at[step.stage])
    scores = lax.cond(step.is_masked, lambda: _hide(scores, step), lambda: scores)

    scale = plan.head_dim**-0.5 * LOG2_E
    peak = jnp.maximum(softmax.peak, scores.max(axis=1) * scale)
    decay = jnp.exp2(softmax.peak - peak)
    # A row that has seen nothing yet must get weights of 0, not exp2(0).
    weights = jnp.exp2(scores * scale - _spread(jnp.maximum(peak, LOWEST_PEAK), scores))
    values = softmax.values * _spread(decay, softmax.values)
    total = softmax.total * decay + weights.sum(axis=1)
    # Without the barrier the compiler moves the softmax past the hand-over below.
    values, peak, total, weights = lax.optimization_barrier((values, peak, total, weights.astype(plan.dtype)))

    plgpu.barrier_arrive(shared.turn)  # the other warpgroup may begin its softmax
    plgpu.barrier_wait(shared.v_landed.at[step.stage])
    _clear(shared.v.at[step.stage], step, plan)
    plgpu.barrier_wait(shared.turn)

    def wait_for_next_keys() -> None:
        next_stage = lax.rem(step.stage + 1, jnp.int32(plan.num_stages))
        pl.when(~step.is_last)(lambda: plgpu.barrier_wait(shared.k_landed.at[next_stage]))

    values = _add_product(values, weights, shared.v.at[step.stage], wait_for_next_keys, plan)
    plgpu.barrier_arrive(shared.v_read.at[step.stage])
    return Softmax(values, peak, total)


def _hide(scores: jax.Array, step: Step) -> jax.Array:
    """Replaces the scores of unseen keys, NaN included."""
    key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA) + step.start
    is_seen = (key >= _spread(step.rows.low, scores)) & (key < _spread(step.rows.high, scores))
    return jnp.where(is_seen, scores, MASKED)


def _clear(v: Ref, step: Step, plan: Plan) -> None:
    """Zeroes the values of keys outside the range: a weight of 0 times NaN is NaN.

    Both warpgroups do it without waiting for each other: they write the same bits, and each has finished its own writes
    when its own product reads them.
    """

    @pl.when((step.start < step.of.first_key) | (step.start + plan.block_kv > step.of.end_key))
    def _():
        # Small parts: a whole block in registers would spill.
        for start, column in product(range(0, plan.block_kv, ROWS), range(0, plan.head_dim, COLUMNS)):
            part = v.at[pl.ds(start, ROWS), pl.ds(column, COLUMNS)]
            key = plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=plgpu.Layout.WGMMA) + (step.start + start)
            is_seen = (key >= step.of.first_key) & (key < step.of.end_key)
            part[...] = jnp.where(is_seen, part[...], jnp.zeros((), plan.dtype))
        plgpu.commit_smem()


def _add_product(values: jax.Array, weights: jax.Array, v: Ref, meanwhile: Callable[[], None], plan: Plan) -> jax.Array:
    """values + weights @ v in float32; `meanwhile` runs while the tensor cores do."""
    if plan.is_interpreted:
        meanwhile()
        block = v[...]
        plgpu.commit_smem()  # unlike wgmma, a load is not ordered before the copy that overwrites the block
        return values + jnp.dot(weights, block, preferred_element_type=jnp.float32)

    def multiply(accumulator: Ref) -> None:
        plgpu.wgmma(accumulator, weights, v)
        meanwhile()

    return pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(values))  # pyright: ignore[reportReturnType]
