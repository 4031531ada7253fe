"""From hidden rows to log-probabilities: only rows that are read reach the LM head, only asked ids leave it."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jprefill.model.layer import LayerWeights, Rows, finish, project_q, rms_norm
from jprefill.model.layouts import KeyValues, LayoutSpec
from jprefill.pallas.attention import attend


class Reads(NamedTuple):
    """What one head call reads: R rows of x, and P pairs (index into the R rows, token id). Padding repeats row 0."""

    rows: Int32[Array, " R"]
    pair_rows: Int32[Array, " P"]
    pair_ids: Int32[Array, " P"]


class RowScores(NamedTuple):
    """Log-probabilities in nats over all ids of the head, and the most probable id of each row."""

    pair_logprobs: Float32[Array, " P"]
    top_ids: Int32[Array, " R"]
    top_logprobs: Float32[Array, " R"]


class HeadWeights(NamedTuple):
    """`lm_head` is the embedding table where the model ties them, and the class matrix of a classifier."""

    final_norm: Float[Array, " D"]
    lm_head: Float[Array, "V D"]


def head(spec: LayoutSpec, hidden: Float[Array, "R D"], weights: HeadWeights, reads: Reads) -> RowScores:
    """Final norm, LM head and log-softmax (float32) of R rows. Memory is R x V, whatever the prompt's length."""
    with jax.named_scope("head"):
        normal = rms_norm(hidden, weights.final_norm, spec.config.norm_eps)
        logits = lax.dot_general(
            normal,
            weights.lm_head,
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST if normal.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
        if spec.config.class_head is not None:
            logits = jnp.pad(logits, ((0, 0), (0, 1)))  # the constant logit of `ClassHead.zero_id`
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        return RowScores(
            pair_logprobs=logits[reads.pair_rows, reads.pair_ids] - normaliser[reads.pair_rows],
            top_ids=jnp.argmax(logits, axis=-1).astype(jnp.int32),
            top_logprobs=logits.max(-1) - normaliser,
        )


def read_last_layer(
    spec: LayoutSpec,
    x: Float[Array, "T D"],
    kv: KeyValues,
    layer: LayerWeights,
    weights: HeadWeights,
    rows: Rows,
    reads: Reads,
) -> RowScores:
    """The last layer's second loop on the read rows alone, then the head. Saves about 1/L of the work."""
    take = partial(jnp.take, indices=reads.rows, axis=0)
    here, rows_here = take(x), rows.take(take)
    q = project_q(here, layer, rows_here, spec.config)
    attended = attend(q, kv.k, kv.v, rows_here.ranges, implementation=spec.attention)
    return head(spec, finish(here, attended, layer, spec.config), weights, reads)


def read_hidden(spec: LayoutSpec, x: Float[Array, "T D"], weights: HeadWeights, reads: Reads) -> RowScores:
    """The plain twin: x has been through every layer; pick the read rows, then the head."""
    return head(spec, jnp.take(x, reads.rows, axis=0), weights, reads)
