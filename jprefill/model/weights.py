"""Names and shapes of a model's weights: one table for loading, checking, initialising and running.

Hugging Face names and the `[out, in]` layout are kept from file to device, so nothing is transposed or renamed twice.
"""

from jprefill.model.config import ModelConfig

EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


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
    """Every tensor of the model by Hugging Face name; `lm_head.weight` is absent where it is tied."""
    shapes: dict[str, tuple[int, ...]] = {EMBED: (config.vocab_size, config.embed_dim)}
    for layer in range(config.num_layers):
        shapes |= {layer_name(layer, leaf): shape for leaf, shape in layer_shapes(config).items()}
    shapes[FINAL_NORM] = (config.embed_dim,)
    if not config.is_tied:
        shapes[LM_HEAD] = (config.vocab_size, config.embed_dim)
    return shapes
