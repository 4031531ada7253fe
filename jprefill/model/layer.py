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
    """`x @ weight.T + bias`; float32 is computed as float32 on every device.

    A quantised weight enters the product as its 8-bit values, which every working dtype holds exactly, so that the
    conversion can happen inside it; the scales multiply the float32 sums (float16 could not hold those unscaled).
    """
    weight, scale = weights[f"{name}.weight"], weights.get(f"{name}.weight_scale")
    if scale is None:
        out = _product(x, weight, x.dtype)
    else:
        sums = _product(x, weight.astype(x.dtype), jnp.dtype(jnp.float32))
        out = round_to(sums * scale[None, :], x.dtype)
    bias = weights.get(f"{name}.bias")
    return out if bias is None else out + bias[None, :]


def _product(x: Float[Array, "T I"], weight: Float[Array, "O I"], dtype: jnp.dtype) -> Float[Array, "T O"]:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=dtype)


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
        k = _norm_heads(k, weights, "self_attn.k_norm", config)
        return rotate(k, _angles(rows, config)), v


def project_q(x: Float[Array, "T D"], weights: LayerWeights, rows: Rows, config: ModelConfig) -> Float[Array, "T N H"]:
    """Queries of each row, rope applied."""
    with jax.named_scope("project_q"):
        normal = rms_norm(x, weights["input_layernorm.weight"], config.norm_eps)
        q = linear(normal, weights, "self_attn.q_proj").reshape(x.shape[0], config.num_heads, config.head_dim)
        q = _norm_heads(q, weights, "self_attn.q_norm", config)
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


def _norm_heads(
    heads: Float[Array, "T N H"], weights: LayerWeights, name: str, config: ModelConfig
) -> Float[Array, "T N H"]:
    """Each head's vector normalised by itself, where the family does so (Qwen3)."""
    if not config.has_qk_norm:
        return heads
    rows = heads.reshape(-1, config.head_dim)
    return rms_norm(rows, weights[f"{name}.weight"], config.norm_eps).reshape(heads.shape)


def _angles(rows: Rows, config: ModelConfig) -> Angles:
    return angles_at(rows.positions, config.rope, config.head_dim) if rows.angles is None else rows.angles
