"""`ModelConfig`: the model's shape in our words, translated once from Hugging Face keys."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jprefill.errors import UnsupportedModelError


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. `llama3` scaling stretches long wavelengths only (Llama 3.1 and later).

    Source: transformers `modeling_rope_utils._compute_llama3_parameters` for the meaning of the factors.
    """

    theta: float = 10_000.0
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """Shape and switches of one Llama-family model.

    Attributes:
      embed_dim: D, width of the residual stream.
      mlp_dim: F, width of the gated MLP.
      max_position: longest position the model was made for (tokens).
      is_tied: the LM head is the embedding.
      has_attention_bias: q, k, v projections (and o, see next) have biases.
      has_output_bias: the output projection has one.
      has_mlp_bias: gate, up and down have biases.
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position: int
    rope: RopeConfig
    is_tied: bool = False
    has_attention_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    architecture: str = "LlamaForCausalLM"

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "ModelConfig":
        """Translates a Hugging Face `config.json`.

        Raises:
          UnsupportedModelError: an architecture or feature not implemented, or a missing key, by name.
        """
        architecture = _architecture(hf)
        try:
            _refuse_unsupported(hf)
            num_heads = _size(hf, "num_attention_heads")
            embed_dim = _size(hf, "hidden_size")
            config = cls(
                vocab_size=_size(hf, "vocab_size"),
                num_layers=_size(hf, "num_hidden_layers"),
                embed_dim=embed_dim,
                mlp_dim=_size(hf, "intermediate_size"),
                num_heads=num_heads,
                num_kv_heads=_size(hf, "num_key_value_heads", num_heads),
                head_dim=_size(hf, "head_dim", embed_dim // num_heads),
                norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
                max_position=_size(hf, "max_position_embeddings"),
                rope=_rope(hf),
                is_tied=bool(hf.get("tie_word_embeddings", False)),
                has_attention_bias=bool(hf.get("attention_bias", False)),
                has_output_bias=bool(hf.get("attention_bias", False)),
                has_mlp_bias=bool(hf.get("mlp_bias", False)),
                architecture=architecture,
            )
        except (TypeError, ValueError, AttributeError) as error:
            raise UnsupportedModelError(f"config.json holds a value of the wrong type: {error}") from None
        config._check()
        return config

    def _check(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads={self.num_heads} is not a multiple of num_key_value_heads={self.num_kv_heads}"
            )
        if not (math.isfinite(self.norm_eps) and self.norm_eps >= 0):
            raise UnsupportedModelError(f"config.json: rms_norm_eps={self.norm_eps!r} must be a number, at least 0")
        if self.head_dim % 2:
            raise UnsupportedModelError(f"head_dim={self.head_dim}: rope needs an even one")


ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")


def _architecture(hf: Mapping[str, Any]) -> str:
    by_type = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
    names = hf.get("architectures") or [by_type.get(str(hf.get("model_type")), hf.get("model_type"))]
    name = names[0] if isinstance(names, list) else names
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(f"architecture {name!r} is not implemented: {', '.join(ARCHITECTURES)} are")
    return name


def _size(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A count or size; null is absent, as transformers has it."""
    value = hf.get(key)
    if value is None:
        value = default
    if value is None:
        raise UnsupportedModelError(f"config.json has no {key!r}")
    if type(value) is not int or value < 1:
        raise UnsupportedModelError(f"config.json: {key}={value!r} must be a whole number, at least 1")
    return value


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    """A switch that changes the numbers and is not implemented is an error at load, never ignored."""
    if hf.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"hidden_act={hf['hidden_act']!r} is not implemented: 'silu' is")
    window = hf.get("sliding_window")
    if window is not None and hf.get("use_sliding_window", True) and window < hf.get("max_position_embeddings", 0):
        raise UnsupportedModelError(f"sliding_window={window} is not implemented: attention is whole")
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method")
        raise UnsupportedModelError(f"quantization_config quant_method={method!r} is not implemented")
    for key, neutral in (
        ("pretraining_tp", 1),
        ("partial_rotary_factor", 1.0),
        ("logit_scale", 1.0),
        ("final_logit_softcapping", None),
        ("attn_logit_softcapping", None),
    ):
        if hf.get(key, neutral) not in (neutral, None):
            raise UnsupportedModelError(f"{key}={hf[key]!r} is not implemented")


def _rope(hf: Mapping[str, Any]) -> RopeConfig:
    """Reads both spellings: `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling`."""
    scaling = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    if (share := scaling.get("partial_rotary_factor", 1.0)) not in (1.0, None):
        raise UnsupportedModelError(f"partial_rotary_factor={share!r} is not implemented")
    theta = float(scaling.get("rope_theta", hf.get("rope_theta", 10_000.0)))
    kind = scaling.get("rope_type", scaling.get("type", "default")) or "default"
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind != "llama3":
        raise UnsupportedModelError(f"rope_type={kind!r} is not implemented: 'default' and 'llama3' are")
    missing = [key for key in ("factor", "low_freq_factor", "high_freq_factor") if key not in scaling]
    if missing:
        raise UnsupportedModelError(f"rope_type='llama3' without {missing[0]!r}")
    return RopeConfig(
        theta=theta,
        scaling="llama3",
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling["low_freq_factor"]),
        high_freq_factor=float(scaling["high_freq_factor"]),
        original_max_len=int(scaling.get("original_max_position_embeddings", hf.get("max_position_embeddings", 8192))),
    )
