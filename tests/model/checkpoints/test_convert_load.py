"""Whatever a model comes in, the same weights arrive."""

import importlib
import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from jprefill.errors import CheckpointError, ConfigError
from jprefill.model.checkpoints import Manifest, convert, load, open_source
from jprefill.model.config import ModelConfig
from jprefill.model.weights import weight_shapes
from jprefill.tokenization import load_tokenizer
from jprefill.types import ClassHead

NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float16": np.float16}
compiles: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: compiles.append(event) if "backend_compile" in event else None
)


def assert_same(weights, expected, dtype="bfloat16"):
    assert weights.keys() == expected.keys()
    for name, array in expected.items():
        found = np.asarray(weights[name])
        assert found.dtype == NUMPY[dtype]
        np.testing.assert_array_equal(found.view(np.uint8), array.astype(NUMPY[dtype]).view(np.uint8), err_msg=name)


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_hugging_face_directory_loads_as_it_is(tiny, tmp_path, num_shards, dtype):
    checkpoint = load(tiny.write_hf(tmp_path / "tiny", num_shards), dtype=dtype)
    assert_same(checkpoint.weights, tiny.weights, dtype)
    assert (checkpoint.name, checkpoint.dtype) == ("tiny", dtype)
    assert list(checkpoint.weights) == list(weight_shapes(checkpoint.config))


@pytest.mark.parametrize("dtype", NUMPY)
def test_converted_directory_loads_with_the_same_weights(tiny, hf_directory, tmp_path, dtype):
    manifest = convert(hf_directory, tmp_path / "converted", dtype=dtype, progress=False)
    checkpoint = load(tmp_path / "converted", dtype=dtype)
    assert_same(checkpoint.weights, tiny.weights, dtype)
    assert checkpoint.fingerprint == manifest.fingerprint
    assert checkpoint.config == open_source(hf_directory).config
    assert list(checkpoint.weights) == list(weight_shapes(checkpoint.config))
    assert checkpoint.name == "converted"


@pytest.mark.parametrize("stored", NUMPY)
@pytest.mark.parametrize("asked", NUMPY)
def test_converted_directory_is_cast_on_the_way(tiny, hf_directory, tmp_path, stored, asked):
    convert(hf_directory, tmp_path / "converted", dtype=stored, progress=False)
    checkpoint = load(tmp_path / "converted", dtype=asked)
    expected = {name: array.astype(NUMPY[stored]) for name, array in tiny.weights.items()}
    assert_same(checkpoint.weights, expected, asked)


def test_tokenizer_travels_with_the_checkpoint(hf_directory, tmp_path):
    manifest = convert(hf_directory, tmp_path / "converted", progress=False)
    assert set(manifest.tokenizer_files) == {"tokenizer.json", "tokenizer_config.json"}
    for path in (load(tmp_path / "converted").tokenizer_path, load(hf_directory).tokenizer_path):
        assert load_tokenizer(path).decode(load_tokenizer(path).encode("abba", add_bos=False)) == "abba"


def test_loading_and_converting_compile_nothing(hf_directory, tmp_path):
    before = len(compiles)
    load(hf_directory, dtype="float16")
    convert(hf_directory, tmp_path / "converted", progress=False)
    load(tmp_path / "converted", dtype="float32")
    assert len(compiles) == before


def test_weights_in_many_groups_are_whole(tiny, hf_directory, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.import_module("jprefill.model.checkpoints.orbax"), "_GROUP_BYTES", 20_000)
    convert(hf_directory, tmp_path / "converted", progress=False)
    assert_same(load(tmp_path / "converted").weights, tiny.weights)


def test_dtype_of_a_converted_checkpoint_can_be_changed(tiny, hf_directory, tmp_path):
    convert(hf_directory, tmp_path / "wide", dtype="float32", progress=False)
    again = convert(tmp_path / "wide", tmp_path / "narrow", progress=False)
    assert again.fingerprint == convert(hf_directory, tmp_path / "direct", progress=False).fingerprint
    assert (again.source_kind, again.source_name, again.name) == ("hf", "tiny", "narrow")
    assert_same(load(tmp_path / "narrow").weights, tiny.weights)


def test_checkpoint_is_replaced_in_place(tiny, hf_directory, tmp_path):
    convert(hf_directory, tmp_path / "converted", progress=False)
    convert(tmp_path / "converted", tmp_path / "converted", dtype="float32", overwrite=True, progress=False)
    assert_same(load(tmp_path / "converted", dtype="float32").weights, tiny.weights, "float32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["converted", "tiny"]


def test_tied_model_needs_no_head_and_ignores_a_stored_one(make_tiny, tmp_path):
    tied = make_tiny({"tie_word_embeddings": True})
    expected = dict(tied.weights)
    tied.weights["lm_head.weight"] = tied.weights["model.embed_tokens.weight"]
    tied.weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    checkpoint = load(tied.write_hf(tmp_path / "tied"))
    assert checkpoint.config.is_tied
    assert_same(checkpoint.weights, expected)


def test_biases_are_loaded(make_tiny, tmp_path):
    biased = make_tiny({"attention_bias": True, "mlp_bias": True})
    assert "model.layers.1.self_attn.o_proj.bias" in biased.weights
    assert_same(load(biased.write_hf(tmp_path / "biased")).weights, biased.weights)


def test_fingerprint_depends_on_every_weight_and_on_the_config(make_tiny, tmp_path):
    models = [make_tiny(), make_tiny({"rope_theta": 500_000.0}), make_tiny()]
    models[2].weights["model.norm.weight"][-1] += np.float32(1)
    found = [convert(m.write_hf(tmp_path / f"m{i}"), tmp_path / f"c{i}", progress=False) for i, m in enumerate(models)]
    wide = convert(tmp_path / "m0", tmp_path / "wide", dtype="float32", progress=False)
    assert len({manifest.fingerprint for manifest in [*found, wide]}) == 4
    same = convert(make_tiny().write_hf(tmp_path / "other", 3), tmp_path / "c9", progress=False)
    assert same.fingerprint == found[0].fingerprint


def test_fingerprint_of_files_in_place_changes_with_dtype_and_file(tiny, hf_directory):
    first = load(hf_directory).fingerprint
    assert load(hf_directory).fingerprint == first
    assert load(hf_directory, dtype="float32").fingerprint != first
    tiny.hf["rope_theta"] = 5.0
    tiny.write_hf(hf_directory)
    assert load(hf_directory).fingerprint != first


def test_converted_checkpoint_in_another_dtype_has_another_fingerprint(hf_directory, tmp_path):
    manifest = convert(hf_directory, tmp_path / "converted", progress=False)
    fingerprint = load(tmp_path / "converted", dtype="float32").fingerprint
    assert fingerprint != manifest.fingerprint
    assert len(bytes.fromhex(fingerprint)) == 32


def test_manifest_tells_its_story_and_no_path(hf_directory, tmp_path):
    manifest = convert(hf_directory, tmp_path / "converted", progress=False)
    assert Manifest.read(tmp_path / "converted") == manifest
    text = (tmp_path / "converted" / "manifest.json").read_text()
    assert str(tmp_path) not in text
    values = json.loads(text)
    assert (values["source_kind"], values["source_name"], values["dtype"]) == ("hf", "tiny", "bfloat16")
    assert values["hf_config"]["hidden_size"] == 64
    assert values["created"].endswith("+00:00")


def test_weights_beyond_float16_are_refused(tiny, tmp_path):
    tiny.weights["model.norm.weight"][0] = ml_dtypes.bfloat16(1e6)
    directory = tiny.write_hf(tmp_path / "large")
    convert(directory, tmp_path / "converted", progress=False)
    for path in (directory, tmp_path / "converted"):
        with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' holds values that float16 cannot"):
            load(path, dtype="float16")
    with pytest.raises(CheckpointError, match="float16"):
        convert(directory, tmp_path / "narrow", dtype="float16", progress=False)
    assert not list(tmp_path.glob("narrow*"))


def test_unknown_dtype_is_named(hf_directory, tmp_path):
    message = "dtype='int8': allowed are 'bfloat16', 'float32', 'float16'"
    check = importlib.import_module("jprefill.model.checkpoints.source").check_dtype
    with pytest.raises(ConfigError, match=message):
        check("int8")


def test_existing_destination_is_refused(hf_directory, tmp_path):
    convert(hf_directory, tmp_path / "converted", progress=False)
    with pytest.raises(CheckpointError, match="converted: exists already"):
        convert(hf_directory, tmp_path / "converted", progress=False)


def test_overwrite_spares_what_is_not_ours(hf_directory, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="thesis: is not a jprefill checkpoint"):
        convert(hf_directory, tmp_path / "thesis", overwrite=True, progress=False)
    assert (tmp_path / "thesis" / "chapter1.txt").read_text() == "years of work"


def test_failed_conversion_leaves_nothing(hf_directory, tmp_path):
    (hf_directory / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError):
        convert(hf_directory, tmp_path / "converted", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_relative_paths_work(tiny, hf_directory, tmp_path, monkeypatch):
    monkeypatch.chdir(hf_directory)
    convert(".", "../converted", progress=False)
    monkeypatch.chdir(tmp_path)
    assert load(Path("converted")).name == "converted"
    assert_same(load("converted").weights, tiny.weights)


def test_a_classifier_keeps_its_head(make_tiny, tmp_path):
    labels = {"0": "spam", "1": "ham", "2": "other"}
    tiny = make_tiny({"architectures": ["Qwen3ForSequenceClassification"], "id2label": labels, "pad_token_id": 257})
    convert(tiny.write_hf(tmp_path / "tiny"), tmp_path / "converted", progress=False)
    for path in ("tiny", "converted"):
        checkpoint = load(tmp_path / path)
        assert checkpoint.config == ModelConfig.from_hf(tiny.hf)
        assert checkpoint.config.class_head == ClassHead(("spam", "ham", "other"), is_exclusive=True, pad_id=257)
        np.testing.assert_array_equal(np.asarray(checkpoint.weights["score.weight"]), tiny.weights["score.weight"])
