"""A small model's weights from a seed, made the same on both sides of a comparison. NumPy only."""

from typing import Any

import numpy as np


def parity_weights(shapes: dict[str, Any], seed: int = 7) -> dict[str, np.ndarray]:
    """Float32 weights by Hugging Face name: matrices spread by 1/sqrt(inputs), norms around 1.

    Args:
      shapes: as `jprefill.model.weights.weight_shapes`; the order does not matter.
      seed: one stream per name is drawn from it.
    """
    return {
        name: _weight(name, tuple(shape), index + seed) for index, (name, shape) in enumerate(sorted(shapes.items()))
    }


def parity_tokens(length: int, vocab_size: int) -> np.ndarray:
    """A prompt that both sides read."""
    return np.random.default_rng(length).integers(0, vocab_size, length).astype(np.int32)


def llama_shapes(model: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of an untied Llama by Hugging Face name, for a side that has no jprefill.

    Args:
      model: the fields of `sizes.ModelShape`.
    """
    width, inner = model["embed_dim"], model["mlp_dim"]
    q_dim, kv_dim = (model[heads] * model["head_dim"] for heads in ("num_heads", "num_kv_heads"))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (model["vocab_size"], width),
        "lm_head.weight": (model["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    for layer in range(model["num_layers"]):
        shapes |= {
            f"model.layers.{layer}.{leaf}.weight": shape
            for leaf, shape in {
                "input_layernorm": (width,),
                "self_attn.q_proj": (q_dim, width),
                "self_attn.k_proj": (kv_dim, width),
                "self_attn.v_proj": (kv_dim, width),
                "self_attn.o_proj": (width, q_dim),
                "post_attention_layernorm": (width,),
                "mlp.gate_proj": (inner, width),
                "mlp.up_proj": (inner, width),
                "mlp.down_proj": (width, inner),
            }.items()
        }
    return shapes


def _weight(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return 1 + 0.1 * values if len(shape) == 1 else values * np.float32(shape[-1] ** -0.5)
