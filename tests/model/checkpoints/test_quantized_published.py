"""Checkpoints that others quantised: read for what they say, or refused by the name of what is not implemented."""

import json

import ml_dtypes
import numpy as np
import pytest

from jprefill.errors import CheckpointError, ConfigError, UnsupportedModelError
from jprefill.model.checkpoints import convert, load, open_source
from jprefill.model.quantized import Quantized, dequantize
from jprefill.model.weights import LM_HEAD, is_projection, scale_name

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
BLOCK = (32, 48)
ELEMENTS = {np.dtype(np.int8): "I8", FP8: "F8_E4M3", np.dtype(np.float32): "F32", np.dtype(ml_dtypes.bfloat16): "BF16"}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def compressed(kind="fp8", **weights):
    """A compressed-tensors config as llm-compressor writes it."""
    arguments = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    if kind == "int8":
        arguments["type"] = "int"
    group = {"targets": ["Linear"], "weights": arguments | weights, "input_activations": {"dynamic": True}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if kind == "fp8" else "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def write_safetensors(path, tensors):
    """By hand: the `safetensors` package has no NumPy type for F8_E4M3."""
    header, data = {}, b""
    for name, array in tensors.items():
        begin = len(data)
        data += array.tobytes()
        header[name] = {"dtype": ELEMENTS[array.dtype], "shape": list(array.shape), "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def spread(scale, shape, block=None):
    """The scale of every element."""
    if block is None:
        return np.broadcast_to(scale.reshape(-1, 1), shape)
    return np.repeat(np.repeat(scale, block[0], 0), block[1], 1)[: shape[0], : shape[1]]


@pytest.fixture
def publish(tiny, tmp_path):
    """Writes the tiny model quantised: returns the folder and the float32 matrices that it stands for."""

    def write(config, dtype=FP8, form="channel", ending="weight_scale", extra=None, key="quantization_config", more=()):
        rng = np.random.default_rng(7)
        directory = tiny.write_hf(tmp_path / "published")
        tensors, exact = {}, {}
        for name, array in tiny.weights.items():
            if not is_projection(name) and name not in more:
                tensors[name] = array
                continue
            rows, columns = array.shape
            shape = {
                "channel": (rows, 1),
                "flat": (rows,),
                "tensor": (1,),
                "scalar": (),
                "block": (-(-rows // BLOCK[0]), -(-columns // BLOCK[1])),
            }[form]
            scale = rng.uniform(0.01, 0.03, shape).astype(np.float32)
            full = spread(scale, array.shape, BLOCK if form == "block" else None)
            scaled = array.astype(np.float32) / full
            values = (np.rint(scaled).clip(-127, 127) if dtype == np.int8 else scaled.clip(-448, 448)).astype(dtype)
            tensors[name], tensors[name.removesuffix("weight") + ending] = values, scale
            exact[name] = values.astype(np.float32) * full
        tensors |= extra or {}
        write_safetensors(directory / "model.safetensors", tensors)
        (directory / "config.json").write_text(json.dumps(tiny.hf | {key: config}))
        return directory, exact

    return write


def matrices(checkpoint):
    return {
        name: dequantize(Quantized(np.asarray(array), np.asarray(checkpoint.weights[scale_name(name)])))
        for name, array in checkpoint.weights.items()
        if is_projection(name)
    }


@pytest.mark.parametrize(
    ("config", "kind", "dtype", "form", "ending"),
    [
        (compressed(), "fp8", FP8, "channel", "weight_scale"),
        (compressed(strategy="tensor"), "fp8", FP8, "tensor", "weight_scale"),
        (compressed("int8"), "int8", np.int8, "channel", "weight_scale"),
        (compressed("int8", strategy="tensor"), "int8", np.int8, "tensor", "weight_scale"),
        (PER_TENSOR, "fp8", FP8, "scalar", "weight_scale"),
        (PER_TENSOR, "fp8", FP8, "flat", "weight_scale"),
        (PER_TENSOR | {"weight_block_size": None}, "fp8", FP8, "scalar", "weight_scale_inv"),
    ],
)
def test_scales_per_channel_or_tensor_are_read_exactly(publish, tiny, tmp_path, config, kind, dtype, form, ending):
    directory, exact = publish(config, dtype, form, ending)
    convert(directory, tmp_path / "converted", progress=False)
    for checkpoint in (load(directory), load(directory, quantization=kind), load(tmp_path / "converted")):
        assert checkpoint.quantization == kind
        found = matrices(checkpoint)
        assert found.keys() == exact.keys()
        for name, matrix in exact.items():
            np.testing.assert_array_equal(found[name], matrix, err_msg=name)
        np.testing.assert_array_equal(np.asarray(checkpoint.weights[LM_HEAD]), tiny.weights[LM_HEAD])


@pytest.mark.parametrize(
    ("config", "ending"),
    [(BLOCKS, "weight_scale_inv"), (compressed(strategy="block", block_structure=list(BLOCK)), "weight_scale")],
)
def test_blocks_become_one_scale_per_channel_with_one_more_rounding(publish, config, ending):
    directory, exact = publish(config, form="block", ending=ending)
    checkpoint = load(directory)
    for name, matrix in matrices(checkpoint).items():
        step = np.asarray(checkpoint.weights[scale_name(name)])[:, None] * 2.0**-10
        assert (np.abs(matrix - exact[name]) <= np.maximum(np.abs(exact[name]) / 16, step) * (1 + 1e-5)).all()
        is_same = np.isclose(matrix, exact[name], rtol=1e-6, atol=0)
        assert is_same.mean() >= 0.25  # under the largest scale of their row


def test_a_scale_may_be_bfloat16(publish):
    name = "model.layers.0.mlp.up_proj"
    scale = np.full((96, 1), 0.5, ml_dtypes.bfloat16)
    directory, _ = publish(compressed(), extra={f"{name}.weight_scale": scale})
    np.testing.assert_array_equal(load(directory).weights[f"{name}.weight_scale"], np.full(96, 0.5, np.float32))


def test_scales_of_activations_and_of_the_cache_are_not_needed(publish):
    one = np.ones(1, np.float32)
    attention = "model.layers.0.self_attn"
    extra = {f"{attention}.q_proj.input_scale": one, f"{attention}.k_scale": one, f"{attention}.v_scale": one}
    extra[f"{attention}.o_proj.activation_scale"] = one
    assert load(publish(compressed(), extra=extra)[0]).quantization == "fp8"


def test_the_key_of_older_files_is_known(publish):
    assert load(publish(compressed(), key="compression_config")[0]).quantization == "fp8"


def test_a_quantised_head_is_dequantised_to_the_working_dtype(publish):
    directory, exact = publish(compressed(), more=[LM_HEAD])
    head = load(directory, dtype="float32").weights[LM_HEAD]
    np.testing.assert_array_equal(np.asarray(head), exact[LM_HEAD])


def test_a_converted_checkpoint_keeps_no_foreign_config(publish, tmp_path):
    manifest = convert(publish(compressed())[0], tmp_path / "converted", progress=False)
    assert "quantization_config" not in manifest.hf_config
    assert manifest.quantization == "fp8"


def test_a_projection_that_was_left_plain_is_refused_unless_asked_for(publish, tiny):
    name = "model.layers.1.self_attn.k_proj.weight"
    directory, _ = publish(compressed())
    rewrite(directory, {name: tiny.weights[name], scale_name(name): None})
    with pytest.raises(
        UnsupportedModelError, match=r"'model\.layers\.1\.self_attn\.k_proj\.weight' has dtype bfloat16 "
    ):
        load(directory)
    found = matrices(load(directory, quantization="fp8"))
    np.testing.assert_allclose(found[name], tiny.weights[name].astype(np.float32), rtol=1 / 16, atol=1e-4)


def rewrite(directory, changes):
    """The file again with tensors replaced or, where None, left out."""
    path = directory / "model.safetensors"
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    kinds = {element: dtype for dtype, element in ELEMENTS.items()}
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        begin, end = (start + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(data[begin:end], kinds[entry["dtype"]]).reshape(entry["shape"])
    write_safetensors(path, {n: a for n, a in (tensors | changes).items() if a is not None})


WEIGHT = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({scale_name(WEIGHT): None}, "has dtype F8_E4M3: F32, F16, BF16 are implemented"),
        ({scale_name(WEIGHT): np.ones((5, 1), np.float32)}, r"scale of '.*up_proj\.weight' has shape \(5, 1\)"),
        ({scale_name(WEIGHT): np.ones((3, 2), np.float32)}, r"go with a weight of shape \(96, 64\)"),
        ({scale_name(WEIGHT): np.ones((96, 1), np.int8)}, r"scale of '.*up_proj\.weight' has dtype I8"),
        ({scale_name(WEIGHT): np.full((96, 1), np.nan, np.float32)}, "negative or not finite"),
        ({scale_name(WEIGHT): np.full((96, 1), -1, np.float32)}, "negative or not finite"),
        ({WEIGHT: np.ones((96, 64), np.int8)}, "dtype I8, the quantization_config says F8_E4M3"),
        ({WEIGHT: np.ones((96, 64), np.float32)}, "has a scale and dtype F32"),
        ({WEIGHT: np.ones((64, 96), FP8)}, r"shape \(64, 96\)"),
        ({"model.layers.0.mlp.up_proj.weight_zero_point": np.ones(96, np.int8)}, "zero_point' is not part of"),
        ({"model.norm.weight": np.ones(64, FP8)}, r"'model\.norm\.weight' has dtype F8_E4M3"),
    ],
)
def test_values_and_scales_that_do_not_go_together_are_named(publish, changes, message):
    directory, _ = publish(compressed())
    rewrite(directory, changes)
    with pytest.raises(CheckpointError, match=message):
        load(directory)


def test_a_scale_of_another_block_is_named(publish):
    directory, _ = publish(BLOCKS | {"weight_block_size": [64, 64]}, form="block", ending="weight_scale_inv")
    with pytest.raises(CheckpointError, match=r"in blocks of \(64, 64\)"):
        load(directory)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method='gptq' is not implemented"),
        ({"quant_method": "awq"}, "quant_method='awq' is not implemented"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "quant_method='bitsandbytes'"),
        ({"quant_method": "mxfp4"}, "quant_method='mxfp4'"),
        ({"quant_method": "fbgemm_fp8"}, "quant_method='fbgemm_fp8'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_method='modelopt'"),
        ({"bits": 4}, "quant_method=None"),
        (["fp8"], "must be an object"),
        (BLOCKS | {"fmt": "e5m2"}, "fmt='e5m2' is not implemented"),
        (BLOCKS | {"weight_block_size": [128]}, "weight_block_size"),
        (BLOCKS | {"weight_block_size": [0, 128]}, "weight_block_size"),
        (compressed() | {"format": "pack-quantized"}, "format='pack-quantized' is not implemented"),
        (compressed() | {"format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized'"),
        (compressed() | {"format": None}, "format=None"),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config format='sparse-24"),
        (compressed() | {"transform_config": {"config_groups": {}}}, "transform_config is not implemented"),
        (compressed() | {"config_groups": {}}, "without config_groups"),
        (compressed() | {"config_groups": {"group_0": {"targets": ["Linear"]}}}, "group_0 without weights"),
        (compressed(num_bits=4), "group_0 weights num_bits=4 is not implemented: 8 is"),
        (compressed(type="int"), "group_0 weights type='int' is not implemented: 'float' is"),
        (compressed("int8", symmetric=False), "group_0 weights symmetric=False"),
        (compressed(strategy="group", group_size=128), "strategy='group' is not implemented"),
        (compressed(strategy="block"), "block_structure=None must be two whole numbers"),
    ],
)
def test_anything_else_is_refused_by_name(tiny, tmp_path, config, message):
    directory = tiny.write_hf(tmp_path / "tiny")
    (directory / "config.json").write_text(json.dumps(tiny.hf | {"quantization_config": config}))
    with pytest.raises(UnsupportedModelError, match=message):
        open_source(directory)


def test_groups_with_different_blocks_are_refused(tiny, tmp_path):
    config = compressed()
    config["config_groups"]["group_1"] = compressed(strategy="block", block_structure=[8, 8])["config_groups"][
        "group_0"
    ]
    directory = tiny.write_hf(tmp_path / "tiny")
    (directory / "config.json").write_text(json.dumps(tiny.hf | {"quantization_config": config}))
    with pytest.raises(UnsupportedModelError, match="with and without blocks"):
        open_source(directory)


def test_published_weights_are_not_quantised_in_another_way(publish):
    with pytest.raises(ConfigError, match="published is fp8 already"):
        load(publish(compressed())[0], quantization="int8")


def test_fingerprint_covers_how_the_scales_are_read(publish):
    directory, _ = publish(BLOCKS, form="block", ending="weight_scale_inv")
    first = load(directory).fingerprint
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [33, 49]  # cuts every matrix into as many blocks
    (directory / "config.json").write_text(json.dumps(config))
    assert load(directory).fingerprint != first
