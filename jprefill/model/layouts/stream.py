"""The stream layout: a layer in two loops over token chunks, in place.

    loop 1   for each chunk:  norm, K and V projections, rope                 -> the rows' places in the KV buffer
    loop 2   for each chunk:  norm, Q projection, rope, attention of these queries over the WHOLE buffer,
                              output projection, residual, MLP, residual      -> back into x

Attention is exact: only queries are visited chunk by chunk. Scratch memory depends on the chunk, not on the prompt.
The trip count is traced, so work follows the real length while the bucket only fixes buffer sizes.
"""

from functools import partial

from jax import lax
from jaxtyping import Array, Float, Int32

from jprefill.model.layer import LayerWeights, Rows, finish, project_kv, project_q
from jprefill.model.layouts.buffer import put_rows
from jprefill.model.layouts.contract import KeyValues, LayoutSpec
from jprefill.pallas.attention import attend


def layer_stream(
    spec: LayoutSpec,
    x: Float[Array, "T D"],
    kv: KeyValues,
    weights: LayerWeights,
    rows: Rows,
    num_chunks: Int32[Array, ""],
) -> tuple[Float[Array, "T D"], KeyValues]:
    """One layer over `num_chunks` chunks of x; see the module and `layouts`."""
    kv = fill_kv(spec, x, kv, weights, rows, num_chunks)

    def chunk(index: Int32[Array, ""], x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        start = index * spec.chunk_size
        take = partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=spec.chunk_size)
        here = take(x)
        rows_here = rows.take(take)
        q = project_q(here, weights, rows_here, spec.config)
        attended = attend(q, kv.k, kv.v, rows_here.ranges, implementation=spec.attention)
        return lax.dynamic_update_slice_in_dim(x, finish(here, attended, weights, spec.config), start, 0)

    return lax.fori_loop(0, _trip_count(spec, x, num_chunks), chunk, x), kv


def fill_kv(
    spec: LayoutSpec,
    x: Float[Array, "T D"],
    kv: KeyValues,
    weights: LayerWeights,
    rows: Rows,
    num_chunks: Int32[Array, ""],
) -> KeyValues:
    """Loop 1 alone. It is all that the last layer needs for rows that nobody reads."""

    def chunk(index: Int32[Array, ""], kv: KeyValues) -> KeyValues:
        start = index * spec.chunk_size
        take = partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=spec.chunk_size)
        rows_here = rows.take(take)
        k, v = project_kv(take(x), weights, rows_here, spec.config)
        return put_rows(kv, k, v, rows_here.ranges.self_pos)

    return lax.fori_loop(0, _trip_count(spec, x, num_chunks), chunk, kv)


def _trip_count(spec: LayoutSpec, x: Float[Array, "T D"], num_chunks: Int32[Array, ""]) -> int | Int32[Array, ""]:
    """How many chunks a loop visits: the real ones, or all of the bucket where the count must be static."""
    return x.shape[0] // spec.chunk_size if spec.static_chunks else num_chunks
