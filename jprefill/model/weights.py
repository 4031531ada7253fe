"""Names and shapes of a model's weights: one table for loading, checking, initialising and running.

Hugging Face names and the `[out, in]` layout are kept from file to device, so nothing is transposed or renamed twice.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jprefill.config import Quantization
from jprefill.model.config import ModelConfig
from jprefill.model.quantized import QUANTIZED_DTYPES, kind_of

EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
SCORE = "score.weight"


class Leaf(NamedTuple):
    """Shape and dtype of one array as the layer programs take it."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        """Of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


def layer_name(layer: int, leaf: str) -> str:
    """`leaf` as in `layer_shapes`, of layer number `layer`, by its Hugging Face name."""
    return f"model.layers.{layer}.{leaf}"


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Leaf name -> shape for one layer. The order is the order of a layer program's arguments."""
    c = config
    q_dim, kv_dim = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (c.embed_dim,),
        "self_attn.q_proj.weight": (q_dim, c.embed_dim),
        "self_attn.k_proj.weight": (kv_dim, c.embed_dim),
        "self_attn.v_proj.weight": (kv_dim, c.embed_dim),
        "self_attn.o_proj.weight": (c.embed_dim, q_dim),
        "post_attention_layernorm.weight": (c.embed_dim,),
        "mlp.gate_proj.weight": (c.mlp_dim, c.embed_dim),
        "mlp.up_proj.weight": (c.mlp_dim, c.embed_dim),
        "mlp.down_proj.weight": (c.embed_dim, c.mlp_dim),
    }
    if c.has_attention_bias:
        shapes |= {
            "self_attn.q_proj.bias": (q_dim,),
            "self_attn.k_proj.bias": (kv_dim,),
            "self_attn.v_proj.bias": (kv_dim,),
        }
    if c.has_qk_norm:
        shapes |= {"self_attn.q_norm.weight": (c.head_dim,), "self_attn.k_norm.weight": (c.head_dim,)}
    if c.has_output_bias:
        shapes["self_attn.o_proj.bias"] = (c.embed_dim,)
    if c.has_mlp_bias:
        shapes |= {
            "mlp.gate_proj.bias": (c.mlp_dim,),
            "mlp.up_proj.bias": (c.mlp_dim,),
            "mlp.down_proj.bias": (c.embed_dim,),
        }
    return shapes


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by Hugging Face name; the head is absent where it is tied to the embedding."""
    shapes: dict[str, tuple[int, ...]] = {EMBED: (config.vocab_size, config.embed_dim)}
    for layer in range(config.num_layers):
        shapes |= {layer_name(layer, leaf): shape for leaf, shape in layer_shapes(config).items()}
    shapes[FINAL_NORM] = (config.embed_dim,)
    if not config.is_tied:
        shapes[head_name(config)] = head_shape(config)
    return shapes


def head_name(config: ModelConfig) -> str:
    """The matrix that the last hidden rows meet: of the classes, of the vocabulary, or the embedding again."""
    if config.class_head is not None:
        return SCORE
    return EMBED if config.is_tied else LM_HEAD


def head_shape(config: ModelConfig) -> tuple[int, int]:
    """Shape of the matrix `head_name`."""
    num_rows = config.vocab_size if config.class_head is None else len(config.class_head.names)
    return num_rows, config.embed_dim


def is_projection(name: str) -> bool:
    """Whether quantisation is for this tensor: the matrices of a layer; never embedding, LM head, norms, biases."""
    return name.endswith("_proj.weight")


def scale_name(name: str) -> str:
    """Where the scales of a quantised `...weight` stand."""
    return f"{name}_scale"


def quantization_of(weights: Mapping[str, Any]) -> Quantization | None:
    """What the projections of a whole model are, told from the arrays."""
    return kind_of(np.dtype(weights[layer_name(0, "mlp.down_proj.weight")].dtype))


def layer_leaves(config: ModelConfig, dtype: np.dtype, quantization: Quantization | None) -> dict[str, Leaf]:
    """Leaf name -> shape and dtype for one layer: what its program is compiled for.

    Without quantisation the names of `layer_shapes`, all in `dtype`; with it every projection is 8-bit values, followed
    by its float32 scales.
    """
    return _leaves(layer_shapes(config), dtype, quantization)


def weight_leaves(config: ModelConfig, dtype: np.dtype, quantization: Quantization | None) -> dict[str, Leaf]:
    """Every array of the model on the device: `weight_shapes` with dtypes, and scales as in `layer_leaves`."""
    return _leaves(weight_shapes(config), dtype, quantization)


def _leaves(shapes: dict[str, tuple[int, ...]], dtype: np.dtype, quantization: Quantization | None) -> dict[str, Leaf]:
    leaves: dict[str, Leaf] = {}
    for name, shape in shapes.items():
        if quantization is None or not is_projection(name):
            leaves[name] = Leaf(shape, dtype)
        else:
            leaves[name] = Leaf(shape, QUANTIZED_DTYPES[quantization])
            leaves[scale_name(name)] = Leaf(shape[:1], np.dtype(np.float32))
    return leaves
