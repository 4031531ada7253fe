"""`ModelConfig`: the model's shape in our words, translated once from Hugging Face keys."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jprefill.errors import UnsupportedModelError
from jprefill.types import ClassHead


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
    """Shape and switches of one model of the families Llama, Mistral, Qwen2 and Qwen3.

    Attributes:
      embed_dim: D, width of the residual stream.
      mlp_dim: F, width of the gated MLP.
      max_position: longest position the model was made for (tokens).
      is_tied: the LM head is the embedding.
      has_attention_bias: q, k and v projections have biases (o: see next).
      has_output_bias: the output projection has one.
      has_mlp_bias: gate, up and down have biases.
      has_qk_norm: each head's query and key are normalised before rope.
      class_head: of a sequence classifier; it stands where the LM head does, and nothing is tied.
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
    has_qk_norm: bool = False
    class_head: ClassHead | None = None
    architecture: str = "LlamaForCausalLM"

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "ModelConfig":
        """Translates a Hugging Face `config.json`.

        Raises:
          UnsupportedModelError: an architecture or feature not implemented, or a missing key, by name.
        """
        architecture = _architecture(hf)
        family = _FAMILIES[architecture.partition("For")[0]]
        is_classifier = architecture.endswith(_CLASSIFIER)
        try:
            _refuse_unsupported(hf, family)
            num_heads = _size(hf, "num_attention_heads")
            embed_dim = _size(hf, "hidden_size")
            config = cls(
                vocab_size=_size(hf, "vocab_size"),
                num_layers=_size(hf, "num_hidden_layers"),
                embed_dim=embed_dim,
                mlp_dim=_size(hf, "intermediate_size"),
                num_heads=num_heads,
                num_kv_heads=_size(hf, "num_key_value_heads", num_heads),
                head_dim=_size(hf, "head_dim", family.default_head_dim or embed_dim // num_heads),
                norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
                max_position=_size(hf, "max_position_embeddings"),
                rope=_rope(hf),
                is_tied=bool(hf.get("tie_word_embeddings", False)) and not is_classifier,
                has_attention_bias=family.has_qkv_bias or family.switches(hf, "attention_bias"),
                has_output_bias=family.switches(hf, "attention_bias"),
                has_mlp_bias=family.switches(hf, "mlp_bias"),
                has_qk_norm=family.has_qk_norm,
                class_head=_class_head(hf) if is_classifier else None,
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


@dataclass(frozen=True)
class _Family:
    """What the name of an architecture decides, without a key in `config.json`.

    Attributes:
      model_type: stands in for `architectures` where that is missing.
      bias_keys: the switches of the config that the family knows; others it ignores, as transformers does.
      has_qkv_bias: always, and never on o.
      default_head_dim: None: `hidden_size / num_attention_heads`.
      slides: `sliding_window` holds without `use_sliding_window`.
    """

    model_type: str
    bias_keys: tuple[str, ...] = ()
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    default_head_dim: int | None = None
    slides: bool = True

    def switches(self, hf: Mapping[str, Any], key: str) -> bool:
        """Whether the config turns on a bias that the family has."""
        return key in self.bias_keys and bool(hf.get(key, False))


# Source: `modeling_*.py` and `configuration_*.py` of transformers, by family.
_FAMILIES = {
    "Llama": _Family("llama", bias_keys=("attention_bias", "mlp_bias")),
    "Mistral": _Family("mistral"),
    "Qwen2": _Family("qwen2", has_qkv_bias=True, slides=False),
    "Qwen3": _Family("qwen3", bias_keys=("attention_bias",), has_qk_norm=True, default_head_dim=128, slides=False),
}
_LM, _CLASSIFIER = "ForCausalLM", "ForSequenceClassification"
ARCHITECTURES = tuple(family + task for task in (_LM, _CLASSIFIER) for family in _FAMILIES)


def _architecture(hf: Mapping[str, Any]) -> str:
    by_type = {family.model_type: name + _LM for name, family in _FAMILIES.items()}
    names = hf.get("architectures") or [by_type.get(str(hf.get("model_type")), hf.get("model_type"))]
    name = names[0] if isinstance(names, list) else names
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(f"architecture {name!r} is not implemented: {', '.join(ARCHITECTURES)} are")
    return name


def _class_head(hf: Mapping[str, Any]) -> ClassHead:
    """Names and kind of the classes. transformers leaves `id2label` out where it is the default of two labels."""
    count = _size(hf, "num_labels", 2)
    labels = hf.get("id2label") or {str(index): f"LABEL_{index}" for index in range(count)}
    found = (labels.get(str(index)) for index in range(len(labels)))
    names = tuple(name for name in found if isinstance(name, str))
    if not len(labels) == len(names) == len(set(names)):
        raise UnsupportedModelError(f"config.json: id2label={labels!r} must give the ids from 0 on one name each")
    pad_id = hf.get("pad_token_id")
    if pad_id is not None and type(pad_id) is not int:
        raise UnsupportedModelError(f"config.json: pad_token_id={pad_id!r} must be a whole number or null")
    is_exclusive = len(names) > 1 and hf.get("problem_type") in (None, "single_label_classification")
    return ClassHead(names, is_exclusive, pad_id)


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


def _refuse_unsupported(hf: Mapping[str, Any], family: _Family) -> None:
    """A switch that changes the numbers and is not implemented is an error at load, never ignored."""
    if hf.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"hidden_act={hf['hidden_act']!r} is not implemented: 'silu' is")
    window = hf.get("sliding_window")
    if window is not None and window < hf.get("max_position_embeddings", 0) and _slides(hf, family):
        raise UnsupportedModelError(f"sliding_window={window} is not implemented: attention is whole")
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method")
        raise UnsupportedModelError(f"quantization_config quant_method={method!r} is not implemented")
    for key, neutral in (
        ("pretraining_tp", 1),
        ("partial_rotary_factor", 1.0),
        ("use_mrope", False),
        ("logit_scale", 1.0),
        ("final_logit_softcapping", None),
        ("attn_logit_softcapping", None),
    ):
        if hf.get(key, neutral) not in (neutral, None):
            raise UnsupportedModelError(f"{key}={hf[key]!r} is not implemented")


def _slides(hf: Mapping[str, Any], family: _Family) -> bool:
    """Whether any layer's attention is cut to `sliding_window`."""
    if family.slides:
        return True
    if not hf.get("use_sliding_window", False):
        return False
    num_layers = hf.get("num_hidden_layers", 0)
    kinds = hf.get("layer_types")
    return "sliding_attention" in kinds if kinds else hf.get("max_window_layers", 0) < num_layers


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
