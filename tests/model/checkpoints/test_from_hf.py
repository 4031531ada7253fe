"""`ModelConfig.from_hf`: what it understands, and what it refuses by name."""

import pytest

from jprefill.errors import UnsupportedModelError
from jprefill.model.config import ModelConfig, RopeConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def test_llama_31_is_read():
    config = ModelConfig.from_hf(LLAMA | {"rope_scaling": LLAMA3})
    assert (config.embed_dim, config.mlp_dim, config.head_dim, config.num_kv_heads) == (4096, 14336, 128, 8)
    assert config.rope == RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)


def test_both_spellings_of_rope_mean_the_same():
    new = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    new["rope_parameters"] = LLAMA3 | {"rope_theta": 500000.0}
    assert ModelConfig.from_hf(new) == ModelConfig.from_hf(LLAMA | {"rope_scaling": LLAMA3})


def test_null_means_absent():
    nulls = {"num_key_value_heads": None, "head_dim": None, "rope_scaling": None, "sliding_window": None}
    config = ModelConfig.from_hf(LLAMA | nulls)
    assert (config.num_kv_heads, config.head_dim) == (32, 128)


def test_model_type_stands_in_for_architectures():
    hf = {key: value for key, value in LLAMA.items() if key != "architectures"}
    assert ModelConfig.from_hf(hf | {"model_type": "mistral"}).architecture == "MistralForCausalLM"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Gemma2ForCausalLM"]}, "architecture 'Gemma2ForCausalLM' is not implemented"),
        ({"architectures": None, "model_type": None}, "architecture None is not implemented"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear' is not implemented"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "without 'low_freq_factor'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method='awq'"),
        ({"hidden_size": None}, "config.json has no 'hidden_size'"),
        ({"hidden_size": "4096"}, "hidden_size='4096' must be a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be a whole number, at least 1"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1"),
        ({"num_key_value_heads": 5}, "num_attention_heads=32 is not a multiple of num_key_value_heads=5"),
        ({"head_dim": 65}, "head_dim=65"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"rms_norm_eps": "small"}, "a value of the wrong type"),
        ({"rope_scaling": "llama3"}, "a value of the wrong type"),
        ({"sliding_window": "wide"}, "a value of the wrong type"),
    ],
)
def test_what_is_not_implemented_is_named(change, message):
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_hf(LLAMA | change)
