"""The hybrid layout, as PrefillOnly describes it (arXiv 2505.07203): attention whole, token-wise parts by chunk.

A twin of `stream` for comparison. `lax.map` visits every chunk of the bucket, real or not.
"""

import jax
from jax import lax
from jaxtyping import Array, Float, Int32

from jprefill.model.layer import LayerWeights, Rows, finish, project_kv, project_q
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
    del kv, num_chunks

    def by_chunk(array: Array) -> Array:
        return array.reshape(-1, spec.chunk_size, *array.shape[1:])

    def whole(tree):
        return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), tree)

    def before(chunk: tuple[Array, Rows]) -> tuple[Array, Array, Array]:
        here, rows_here = chunk
        k, v = project_kv(here, weights, rows_here, spec.config)
        return project_q(here, weights, rows_here, spec.config), k, v

    def after(chunk: tuple[Array, Array]) -> Array:
        return finish(*chunk, weights, spec.config)

    q, k, v = whole(lax.map(before, (by_chunk(x), rows.take(by_chunk))))
    attended = attend(q, k, v, rows.ranges, implementation=spec.attention)
    return whole(lax.map(after, (by_chunk(x), by_chunk(attended)))), KeyValues(k, v)
