"""Blockwise attention in plain XLA: the fast path on CPU, and the fall-back anywhere.

Queries are taken in tiles, keys in blocks, with the online softmax of flash attention (arXiv 2205.14135). For a tile
whose rows see [lo_r, hi_r), the blocks fall in three runs:

    keys      lo_min    lo_max                hi_min    hi_max
    blocks    | masked  |  whole: no mask     |  masked  |        all others are not visited
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jprefill.pallas.attention.contract import KeyRanges
from jprefill.pallas.rounding import round_to

BLOCK_Q = 256
BLOCK_KV = 256
MIN_BLOCK_KV = 128  # what few queries take: their own keys, packed behind each other, fill no larger block
MASKED = -1e30  # finite, so that a fully masked row never meets inf - inf
LOG2_E = 1.4426950408889634


class _Carry(NamedTuple):
    """Online softmax of one tile: running peak, weight sum and weighted values, rows grouped by KV head."""

    peak: Float32[Array, "K Q"]
    total: Float32[Array, "K Q"]
    values: Float32[Array, "K Q H"]


def attend_xla(
    q: Float[Array, "T N H"], k: Float[Array, "S K H"], v: Float[Array, "S K H"], ranges: KeyRanges
) -> Float[Array, "T N H"]:
    """See `attend`. Memory is one tile of scores, whatever T and S are."""
    num_rows = q.shape[0]
    block_q = min(BLOCK_Q, num_rows)
    if num_rows == block_q:
        return _attend_tile(q, k, v, ranges)
    padding = -num_rows % block_q
    q = jnp.pad(q, ((0, padding), (0, 0), (0, 0)))
    # Padded rows must see nothing: (0, 0) is empty as a prefix, (0, -1) as a self range.
    empty = KeyRanges(*(jnp.full(padding, bound, jnp.int32) for bound in (0, 0, 0, -1)))
    ranges = KeyRanges(*(jnp.concatenate(pair) for pair in zip(ranges, empty, strict=True)))

    def tile(index: Int32[Array, ""], out: Float[Array, "T N H"]) -> Float[Array, "T N H"]:
        start = index * block_q
        rows = partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=block_q)
        attended = _attend_tile(rows(q), k, v, KeyRanges(*map(rows, ranges)))
        return lax.dynamic_update_slice_in_dim(out, attended, start, 0)

    return lax.fori_loop(0, q.shape[0] // block_q, tile, jnp.zeros_like(q))[:num_rows]


def _attend_tile(
    q: Float[Array, "T N H"], k: Float[Array, "S K H"], v: Float[Array, "S K H"], ranges: KeyRanges
) -> Float[Array, "T N H"]:
    """One tile of queries over every block that any of its rows sees."""
    (num_rows, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    num_groups = num_heads // num_kv_heads
    # [T N H] -> [K, G*T, H]: all query heads of one KV head share its keys in a single matrix product.
    grouped = q.reshape(num_rows, num_kv_heads, num_groups, head_dim).transpose(1, 2, 0, 3)
    grouped = grouped.reshape(num_kv_heads, num_groups * num_rows, head_dim)
    carry = _Carry(
        peak=jnp.full(grouped.shape[:2], MASKED, jnp.float32),
        total=jnp.zeros(grouped.shape[:2], jnp.float32),
        values=jnp.zeros(grouped.shape, jnp.float32),
    )
    for low, high in ((ranges.prefix_lo, ranges.prefix_hi), (ranges.self_lo, ranges.self_pos + 1)):
        carry = _visit(carry, grouped, k, v, low, high)
    total = jnp.where(carry.total == 0.0, 1.0, carry.total)
    out = (carry.values / total[..., None]).astype(q.dtype)
    out = out.reshape(num_kv_heads, num_groups, num_rows, head_dim).transpose(2, 0, 1, 3)
    return out.reshape(num_rows, num_heads, head_dim)


def _visit(
    carry: _Carry,
    q: Float[Array, "K Q H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    low: Int32[Array, " T"],
    high: Int32[Array, " T"],
) -> _Carry:
    """Adds the keys `[low, high)` of each row to the tile's softmax."""
    block_kv = min(BLOCK_KV, k.shape[0], max(MIN_BLOCK_KV, low.shape[0]))
    is_empty = low >= high
    first_key = jnp.min(jnp.where(is_empty, k.shape[0], low))
    end_key = jnp.max(jnp.where(is_empty, 0, high))
    first = first_key // block_kv
    end = jnp.maximum(first, -(-end_key // block_kv))
    first_whole = jnp.clip(-(-jnp.max(low) // block_kv), first, end)
    end_whole = jnp.clip(jnp.min(high) // block_kv, first_whole, end)
    # An empty row must not be shown anything, so its tile has no whole block.
    end_whole = jnp.where(jnp.any(is_empty), first_whole, end_whole)

    num_groups = q.shape[1] // low.shape[0]
    low, high = jnp.tile(low, num_groups), jnp.tile(high, num_groups)

    def step(index: Int32[Array, ""], carry: _Carry, *, is_masked: bool) -> _Carry:
        # The last block may reach past the buffer: it starts earlier, and keys seen before are masked away.
        start = jnp.minimum(index * block_kv, k.shape[0] - block_kv)
        keys = lax.dynamic_slice_in_dim(k, start, block_kv)
        values = lax.dynamic_slice_in_dim(v, start, block_kv)
        scores = _scores(q, keys)
        if is_masked:
            key = start + jnp.arange(block_kv, dtype=jnp.int32)
            is_new = (key >= index * block_kv) & (key >= first_key) & (key < end_key)
            is_seen = (key[None] >= low[:, None]) & (key[None] < high[:, None]) & is_new[None]
            scores = jnp.where(is_seen[None], scores, MASKED)
            values = jnp.where(is_new[:, None, None], values, 0)  # a weight of 0 times NaN is NaN
        # The barrier keeps what follows the same machine code in all loops: a row's bits must not depend on whether
        # other rows of its tile need a mask.
        return _accumulate(carry, *lax.optimization_barrier((scores, values)))

    masked, whole = partial(step, is_masked=True), partial(step, is_masked=False)
    carry = lax.fori_loop(first, first_whole, masked, carry)
    carry = lax.fori_loop(first_whole, end_whole, whole, carry)
    return lax.fori_loop(end_whole, end, masked, carry)


def _scores(q: Float[Array, "K Q H"], keys: Float[Array, "S K H"]) -> Float32[Array, "K Q S"]:
    """Scaled products in units of log2, so that the softmax is one exp2."""
    scores = lax.dot_general(
        q, keys, (((2,), (2,)), ((0,), (1,))), precision=_precision(q), preferred_element_type=jnp.float32
    )
    return scores * (q.shape[-1] ** -0.5 * LOG2_E)


def _accumulate(carry: _Carry, scores: Float32[Array, "K Q S"], values: Float[Array, "S K H"]) -> _Carry:
    """One step of the online softmax. Weights and their sum are rounded alike, so rounding cancels."""
    peak = jnp.maximum(carry.peak, scores.max(-1))
    decay = jnp.exp2(carry.peak - peak)
    # A row that has seen nothing yet has peak == MASKED: its weights must be 0, not exp2(0).
    floor = jnp.maximum(peak, MASKED / 2)
    weights = round_to(jnp.exp2(scores - floor[..., None]), values.dtype)
    # Without the barrier XLA:CPU computes the exponential once for the sum and once more for the product.
    weights = lax.optimization_barrier(weights)
    added = lax.dot_general(
        weights,
        values,
        (((2,), (0,)), ((0,), (1,))),
        precision=_precision(values),
        preferred_element_type=jnp.float32,
    )
    return _Carry(
        peak=peak,
        total=carry.total * decay + weights.astype(jnp.float32).sum(-1),
        values=carry.values * decay[..., None] + added,
    )


def _precision(x: Array) -> lax.Precision | None:
    """Float32 means float32: without this a GPU would use TF32."""
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
