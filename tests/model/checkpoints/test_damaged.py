"""Damaged files: one CheckpointError that names the file and the tensor, never a crash or wrong weights."""

import contextlib
import json
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jprefill.errors import CheckpointError, UnsupportedModelError
from jprefill.model.checkpoints import convert, load, open_source
from jprefill.model.checkpoints.source import check_tensors

SHARD, INDEX = "model-00001.safetensors", "model.safetensors.index.json"
many = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def fails(path, *patterns):
    """Opening, loading and converting all end in the same error."""
    with pytest.raises(CheckpointError) as caught:
        load(path)
    message = caught.value.message
    assert "\n" not in message
    for pattern in patterns:
        assert pattern in message
    with pytest.raises(CheckpointError):
        convert(path, path.parent / "never", progress=False)
    assert not list(path.parent.glob("never*"))
    return message


def edit(path, **changes):
    """Writes the shard again with tensors replaced (or, None, left out)."""
    tensors = load_file(path) | changes
    save_file({name: array for name, array in tensors.items() if array is not None}, path)


def first_name(path):
    return next(iter(load_file(path)))


@pytest.fixture
def sharded(tiny, tmp_path):
    return tiny.write_hf(tmp_path / "sharded", 3)


def test_truncated_shard_names_the_tensor_that_is_cut(sharded):
    shard = sharded / SHARD
    shard.write_bytes(shard.read_bytes()[:-10])
    header_bytes = int.from_bytes(shard.read_bytes()[:8], "little")
    header = json.loads(shard.read_bytes()[8 : 8 + header_bytes])
    header.pop("__metadata__", None)
    last = max(header, key=lambda name: header[name]["data_offsets"][1])
    fails(sharded, SHARD, "truncated", repr(last))


def test_file_cut_between_opening_and_reading_is_noticed(hf_directory):
    source = open_source(hf_directory)
    path = hf_directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-40_000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor '.*' has \d+ of its \d+ bytes"):
        {name: source.read(name) for name in source.names()}


def test_missing_shard_is_named(sharded):
    (sharded / SHARD).unlink()
    fails(sharded, f"weight file {SHARD} is missing")


def test_missing_tensor_is_named(hf_directory):
    edit(hf_directory / "model.safetensors", **{"model.norm.weight": None})
    fails(hf_directory, "tensor 'model.norm.weight' is missing")


def test_many_missing_tensors_are_counted(hf_directory):
    config = json.loads((hf_directory / "config.json").read_text())
    (hf_directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    fails(hf_directory, "18 tensors (", "'model.layers.2.input_layernorm.weight'", "are missing")


def test_index_that_names_a_tensor_the_shard_lacks(sharded):
    name = first_name(sharded / SHARD)
    edit(sharded / SHARD, **{name: None})
    fails(sharded, SHARD, repr(name), INDEX)


def test_wrong_shape_is_named_with_both_shapes(hf_directory):
    edit(hf_directory / "model.safetensors", **{"model.norm.weight": np.ones(65, np.float32)})
    fails(
        hf_directory,
        "model.safetensors: tensor 'model.norm.weight' has shape (65,), the config asks for (64,)",
    )


def test_integer_weights_are_refused(hf_directory):
    edit(hf_directory / "model.safetensors", **{"model.norm.weight": np.ones(64, np.int8)})
    fails(
        hf_directory,
        "model.safetensors: tensor 'model.norm.weight' has dtype I8: F32, F16, BF16 are implemented",
    )


def test_float8_weights_are_refused(hf_directory):
    path = hf_directory / "model.safetensors"
    edit(path, **{"model.norm.weight": np.ones(64, np.uint8)})
    path.write_bytes(float8(path))
    fails(hf_directory, "tensor 'model.norm.weight' has dtype F8_E4M3")


def float8(path):
    """The same file with the U8 tensor declared as F8_E4M3."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].replace(b'"U8"', b'"F8_E4M3"')
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def test_unexpected_tensors_are_listed(hf_directory):
    extra = {f"model.layers.0.self_attn.{n}_norm.weight": np.ones(16, np.float32) for n in ("q", "k")}
    edit(hf_directory / "model.safetensors", **extra)
    message = fails(hf_directory, "2 tensors (", "are not part of LlamaForCausalLM", "model.safetensors")
    assert "'model.layers.0.self_attn.k_norm.weight', 'model.layers.0.self_attn.q_norm.weight'" in message


def test_unlisted_tensor_in_a_shard_is_unexpected_too(sharded):
    edit(sharded / SHARD, **{"model.adapter.weight": np.ones(3, np.float32)})
    fails(sharded, "'model.adapter.weight' is not part of", SHARD)


def test_unknown_architecture_is_refused(hf_directory):
    config = json.loads((hf_directory / "config.json").read_text())
    (hf_directory / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    with pytest.raises(UnsupportedModelError, match="architecture 'BertModel' is not implemented"):
        load(hf_directory)


def test_absurd_number_of_layers_is_refused_at_once(hf_directory):
    config = json.loads((hf_directory / "config.json").read_text())
    (hf_directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2**40}))
    fails(hf_directory, "tiny: 21 tensors cannot be the config's 1099511627776 layers")


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"a": NaN', "[" * 100_000])
def test_garbled_config_is_one_error(hf_directory, text):
    (hf_directory / "config.json").write_text(text)
    fails(hf_directory, "config.json")


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "no json"])
def test_garbled_index_is_one_error(sharded, text):
    (sharded / INDEX).write_text(text)
    fails(sharded, INDEX)


def test_index_cannot_point_outside_the_directory(sharded):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "../secret.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    fails(sharded, INDEX, "'model.norm.weight'", "'../secret.safetensors', which is no file name")


@pytest.mark.parametrize("length", [0, 2**63, 100_000_001, 7])
def test_wrong_header_length_is_one_error(hf_directory, length):
    path = hf_directory / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    fails(hf_directory, "model.safetensors", "header is damaged")


def rewrite_header(path, change):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {},
        {"dtype": "BF16", "shape": [64]},
        {"dtype": "BF16", "shape": [-64], "data_offsets": [0, 128]},
        {"dtype": "BF16", "shape": [64], "data_offsets": [128, 0]},
        {"dtype": "BF16", "shape": [64], "data_offsets": [0, 10**30]},
        {"dtype": "BF16", "shape": [64.0], "data_offsets": [0, 128]},
        {"dtype": "BF16", "shape": [32], "data_offsets": [0, 128]},
        {"dtype": 7, "shape": [64], "data_offsets": [0, 128]},
    ],
)
def test_impossible_header_entry_names_the_tensor(hf_directory, entry):
    path = hf_directory / "model.safetensors"
    rewrite_header(path, lambda header: header.__setitem__("model.norm.weight", entry))
    fails(hf_directory, "model.safetensors: the safetensors header is damaged", "'model.norm.weight'")


def test_two_tensors_on_the_same_bytes_are_refused(hf_directory):
    def share(header):
        header["model.norm.weight"] = header["model.layers.0.input_layernorm.weight"]

    rewrite_header(hf_directory / "model.safetensors", share)
    fails(hf_directory, "model.safetensors")


def test_bytes_after_the_last_tensor_are_refused(hf_directory):
    with (hf_directory / "model.safetensors").open("ab") as file:
        file.write(b"more")
    fails(hf_directory, "model.safetensors: 4 bytes follow the last tensor")


def test_directory_without_weights_says_so(hf_directory):
    (hf_directory / "model.safetensors").rename(hf_directory / "pytorch_model.bin")
    fails(hf_directory, "tiny: holds no safetensors file")
    (hf_directory / "pytorch_model.bin").unlink()
    (hf_directory / "config.json").unlink()
    fails(hf_directory, "tiny: holds neither manifest.json, nor config.json, nor a .gguf file")


def test_single_file_of_another_name_is_found(tiny, hf_directory):
    (hf_directory / "model.safetensors").rename(hf_directory / "weights.safetensors")
    assert len(load(hf_directory).weights) == len(tiny.weights)
    shutil.copy(hf_directory / "weights.safetensors", hf_directory / "more.safetensors")
    fails(hf_directory, "tiny: holds 2 safetensors files and no model.safetensors.index.json")


@pytest.mark.parametrize("name", ["weights.bin", "weights.safetensors", "weights.pt"])
def test_other_files_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x80\x04")
    fails(tmp_path / name, f"{name}: is a file: of single files only .gguf is read")


@many
@given(data=st.data())
def test_safetensors_cut_anywhere_is_refused(hf_directory, data):
    path = hf_directory / "model.safetensors"
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            open_source(hf_directory)
    finally:
        path.write_bytes(whole)


@many
@given(data=st.data())
def test_flipped_header_byte_never_crashes_safetensors(hf_directory, data):
    path = hf_directory / "model.safetensors"
    whole = path.read_bytes()
    position = data.draw(st.integers(0, 7 + int.from_bytes(whole[:8], "little")))
    damaged = bytearray(whole)
    damaged[position] ^= data.draw(st.integers(1, 255))
    try:
        path.write_bytes(damaged)
        opens_or_refuses(hf_directory)
    finally:
        path.write_bytes(whole)


def opens_or_refuses(path):
    with contextlib.suppress(CheckpointError):
        check_tensors(open_source(path))


@pytest.fixture
def gguf_file(tiny, tmp_path):
    tiny.write_gguf(tmp_path / "tiny.gguf", "Q4_1")
    return tmp_path / "tiny.gguf"


@many
@given(data=st.data())
def test_gguf_cut_anywhere_is_refused(gguf_file, data):
    whole = gguf_file.read_bytes()
    # The writer pads the end of the file to 32 bytes; without that padding no tensor is hurt.
    length = data.draw(st.integers(0, len(whole) - 32))
    cut = gguf_file.with_name("cut.gguf")
    cut.write_bytes(whole[:length])
    with pytest.raises(CheckpointError, match=r"cut\.gguf"):
        open_source(cut)


@many
@given(data=st.data())
def test_flipped_header_byte_never_crashes_gguf(gguf_file, data):
    damaged = bytearray(gguf_file.read_bytes())
    position = data.draw(st.integers(0, 8000))
    damaged[position] ^= data.draw(st.integers(1, 255))
    flipped = gguf_file.with_name("flipped.gguf")
    flipped.write_bytes(damaged)
    opens_or_refuses(flipped)


def test_truncated_gguf_names_the_tensor(gguf_file):
    gguf_file.write_bytes(gguf_file.read_bytes()[:-100])
    fails(gguf_file, "tiny.gguf: the GGUF header is damaged or truncated: tensor 'output.weight' ends at byte")


@pytest.mark.parametrize("data", [b"", b"GG", b"GGUF", b"GGUF" + bytes(20), b"GGUF\x00\x00\x00\x03" + bytes(16)])
def test_no_gguf_is_one_error(tmp_path, data):
    (tmp_path / "x.gguf").write_bytes(data)
    fails(tmp_path / "x.gguf", "x.gguf: ", "truncated")


@pytest.fixture
def converted(hf_directory, tmp_path):
    convert(hf_directory, tmp_path / "converted", progress=False)
    return tmp_path / "converted"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "format_version=2: 1 is read"),
        ({"dtype": "int4"}, "dtype='int4'"),
        ({"fingerprint": "abc"}, "fingerprint='abc' is no SHA-256"),
        ({"hf_config": []}, "hf_config=[] has the wrong type"),
        ({"name": None}, "name=None has the wrong type"),
        ({"source_kind": "torch"}, "source_kind='torch'"),
        ({"tokenizer_files": [1]}, "tokenizer_files must be file names"),
        ({"extra": 1}, "key 'extra' is unknown"),
        ({"dtype": "float32"}, "has dtype bfloat16, the manifest says float32"),
    ],
)
def test_garbled_manifest_is_named(converted, change, message):
    values = json.loads((converted / "manifest.json").read_text())
    (converted / "manifest.json").write_text(json.dumps(values | change))
    fails(converted, message)


def test_manifest_without_a_key_is_refused(converted):
    values = json.loads((converted / "manifest.json").read_text())
    del values["fingerprint"]
    (converted / "manifest.json").write_text(json.dumps(values))
    fails(converted, "manifest.json: key 'fingerprint' is missing")


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_manifest_that_is_no_json_is_refused(converted, text):
    (converted / "manifest.json").write_text(text)
    fails(converted, "manifest.json")


def test_directory_without_manifest_is_no_checkpoint(converted):
    (converted / "manifest.json").unlink()
    fails(converted, "converted: holds neither manifest.json")


def test_config_that_does_not_fit_the_weights_is_refused(converted):
    values = json.loads((converted / "manifest.json").read_text())
    values["hf_config"]["intermediate_size"] = 128
    (converted / "manifest.json").write_text(json.dumps(values))
    fails(converted, "weights: tensor 'model.layers.0.mlp.gate_proj.weight' has shape (96, 64)", "(128, 64)")


def test_damaged_orbax_file_never_loads_wrong_weights(converted, tiny):
    files = sorted(path for path in (converted / "weights").rglob("*") if path.is_file())
    assert len(files) > 5
    num_refused = 0
    for path in files:
        whole = path.read_bytes()
        for damage in (None, b"", whole[: len(whole) // 2], whole[:-1]):
            path.unlink() if damage is None else path.write_bytes(damage)
            num_refused += refused_or_right(converted, tiny.weights)
            path.write_bytes(whole)
    assert num_refused >= 2 * len(files)


@pytest.mark.parametrize("name", ["_METADATA", "manifest.ocdbt"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_scrambled_orbax_metadata_is_one_error(converted, name):
    path = next((converted / "weights").rglob(name))
    path.write_bytes(b"{" * path.stat().st_size)
    fails(converted, "weights: ")


def refused_or_right(directory, expected):
    try:
        weights = load(directory).weights
    except CheckpointError:
        return True
    for name, array in expected.items():
        np.testing.assert_array_equal(np.asarray(weights[name]).view(np.uint16), array.view(np.uint16))
    return False
