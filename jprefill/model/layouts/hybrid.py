"""The hybrid layout, as PrefillOnly describes it (arXiv 2505.07203): attention whole, token-wise parts by chunk.

A twin of `stream` for comparison. Its maps visit every chunk of the bucket, real or not.
"""

import jax
from jax import lax
from jaxtyping import Array, Float, Int32

from jprefill.model.layer import LayerWeights, Rows, finish, project_kv, project_q
from jprefill.model.layouts.buffer import put_rows
from jprefill.model.layouts.contract import KeyValues, LayoutSpec
from jprefill.pallas.attention import attend


def layer_hybrid(
    spec: LayoutSpec,
    x: Float[Array, "T D"],
    kv: KeyValues,
    weights: LayerWeights,
    rows: Rows,
    num_chunks: Int32[Array, ""],
) -> tuple[Float[Array, "T D"], KeyValues]:
    """One layer over the whole bucket; `num_chunks` is not needed."""
    del num_chunks

    def by_chunk(array: Array) -> Array:
        return array.reshape(-1, spec.chunk_size, *array.shape[1:])

    def whole(tree):
        return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), tree)

    def before(kv: KeyValues, chunk: tuple[Array, Rows]) -> tuple[KeyValues, Array]:
        here, rows_here = chunk
        k, v = project_kv(here, weights, rows_here, spec.config)
        return put_rows(kv, k, v, rows_here.ranges.self_pos), project_q(here, weights, rows_here, spec.config)

    def after(chunk: tuple[Array, Array]) -> Array:
        return finish(*chunk, weights, spec.config)

    kv, q = lax.scan(before, kv, (by_chunk(x), rows.take(by_chunk)))  # a map that writes into the buffer as it goes
    attended = attend(whole(q), kv.k, kv.v, rows.ranges, implementation=spec.attention)
    return whole(lax.map(after, (by_chunk(x), by_chunk(attended)))), kv
