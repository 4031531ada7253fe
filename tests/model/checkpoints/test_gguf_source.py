"""GGUF files: values, row order, config and names come back as Hugging Face has them."""

import gguf
import ml_dtypes
import numpy as np
import pytest

from jprefill.errors import CheckpointError, UnsupportedModelError
from jprefill.model.checkpoints import convert, load, open_source
from jprefill.model.checkpoints.gguf import GGUFSource, unpermute
from jprefill.model.config import ModelConfig, RopeConfig
from jprefill.tokenization import load_tokenizer

KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


@pytest.mark.parametrize("kind", KINDS)
def test_dequantised_values_arrive_in_hugging_face_order(tiny, tmp_path, kind):
    held = tiny.write_gguf(tmp_path / "tiny.gguf", kind)
    convert(tmp_path / "tiny.gguf", tmp_path / "converted", progress=False)
    for path in ("tiny.gguf", "converted"):
        weights = load(tmp_path / path).weights
        assert weights.keys() == tiny.weights.keys()
        for name, array in held.items():
            np.testing.assert_array_equal(
                np.asarray(weights[name]).view(np.uint16),
                array.astype(ml_dtypes.bfloat16).view(np.uint16),
                name,
            )


def test_unquantised_file_gives_back_the_original(tiny, tmp_path):
    tiny.write_gguf(tmp_path / "tiny.gguf", "BF16")
    source = open_source(tmp_path / "tiny.gguf")
    for name, array in tiny.weights.items():
        np.testing.assert_array_equal(source.read(name).astype(np.float32), array.astype(np.float32), name)
    assert source.dtype("lm_head.weight") == ml_dtypes.bfloat16
    assert source.dtype("model.norm.weight") == np.float32


def test_gguf_and_hugging_face_of_one_model_have_one_fingerprint(tiny, tmp_path):
    tiny.write_gguf(tmp_path / "tiny.gguf", "BF16")
    from_gguf = convert(tmp_path / "tiny.gguf", tmp_path / "a", progress=False)
    from_hf = convert(tiny.write_hf(tmp_path / "tiny"), tmp_path / "b", progress=False)
    assert from_gguf.fingerprint == from_hf.fingerprint
    assert (from_gguf.source_kind, from_gguf.source_name, from_gguf.name) == ("gguf", "tiny.gguf", "a")
    assert load_tokenizer(tmp_path / "a").encode("abba", add_bos=False) == load_tokenizer(tmp_path / "b").encode(
        "abba", add_bos=False
    )


def test_rows_of_a_small_head_by_hand():
    """One head of size 4: llama.cpp keeps rows 0, 2, 1, 3."""
    np.testing.assert_array_equal(unpermute(np.array([0, 2, 1, 3]), 1), [0, 1, 2, 3])
    np.testing.assert_array_equal(unpermute(np.array([0, 2, 1, 3, 4, 6, 5, 7]), 2), np.arange(8))


def test_biases_are_unpermuted_too(make_tiny, tmp_path):
    biased = make_tiny({"attention_bias": True, "mlp_bias": True})
    biased.write_gguf(tmp_path / "biased.gguf")
    checkpoint = load(tmp_path / "biased.gguf")
    assert checkpoint.config.has_attention_bias
    assert checkpoint.config.has_output_bias
    assert checkpoint.config.has_mlp_bias
    for name, array in biased.weights.items():
        np.testing.assert_array_equal(np.asarray(checkpoint.weights[name]).view(np.uint16), array.view(np.uint16), name)


@pytest.mark.parametrize(("family", "head_dim"), [("Qwen2", 16), ("Qwen3", 32)])
def test_qwen_rows_were_never_permuted(make_tiny, tmp_path, family, head_dim):
    hf = {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower(), "head_dim": head_dim}
    qwen = make_tiny(hf)
    qwen.write_gguf(tmp_path / "qwen.gguf", "BF16", add_key_length=head_dim, add_value_length=head_dim)
    source = open_source(tmp_path / "qwen.gguf")
    assert source.config == ModelConfig.from_hf(qwen.hf)
    assert source.names() == qwen.weights.keys()
    for name, array in qwen.weights.items():
        np.testing.assert_array_equal(source.read(name).astype(np.float32), array.astype(np.float32), name)


def test_config_is_that_of_the_hugging_face_model(tiny, make_tiny, tmp_path):
    tiny.write_gguf(tmp_path / "untied.gguf")
    assert open_source(tmp_path / "untied.gguf").config == ModelConfig.from_hf(tiny.hf)
    tied = make_tiny({"tie_word_embeddings": True})
    tied.write_gguf(tmp_path / "tied.gguf")
    assert open_source(tmp_path / "tied.gguf").config == ModelConfig.from_hf(tied.hf)


def test_directory_with_one_gguf_opens(tiny, tmp_path):
    tiny.write_gguf(tmp_path / "tiny.gguf")
    assert open_source(tmp_path).kind == "gguf"
    tiny.write_gguf(tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"holds 2 \.gguf files; name one"):
        open_source(tmp_path)


def llama3_divisors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """The three cases of the formula, one frequency at a time."""
    result = []
    for i in range(head_dim // 2):
        wavelength = 2 * np.pi / theta ** (-2 * i / head_dim)
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        short, long = wavelength < 8192 / 4, wavelength > 8192
        result.append(1.0 if short else factor if long else 1 / ((1 - smooth) / factor + smooth))
    return np.array(result)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_is_recognised_by_its_frequencies(make_tiny, tmp_path, factor):
    llama3 = make_tiny({"rope_theta": 500_000.0})
    llama3.rope_freqs = llama3_divisors(500_000.0, 16, factor)
    assert len(set(llama3.rope_freqs)) > 2
    llama3.write_gguf(tmp_path / "llama3.gguf")
    assert open_source(tmp_path / "llama3.gguf").config.rope == RopeConfig(500_000.0, "llama3", factor, 1.0, 4.0, 8192)


@pytest.mark.parametrize("freqs", [np.ones(8), llama3_divisors(500_000.0, 16, 16.0), np.ones(4)])
def test_unknown_rope_frequencies_are_refused(make_tiny, tmp_path, freqs):
    llama3 = make_tiny({"rope_theta": 500_000.0})
    llama3.rope_freqs = freqs
    llama3.write_gguf(tmp_path / "llama3.gguf")
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight matches no llama3 rope scaling"):
        open_source(tmp_path / "llama3.gguf")


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("add_rope_scaling_type", gguf.RopeScalingType.YARN, r"llama\.rope\.scaling\.type='yarn'"),
        ("add_expert_count", 8, r"llama\.expert_count=8"),
        ("add_value_length", 8, r"llama\.attention\.value_length=8 differs from head_dim=16"),
        ("add_key_length", 32, r"rope\.dimension_count=16 differs from head_dim=32"),
        ("add_sliding_window", 128, r"llama\.attention\.sliding_window=128"),
    ],
)
def test_features_that_are_not_implemented_are_named(tiny, tmp_path, method, value, message):
    if method == "add_key_length":
        tiny.write_gguf(tmp_path / "tiny.gguf", add_key_length=value, add_value_length=value)
        message = "head_dim=32"
    else:
        tiny.write_gguf(tmp_path / "tiny.gguf", **{method: value})
    with pytest.raises(UnsupportedModelError, match=message):
        open_source(tmp_path / "tiny.gguf")


def write_file(path, metadata=(), tensors=(), architecture="llama"):
    writer = gguf.GGUFWriter(path, architecture)
    for method, *arguments in metadata:
        getattr(writer, method)(*arguments)
    for name, data, kind in tensors:
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


SHAPE = [
    ("add_block_count", 1),
    ("add_context_length", 64),
    ("add_embedding_length", 256),
    ("add_feed_forward_length", 256),
    ("add_head_count", 4),
    ("add_layer_norm_rms_eps", 1e-5),
]


def test_other_architectures_are_refused_by_name(tmp_path):
    write_file(tmp_path / "gemma.gguf", architecture="gemma2")
    with pytest.raises(
        UnsupportedModelError, match="GGUF architecture 'gemma2' is not implemented: llama, qwen2, qwen3 are"
    ):
        open_source(tmp_path / "gemma.gguf")


def test_missing_metadata_is_named(tmp_path):
    write_file(tmp_path / "empty.gguf", SHAPE[:-1], [("token_embd.weight", np.zeros((4, 256), np.float32), "F32")])
    with pytest.raises(CheckpointError, match=r"llama\.attention\.layer_norm_rms_epsilon=None must be a number"):
        open_source(tmp_path / "empty.gguf")
    write_file(tmp_path / "shape.gguf", SHAPE)
    with pytest.raises(CheckpointError, match=r"'token_embd\.weight' is missing"):
        open_source(tmp_path / "shape.gguf")


def test_heads_that_differ_between_layers_are_refused(tmp_path):
    metadata = [*SHAPE, ("add_head_count_kv", [2, 4])]
    write_file(tmp_path / "open.gguf", metadata, [("token_embd.weight", np.zeros((4, 256), np.float32), "F32")])
    with pytest.raises(UnsupportedModelError, match=r"head_count_kv differs between layers"):
        open_source(tmp_path / "open.gguf")


@pytest.mark.parametrize("kind", ["Q6_K", "Q4_K", "Q5_K", "Q2_K"])
def test_k_quants_are_read(tmp_path, kind):
    ggml_type = gguf.GGMLQuantizationType[kind]
    block_bytes = gguf.GGML_QUANT_SIZES[ggml_type][1]
    blocks = np.random.default_rng(0).integers(0, 60, (4, block_bytes), np.uint8)  # small bytes: finite scales
    write_file(tmp_path / "k.gguf", SHAPE, [("token_embd.weight", blocks, kind)])
    source = GGUFSource(tmp_path / "k.gguf")
    expected = gguf.quants.dequantize(blocks, ggml_type)
    assert source.shape("model.embed_tokens.weight") == expected.shape == (4, 256)
    np.testing.assert_array_equal(source.read("model.embed_tokens.weight"), expected)


def test_integer_tensors_are_refused(tmp_path):
    write_file(tmp_path / "i.gguf", SHAPE, [("token_embd.weight", np.zeros((4, 256), np.int8), "I8")])
    with pytest.raises(CheckpointError, match=r"i\.gguf: tensor 'model\.embed_tokens\.weight' has type I8"):
        open_source(tmp_path / "i.gguf").read("model.embed_tokens.weight")


def test_tensors_without_a_place_are_listed(tiny, tmp_path):
    tiny.weights["model.layers.2.self_attn.q_proj.weight"] = tiny.weights["model.layers.0.self_attn.q_proj.weight"]
    tiny.write_gguf(tmp_path / "deep.gguf")
    with pytest.raises(CheckpointError, match=r"'model\.layers\.2\.self_attn\.q_proj\.weight' is not part of Llama"):
        load(tmp_path / "deep.gguf")
