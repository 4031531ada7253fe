"""`ModelConfig.from_hf`: what it understands, and what it refuses by name."""

import pytest

from jprefill.errors import UnsupportedModelError
from jprefill.model.config import ModelConfig, RopeConfig
from jprefill.types import ClassHead

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


FAMILY_SWITCHES = ("has_attention_bias", "has_output_bias", "has_mlp_bias", "has_qk_norm")


@pytest.mark.parametrize(
    ("family", "without_keys", "with_bias_keys"),
    [
        ("Llama", (False, False, False, False), (True, True, True, False)),
        ("Mistral", (False, False, False, False), (False, False, False, False)),
        ("Qwen2", (True, False, False, False), (True, False, False, False)),
        ("Qwen3", (False, False, False, True), (True, True, False, True)),
    ],
)
def test_a_family_has_what_transformers_gives_it(family, without_keys, with_bias_keys):
    for keys, expected in (({}, without_keys), ({"attention_bias": True, "mlp_bias": True}, with_bias_keys)):
        config = ModelConfig.from_hf(LLAMA | keys | {"architectures": [f"{family}ForCausalLM"]})
        assert tuple(getattr(config, name) for name in FAMILY_SWITCHES) == expected


def test_qwen3_heads_are_128_wide_whatever_the_model_width():
    config = ModelConfig.from_hf(LLAMA | {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024})
    assert config.head_dim == 128


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": 4096},  # use_sliding_window is off where it is missing
        {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 0},
        {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 32},
        {"sliding_window": 4096, "use_sliding_window": True, "layer_types": ["full_attention"] * 32},
        {"sliding_window": 131072, "use_sliding_window": True, "max_window_layers": 0},
    ],
)
def test_a_sliding_window_that_cuts_nothing_is_fine(change):
    assert ModelConfig.from_hf(LLAMA | {"architectures": ["Qwen2ForCausalLM"]} | change).max_position == 131072


@pytest.mark.parametrize("which", [{"max_window_layers": 31}, {"layer_types": ["sliding_attention"] * 32}])
def test_a_sliding_window_that_cuts_is_refused(which):
    hf = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "sliding_window": 4096, "use_sliding_window": True}
    with pytest.raises(UnsupportedModelError, match="sliding_window=4096"):
        ModelConfig.from_hf(hf | which)


CLASSIFIER = LLAMA | {"architectures": ["LlamaForSequenceClassification"], "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("keys", "head"),
    [
        ({}, ClassHead(("LABEL_0", "LABEL_1"), True)),
        ({"num_labels": 1}, ClassHead(("LABEL_0",), False)),
        ({"id2label": {"1": "ham", "0": "spam"}, "pad_token_id": 7}, ClassHead(("spam", "ham"), True, 7)),
        ({"problem_type": "multi_label_classification"}, ClassHead(("LABEL_0", "LABEL_1"), False)),
    ],
)
def test_classes_are_read_and_nothing_is_tied(keys, head):
    config = ModelConfig.from_hf(CLASSIFIER | keys)
    assert config.class_head == head
    assert not config.is_tied


@pytest.mark.parametrize("labels", [{"0": "a", "2": "b"}, {"0": "a", "1": "a"}, {"0": None}, ["a"]])
def test_labels_that_name_no_classes_are_refused(labels):
    with pytest.raises(UnsupportedModelError, match=r"config\.json"):
        ModelConfig.from_hf(CLASSIFIER | {"id2label": labels})


@pytest.mark.parametrize(
    "name",
    ["Qwen3MoeForCausalLM", "MixtralForCausalLM", "Qwen2VLForConditionalGeneration", "Qwen3NextForCausalLM",
     "LlamaForTokenClassification", "Qwen2ForQuestionAnswering", "Gemma2ForSequenceClassification"],
)  # fmt: skip
def test_neighbours_of_the_families_are_refused_by_name(name):
    with pytest.raises(UnsupportedModelError, match=f"architecture '{name}' is not implemented"):
        ModelConfig.from_hf(LLAMA | {"architectures": [name]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Gemma2ForCausalLM"]}, "architecture 'Gemma2ForCausalLM' is not implemented"),
        ({"architectures": None, "model_type": None}, "architecture None is not implemented"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear' is not implemented"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "without 'low_freq_factor'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn' is not implemented"),
        ({"use_mrope": True}, "use_mrope=True"),
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
