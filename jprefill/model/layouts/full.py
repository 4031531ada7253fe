"""The plain layout: every part over the whole bucket at once. The naive twin that the others must equal."""

from jaxtyping import Array, Float, Int32

from jprefill.model.layer import LayerWeights, Rows, finish, project_kv, project_q
from jprefill.model.layouts.buffer import put_rows
from jprefill.model.layouts.contract import KeyValues, LayoutSpec
from jprefill.pallas.attention import attend


def layer_full(
    spec: LayoutSpec,
    x: Float[Array, "T D"],
    kv: KeyValues,
    weights: LayerWeights,
    rows: Rows,
    num_chunks: Int32[Array, ""],
) -> tuple[Float[Array, "T D"], KeyValues]:
    """One layer over the whole bucket; `num_chunks` is not needed."""
    del num_chunks
    kv = put_rows(kv, *project_kv(x, weights, rows, spec.config), rows.ranges.self_pos)
    q = project_q(x, weights, rows, spec.config)
    attended = attend(q, kv.k, kv.v, rows.ranges, implementation=spec.attention)
    return finish(x, attended, weights, spec.config), kv
