"""Attention for packed segments as a Pallas-Triton kernel, for every NVIDIA GPU from Ampere on.

One program takes `block_q` query rows of one KV head (see `bounds`) through the blocks of keys that any of them sees,
with the online softmax of flash attention (arXiv 2205.14135):

    for each of the prefix and the self range:    masked blocks, whole blocks, masked blocks

Blocks are visited in ascending order and both kinds of loop do the same arithmetic, so a row's result does not depend
on which other rows share its tile.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32

from jprefill.pallas.attention.bounds import NUM_BOUNDS, tile_bounds
from jprefill.pallas.attention.contract import KeyRanges
from jprefill.pallas.attention.tiles import Tile, tile_for
from jprefill.pallas.device import trace_target

MASKED = -1e30  # finite, so that a fully masked row never meets inf - inf
LOG2_E = 1.4426950408889634


class _Shape(NamedTuple):
    """The static sizes of one call."""

    num_rows: int
    num_heads: int
    num_groups: int
    head_dim: int
    num_tiles: int
    tile: Tile


def attend_triton(
    q: Float[Array, "T N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    ranges: KeyRanges,
    *,
    tile: Tile | None = None,
    interpret: bool | None = None,
) -> Float[Array, "T N H"]:
    """See `attend`. No scratch memory but 32 bytes a tile.

    Args:
      q: queries.
      k: keys.
      v: values.
      ranges: what each row sees.
      tile: None takes the entry of `tiles` for the GPU that is traced for.
      interpret: run the kernel in plain JAX; None does so where the target is a CPU.
    """
    (num_rows, num_heads, head_dim), (num_keys, num_kv_heads, _) = q.shape, k.shape
    target = trace_target()
    num_groups = num_heads // num_kv_heads
    tile = tile or tile_for(target.kind, head_dim, q.dtype.itemsize, num_rows * num_groups)
    bounds = tile_bounds(ranges, num_keys=num_keys, num_groups=num_groups, block_q=tile.block_q, block_kv=tile.block_kv)
    padded_dim = pl.next_power_of_2(head_dim)
    shape = _Shape(num_rows, num_heads, num_groups, head_dim, len(bounds), tile)
    # A KV head's keys as one block: the kernel cuts it. Columns beyond head_dim are masked.
    of_kv_head = pl.BlockSpec((num_keys, None, padded_dim), lambda tile, kv_head: (0, kv_head, 0))
    whole = pl.BlockSpec()
    out = pl.pallas_call(
        partial(_kernel, shape=shape),
        grid=(len(bounds), num_kv_heads),
        in_specs=[whole, of_kv_head, of_kv_head, *[whole] * 5],
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct((num_rows * num_heads, head_dim), q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=target.platform == "cpu" if interpret is None else interpret,
        name="attend_triton",
    )(q.reshape(num_rows * num_heads, head_dim), k, v, *ranges, bounds)
    return out.reshape(q.shape)


class _Carry(NamedTuple):
    """Online softmax of one tile: running peak, weight sum and weighted values."""

    peak: Float32[Array, " M"]
    total: Float32[Array, " M"]
    values: Float32[Array, "M H"]


def _kernel(
    q_ref, k_ref, v_ref, prefix_lo_ref, prefix_hi_ref, self_lo_ref, self_pos_ref, bounds_ref, out_ref, *, shape: _Shape
):
    """One tile of one KV head."""
    block_q, block_kv = shape.tile.block_q, shape.tile.block_kv
    padded_dim = k_ref.shape[-1]
    scale = shape.head_dim**-0.5 * LOG2_E
    # Late tiles see most in a causal prompt: they start first, and short ones fill the end.
    tile = shape.num_tiles - 1 - pl.program_id(0)

    # Query row m of the tile is (token, head in the group); `at` is its row in q[T * N, H].
    flat = tile * block_q + jnp.arange(block_q, dtype=jnp.int32)
    token = lax.div(flat, jnp.full_like(flat, shape.num_groups))
    is_row = token < shape.num_rows
    at = token * (shape.num_heads - shape.num_groups) + flat + pl.program_id(1) * shape.num_groups
    column = jnp.arange(padded_dim, dtype=jnp.int32)
    is_column = (column < shape.head_dim)[None, :]
    q = plgpu.load(q_ref.at[at[:, None], column[None, :]], mask=is_row[:, None] & is_column, other=0.0)

    def of_rows(ref) -> Int32[Array, " M"]:
        return plgpu.load(ref.at[token], mask=is_row, other=0)

    def load_block(ref, start: Int32[Array, ""], is_read: Array | None) -> Float[Array, "S H"]:
        mask = is_column if padded_dim != shape.head_dim else None
        if is_read is not None:
            mask = is_read[:, None] if mask is None else is_read[:, None] & mask
        block = ref.at[pl.ds(start, block_kv), :]
        return plgpu.load(block) if mask is None else plgpu.load(block, mask=mask, other=0.0)

    lows = of_rows(prefix_lo_ref), of_rows(self_lo_ref)
    # Rows past the end load 0: their self range [0, 0] is one finite key, and nothing of it is stored.
    highs = of_rows(prefix_hi_ref), of_rows(self_pos_ref) + 1

    def visit(which: Int32[Array, ""], carry: _Carry) -> _Carry:
        """Adds the keys `[low, high)` of each row: of the prefix range (0), then of the self range (1)."""
        low, high = (jnp.where(which == 0, *pair) for pair in (lows, highs))
        first_key, end_key, first_whole, end_whole = (
            bounds_ref[tile, which * NUM_BOUNDS + index] for index in range(NUM_BOUNDS)
        )

        def step(index: Int32[Array, ""], carry: _Carry, *, is_masked: bool) -> _Carry:
            start = index * block_kv
            key = start + jnp.arange(block_kv, dtype=jnp.int32)
            # Nothing outside the tile's own keys is read: it may be NaN (0 * NaN is NaN) or past the buffer.
            is_read = (key >= first_key) & (key < end_key) if is_masked else None
            scores = _dot(q, load_block(k_ref, start, is_read), 1) * scale
            if is_masked:
                is_seen = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
                scores = jnp.where(is_seen, scores, MASKED)
            return _accumulate(carry, scores, load_block(v_ref, start, is_read))

        masked, whole = partial(step, is_masked=True), partial(step, is_masked=False)
        carry = lax.fori_loop(lax.div(first_key, block_kv), first_whole, masked, carry)
        carry = lax.fori_loop(first_whole, end_whole, whole, carry)
        return lax.fori_loop(end_whole, lax.div(end_key + (block_kv - 1), block_kv), masked, carry)

    carry = _Carry(
        peak=jnp.full(block_q, MASKED, jnp.float32),
        total=jnp.zeros(block_q, jnp.float32),
        values=jnp.zeros((block_q, padded_dim), jnp.float32),
    )
    # A loop over the two ranges, not two copies of its three loops: half the code and the compile time.
    carry = lax.fori_loop(0, 2, visit, carry)
    # Adds 0. The compiler cannot know, so it computes addresses and mask here and not with those of the queries,
    # where they would hold registers through all the loops (dozens of 255, and spills).
    at = at + (carry.total < 0.0).astype(jnp.int32)
    is_row = at < shape.num_rows * shape.num_heads
    total = jnp.where(carry.total == 0.0, 1.0, carry.total)
    out = (carry.values / total[:, None]).astype(out_ref.dtype)
    plgpu.store(out_ref.at[at[:, None], column[None, :]], out, mask=is_row[:, None] & is_column)


def _accumulate(carry: _Carry, scores: Float32[Array, "M S"], values: Float[Array, "S H"]) -> _Carry:
    """One step of the online softmax, in units of log2."""
    peak = jnp.maximum(carry.peak, jnp.max(scores, axis=1))
    decay = jnp.exp2(carry.peak - peak)
    # A row that has seen nothing yet has peak == MASKED: its weights must be 0, not exp2(0).
    floor = jnp.maximum(peak, MASKED / 2)
    weights = jnp.exp2(scores - floor[:, None])
    return _Carry(
        peak=peak,
        total=carry.total * decay + jnp.sum(weights, axis=1),
        values=carry.values * decay[:, None] + _dot(weights.astype(values.dtype), values, 0),
    )


def _dot(a: Float[Array, "M X"], b: Float[Array, "..."], axis: int) -> Float32[Array, "M Y"]:
    """Contracts the last axis of `a` with `axis` of `b`. Float32 means float32: without HIGHEST it would be TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)
