"""Models to plan for: by name, from their published configs, or by path. No weights are needed."""

from pathlib import Path
from typing import Any

from jprefill.errors import CheckpointError, ConfigError
from jprefill.model.config import ModelConfig

_LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_LLAMA32 = _LLAMA3 | {"tie_word_embeddings": True, "rope_scaling": _LLAMA3["rope_scaling"] | {"factor": 32.0}}
_QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 152064,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
}

# The keys and values of each model's `config.json` on the hub, as far as they shape it.
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA3
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "llama-3.2-1b": _LLAMA32
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
    },
    "llama-3.2-3b": _LLAMA32
    | {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24},
    "llama-3.3-70b": _LLAMA3
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "qwen2.5-7b": _QWEN25
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
    },
    "qwen2.5-32b": _QWEN25
    | {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
    },
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
    },
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"],
        "vocab_size": 32768,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
    },
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
}


def find_model(name: str) -> ModelConfig:
    """The shape of a model: a name in `MODELS`, or whatever `checkpoints.open_source` reads.

    A folder that holds nothing but `config.json` is enough.

    Raises:
      ConfigError: neither a known name nor something that is there.
      CheckpointError: it is there, and cannot be read.
      UnsupportedModelError: the model asks for something that is not implemented.
    """
    if name.lower() in MODELS:
        return ModelConfig.from_hf(MODELS[name.lower()])
    from jprefill.model.checkpoints import open_source
    from jprefill.model.checkpoints.hf import read_json_object

    path = Path(name)
    if (path / "config.json").is_file() and not (path / "manifest.json").is_file():
        return ModelConfig.from_hf(read_json_object(path / "config.json"))
    if path.exists():
        return open_source(path).config
    return ModelConfig.from_hf(read_json_object(_hub_config(name)))


def _hub_config(name: str) -> Path:
    """`config.json` of a model on the hub, from the local cache where it is there."""
    import huggingface_hub

    from jprefill.model.checkpoints.hub import is_repo_id

    if not is_repo_id(name):
        raise ConfigError(f"model={name!r}: no such path; known names are {', '.join(MODELS)}")
    try:
        return Path(huggingface_hub.hf_hub_download(name, "config.json"))
    except (OSError, ValueError) as error:  # hub and network errors derive from OSError, bad names from ValueError
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise CheckpointError(f"{name}: no such local path, and the hub did not give config.json: {reason}") from None
