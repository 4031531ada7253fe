"""Quantising while converting and while loading: the same arrays, one identity, no second copy."""

import json

import jax
import numpy as np
import pytest

from jprefill.errors import CheckpointError, ConfigError
from jprefill.model.checkpoints import Manifest, convert, load, loading, open_source
from jprefill.model.checkpoints.source import DTYPES, check_quantization
from jprefill.model.quantized import quantize
from jprefill.model.weights import is_projection, scale_name, weight_leaves

KINDS = ["int8", "fp8"]


def expected_arrays(weights, kind, dtype="bfloat16"):
    result = {}
    for name, array in weights.items():
        if is_projection(name):
            result[name], result[scale_name(name)] = quantize(array, kind, name)
        else:
            result[name] = array.astype(DTYPES[dtype])
    return result


def assert_same(weights, expected):
    assert list(weights) == list(expected)
    for name, array in expected.items():
        found = np.asarray(weights[name])
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found.view(np.uint8), array.view(np.uint8), err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_checkpoint_is_quantised_while_it_loads(tiny, hf_directory, kind):
    checkpoint = load(hf_directory, quantization=kind)
    assert checkpoint.quantization == kind
    assert_same(checkpoint.weights, expected_arrays(tiny.weights, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_converting_quantises_and_loading_keeps_it(tiny, hf_directory, tmp_path, kind):
    manifest = convert(hf_directory, tmp_path / "small", quantization=kind, progress=False)
    assert (manifest.quantization, manifest.dtype) == (kind, "bfloat16")
    assert Manifest.read(tmp_path / "small") == manifest
    for asked in (None, kind):
        checkpoint = load(tmp_path / "small", quantization=asked)
        assert_same(checkpoint.weights, expected_arrays(tiny.weights, kind))
        assert (checkpoint.quantization, checkpoint.fingerprint) == (kind, manifest.fingerprint)


@pytest.mark.parametrize("kind", KINDS)
def test_the_other_weights_still_take_any_dtype(tiny, hf_directory, tmp_path, kind):
    manifest = convert(hf_directory, tmp_path / "small", quantization=kind, progress=False)
    checkpoint = load(tmp_path / "small", dtype="float32")
    assert_same(checkpoint.weights, expected_arrays(tiny.weights, kind, "float32"))
    assert checkpoint.fingerprint != manifest.fingerprint


def test_a_converted_plain_checkpoint_is_quantised_while_it_loads_or_is_converted_again(tiny, hf_directory, tmp_path):
    convert(hf_directory, tmp_path / "plain", progress=False)
    assert_same(load(tmp_path / "plain", quantization="int8").weights, expected_arrays(tiny.weights, "int8"))
    again = convert(tmp_path / "plain", tmp_path / "small", quantization="int8", progress=False)
    direct = convert(hf_directory, tmp_path / "direct", quantization="int8", progress=False)
    assert again.fingerprint == direct.fingerprint
    copy = convert(tmp_path / "small", tmp_path / "copy", progress=False)
    assert (copy.quantization, copy.fingerprint) == ("int8", direct.fingerprint)


def test_gguf_is_quantised_from_its_dequantised_values(tiny, tmp_path):
    held = tiny.write_gguf(tmp_path / "tiny.gguf", "Q8_0")
    expected = expected_arrays({name: held[name] for name in tiny.weights}, "fp8")
    assert_same(load(tmp_path / "tiny.gguf", quantization="fp8").weights, expected)


def test_every_form_has_a_fingerprint_of_its_own(hf_directory, tmp_path):
    in_place = [load(hf_directory, quantization=kind).fingerprint for kind in (None, *KINDS)]
    converted = [
        convert(hf_directory, tmp_path / str(kind), quantization=kind, progress=False).fingerprint
        for kind in (None, *KINDS)
    ]
    on_the_way = [load(tmp_path / "None", quantization=kind).fingerprint for kind in KINDS]
    assert len({*in_place, *converted, *on_the_way}) == 8


def test_one_changed_scale_changes_the_fingerprint(tiny, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    first = convert(tiny.write_hf(tmp_path / "a"), tmp_path / "ca", quantization="int8", progress=False)
    tiny.weights[name][0] *= tiny.weights[name].dtype.type(2)  # the same values under twice the scale
    second = convert(tiny.write_hf(tmp_path / "b"), tmp_path / "cb", quantization="int8", progress=False)
    np.testing.assert_array_equal(load(tmp_path / "ca").weights[name], load(tmp_path / "cb").weights[name])
    assert first.fingerprint != second.fingerprint


def test_loading_compiles_nothing_and_never_sends_a_plain_projection(hf_directory, monkeypatch):
    sent = []
    put = jax.device_put

    def record(array, sharding):
        sent.append(array)
        return put(array, sharding)

    monkeypatch.setattr(loading.jax, "device_put", record)
    compiles = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiles.append(event) if "backend_compile" in event else None
    )
    checkpoint = load(hf_directory, quantization="int8")
    assert not compiles
    leaves = weight_leaves(checkpoint.config, DTYPES["bfloat16"], "int8")
    assert [array.dtype for array in sent] == [leaf.dtype for leaf in leaves.values()]


@pytest.mark.parametrize(("stored", "asked"), [("int8", "fp8"), ("fp8", "int8")])
def test_quantised_weights_are_not_quantised_in_another_way(hf_directory, tmp_path, stored, asked):
    convert(hf_directory, tmp_path / "small", quantization=stored, progress=False)
    message = f"quantization='{asked}': small is {stored} already; start from the original weights"
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "small", quantization=asked)
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path / "small", tmp_path / "other", quantization=asked, progress=False)
    assert not list(tmp_path.glob("other*"))


def test_unknown_quantisation_is_named(hf_directory):
    with pytest.raises(ConfigError, match="quantization='int4': allowed are 'int8', 'fp8'"):
        check_quantization(open_source(hf_directory), "int4")


def test_weights_that_are_not_finite_are_refused_by_name(tiny, tmp_path):
    tiny.weights["model.layers.0.mlp.up_proj.weight"][3, 4] = np.inf
    directory = tiny.write_hf(tmp_path / "bad")
    with pytest.raises(
        CheckpointError, match=r"'model\.layers\.0\.mlp\.up_proj\.weight' holds values that are not fin"
    ):
        load(directory, quantization="int8")


def test_manifest_without_the_key_is_one_of_plain_weights(tiny, hf_directory, tmp_path):
    convert(hf_directory, tmp_path / "old", progress=False)
    path = tmp_path / "old" / "manifest.json"
    values = json.loads(path.read_text())
    del values["quantization"]
    path.write_text(json.dumps(values))
    assert load(tmp_path / "old").quantization is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("int4", "quantization='int4': int8, fp8 are read"),
        (8, "quantization=8 has the wrong type"),
        ("fp8", "has dtype int8, the manifest says float8_e4m3fn"),
        (None, r"tensor '.*_proj\.weight' has dtype int8, the manifest says bfloat16|weight_scale.* not part of"),
    ],
)
def test_a_manifest_that_contradicts_the_weights_is_refused(hf_directory, tmp_path, value, message):
    convert(hf_directory, tmp_path / "small", quantization="int8", progress=False)
    path = tmp_path / "small" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization": value}))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "small")


def test_a_scale_that_is_missing_is_named(hf_directory, tmp_path):
    name = "model.layers.0.mlp.up_proj.weight_scale"
    convert(hf_directory, tmp_path / "small", quantization="int8", progress=False)
    source = open_source(tmp_path / "small")
    del source._metadata[name]
    with pytest.raises(CheckpointError, match=f"tensor '{name}' is missing"):
        source.dtype(name.removesuffix("_scale"))
