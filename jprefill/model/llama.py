"""The model as Flax NNX modules: for initialisation, naming and tests. At run time `programs` uses the flat leaves.

Attribute paths are the Hugging Face names, so `to_weights` is a flattening and nothing more.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jprefill.model.config import ModelConfig
from jprefill.model.layer import LayerWeights, Rows, finish, project_kv, project_q, rms_norm
from jprefill.model.weights import head_shape, layer_shapes
from jprefill.pallas.attention import KeyRanges, attend


class Weight(nnx.Module):
    """A `weight` and, where asked for, a `bias`: the leaves of a projection, a norm or a table."""

    def __init__(self, shape: tuple[int, ...], rngs: nnx.Rngs, *, has_bias: bool = False, dtype: jnp.dtype):
        # Norm weights near one, matrices scaled by fan-in: random logits then have a spread worth comparing.
        if len(shape) == 1:
            value = 1.0 + 0.1 * jax.random.normal(rngs.params(), shape)
        else:
            value = jax.random.normal(rngs.params(), shape) * shape[1] ** -0.5
        self.weight = nnx.Param(value.astype(dtype))
        if has_bias:
            self.bias = nnx.Param((0.1 * jax.random.normal(rngs.params(), shape[:1])).astype(dtype))


class Attention(nnx.Module):
    """Query, key, value and output projections."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: jnp.dtype):
        shapes = layer_shapes(config)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            has_bias = f"self_attn.{name}.bias" in shapes
            setattr(self, name, Weight(shapes[f"self_attn.{name}.weight"], rngs, has_bias=has_bias, dtype=dtype))
        if config.has_qk_norm:
            self.q_norm = Weight((config.head_dim,), rngs, dtype=dtype)
            self.k_norm = Weight((config.head_dim,), rngs, dtype=dtype)


class MLP(nnx.Module):
    """Gated MLP."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: jnp.dtype):
        shapes = layer_shapes(config)
        for name in ("gate_proj", "up_proj", "down_proj"):
            has_bias = f"mlp.{name}.bias" in shapes
            setattr(self, name, Weight(shapes[f"mlp.{name}.weight"], rngs, has_bias=has_bias, dtype=dtype))


class Layer(nnx.Module):
    """One transformer layer."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.input_layernorm = Weight((config.embed_dim,), rngs, dtype=dtype)
        self.self_attn = Attention(config, rngs, dtype)
        self.post_attention_layernorm = Weight((config.embed_dim,), rngs, dtype=dtype)
        self.mlp = MLP(config, rngs, dtype)


class Backbone(nnx.Module):
    """Embedding, layers, final norm."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.embed_tokens = Weight((config.vocab_size, config.embed_dim), rngs, dtype=dtype)
        self.layers = nnx.List([Layer(config, rngs, dtype) for _ in range(config.num_layers)])
        self.norm = Weight((config.embed_dim,), rngs, dtype=dtype)


class Llama(nnx.Module):
    """A causal language model, or a sequence classifier over one, of any family that `ModelConfig` knows."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: jnp.dtype | str = "float32"):
        dtype = jnp.dtype(dtype)
        self.config = config
        self.model = Backbone(config, rngs, dtype)
        if config.class_head is not None:
            self.score = Weight(head_shape(config), rngs, dtype=dtype)
        elif not config.is_tied:
            self.lm_head = Weight(head_shape(config), rngs, dtype=dtype)

    def __call__(self, token_ids: Int[Array, " T"]) -> Float[Array, "T V"]:
        """Logits (float32) of every position of one prompt: the plainest forward pass there is.

        Over the vocabulary, or over the classes and, last, the constant 0 of `ClassHead.zero_id`.
        """
        config, num_tokens = self.config, token_ids.shape[0]
        positions = jnp.arange(num_tokens, dtype=jnp.int32)
        zeros = jnp.zeros_like(positions)
        rows = Rows(positions, KeyRanges(zeros, zeros, zeros, positions))
        x = jnp.take(self.model.embed_tokens.weight[...], token_ids, axis=0)
        for layer in self.model.layers:
            x = _forward(config, x, flatten(layer), rows)
        x = rms_norm(x, self.model.norm.weight[...], config.norm_eps)
        logits = jnp.einsum("td,vd->tv", x, self._head_matrix(), precision="highest").astype(jnp.float32)
        return logits if config.class_head is None else jnp.pad(logits, ((0, 0), (0, 1)))

    def _head_matrix(self) -> Float[Array, "V D"]:
        if self.config.class_head is not None:
            return self.score.weight[...]
        return (self.model.embed_tokens if self.config.is_tied else self.lm_head).weight[...]


def _forward(config: ModelConfig, x: Float[Array, "T D"], weights: LayerWeights, rows: Rows) -> Float[Array, "T D"]:
    k, v = project_kv(x, weights, rows, config)
    q = project_q(x, weights, rows, config)
    return finish(x, attend(q, k, v, rows.ranges, implementation="reference"), weights, config)


def flatten(module: nnx.Module) -> dict[str, Any]:
    """Leaves by dotted path: for `Llama` exactly the names of `weights.weight_shapes`.

    Arrays, or shapes where the module was made under `nnx.eval_shape`.
    """
    state = nnx.state(module, nnx.Param)
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}
