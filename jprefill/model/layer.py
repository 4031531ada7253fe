"""The pieces of one transformer layer, as pure functions on rows. Layouts compose them, `llama.py` tests them.

A layer's weights are a dict in the names and the order of `weights.layer_shapes`, `[out, in]` as Hugging Face stores
them: a contraction of the last axes is the same single matrix product, so nothing is ever transposed.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jprefill.model.config import ModelConfig
from jprefill.model.rope import Angles, angles_at, rotate
from jprefill.pallas.attention import KeyRanges
from jprefill.pallas.rounding import round_to

LayerWeights = dict[str, Array]


class Rows(NamedTuple):
    """What a layer must know about each token row: its position and what it may see.

    `angles` are the rope angles of `positions`, kept where computing them again in every layer costs more than the
    memory (CPU: sine and cosine are 5 % of a layer); None elsewhere.
    """

    positions: Int32[Array, " T"]
    ranges: KeyRanges
    angles: Angles | None = None

    def take(self, select: Callable[[Array], Array]) -> "Rows":
        """The rows that `select` picks from each array."""
        return jax.tree.map(select, self)


def linear(x: Float[Array, "T I"], weights: LayerWeights, name: str) -> Float[Array, "T O"]:
    """`x @ weight.T + bias`; float32 is computed as float32 on every device."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = lax.dot_general(x, weights[f"{name}.weight"], (((1,), (1,)), ((), ())), precision=precision)
    bias = weights.get(f"{name}.bias")
    return out if bias is None else out + bias[None, :]


def rms_norm(x: Float[Array, "T D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "T D"]:
    """Normalises in float32, casts, then multiplies: the order of Hugging Face, which decides the rounding."""
    wide = x.astype(jnp.float32)
    normal = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return weight[None, :] * normal.astype(x.dtype)


def project_kv(
    x: Float[Array, "T D"], weights: LayerWeights, rows: Rows, config: ModelConfig
) -> tuple[Float[Array, "T K H"], Float[Array, "T K H"]]:
    """Keys (rope applied) and values of each row."""
    with jax.named_scope("project_kv"):
        normal = rms_norm(x, weights["input_layernorm.weight"], config.norm_eps)
        shape = (x.shape[0], config.num_kv_heads, config.head_dim)
        k = linear(normal, weights, "self_attn.k_proj").reshape(shape)
        v = linear(normal, weights, "self_attn.v_proj").reshape(shape)
        return rotate(k, _angles(rows, config)), v


def project_q(x: Float[Array, "T D"], weights: LayerWeights, rows: Rows, config: ModelConfig) -> Float[Array, "T N H"]:
    """Queries of each row, rope applied."""
    with jax.named_scope("project_q"):
        normal = rms_norm(x, weights["input_layernorm.weight"], config.norm_eps)
        q = linear(normal, weights, "self_attn.q_proj").reshape(x.shape[0], config.num_heads, config.head_dim)
        return rotate(q, _angles(rows, config))


def finish(
    x: Float[Array, "T D"], attended: Float[Array, "T N H"], weights: LayerWeights, config: ModelConfig
) -> Float[Array, "T D"]:
    """Output projection, residual, gated MLP, residual."""
    with jax.named_scope("output"):
        x = x + linear(attended.reshape(x.shape[0], -1), weights, "self_attn.o_proj")
    with jax.named_scope("mlp"):
        normal = rms_norm(x, weights["post_attention_layernorm.weight"], config.norm_eps)
        gate, up = linear(normal, weights, "mlp.gate_proj"), linear(normal, weights, "mlp.up_proj")
        return x + linear(gated(gate, up), weights, "mlp.down_proj")


def gated(gate: Float[Array, "T F"], up: Float[Array, "T F"]) -> Float[Array, "T F"]:
    """`silu(gate) * up`, in float32 with one rounding at the end."""
    wide = gate.astype(jnp.float32)
    return round_to(wide * jax.nn.sigmoid(wide) * up.astype(jnp.float32), gate.dtype)


def _angles(rows: Rows, config: ModelConfig) -> Angles:
    return angles_at(rows.positions, config.rope, config.head_dim) if rows.angles is None else rows.angles
