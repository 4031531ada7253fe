"""Weight-only quantisation: its error, the product that uses it, and a whole model that runs on it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np
from tiny import CONFIG, SETTINGS, UNTIED, make_model, prompt, tokens, whole_piece

from jprefill.errors import CheckpointError, ConfigError
from jprefill.model import quantized
from jprefill.model.layer import linear
from jprefill.model.llama import flatten
from jprefill.model.quantized import QUANTIZED_DTYPES, Quantized, dequantize, from_blocks, kind_of, quantize
from jprefill.model.runner import Runner
from jprefill.model.weights import is_projection, layer_leaves, quantization_of, scale_name, weight_leaves
from jprefill.scheduler.packer import pack, unpack

KINDS = ["int8", "fp8"]
ULP = 2.0**-22  # room for the float32 division and multiplication
matrices = st_np.arrays(
    np.float32,
    st_np.array_shapes(min_dims=2, max_dims=2, max_side=9),
    elements=st.floats(-(2.0**100), 2.0**100, width=32),
)


def error_of(weight, held):
    return np.abs(dequantize(held).astype(np.float64) - weight.astype(np.float64))


@given(matrices)
@settings(deadline=None)
def test_int8_is_off_by_at_most_half_a_scale(weight):
    held = quantize(weight, "int8", "w")
    assert (held.values.dtype, held.scale.dtype) == (np.int8, np.float32)
    assert (error_of(weight, held) <= held.scale[:, None].astype(np.float64) * (0.5 + 127 * ULP)).all()


@given(matrices)
@settings(deadline=None)
def test_fp8_is_off_by_a_sixteenth_or_by_half_its_smallest_step(weight):
    held = quantize(weight, "fp8", "w")
    assert held.values.dtype == ml_dtypes.float8_e4m3fn
    bound = np.maximum(np.abs(weight.astype(np.float64)) / 16, held.scale[:, None].astype(np.float64) * 2.0**-10)
    assert (error_of(weight, held) <= bound * (1 + 4 * ULP) + np.abs(weight) * ULP).all()


@given(matrices, st.sampled_from(KINDS))
@settings(deadline=None)
def test_a_row_spans_the_whole_grid_or_is_zero(weight, kind):
    values = quantize(weight, kind, "w").values.astype(np.float32)
    largest = np.abs(values).max(axis=1)
    is_tiny = np.abs(weight).max(axis=1) < 448 * np.finfo(np.float32).tiny
    assert np.isin(largest[~is_tiny], [127.0 if kind == "int8" else 448.0]).all()
    assert np.isfinite(values).all()
    assert (values[(weight == 0).all(axis=1)] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_rows_are_independent_of_each_other_and_of_slabs(kind, dtype, monkeypatch):
    weight = (np.random.default_rng(0).standard_normal((13, 40)) * 0.02).astype(dtype)
    whole = quantize(weight, kind, "w")
    monkeypatch.setattr(quantized, "_SLAB_SIZE", 100)
    for values, scale in (quantize(weight, kind, "w"), quantize(weight[5:], kind, "w")):
        np.testing.assert_array_equal(values.view(np.uint8), whole.values[-len(values) :].view(np.uint8))
        np.testing.assert_array_equal(scale, whole.scale[-len(scale) :])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_values_that_are_not_finite_are_refused(kind, value):
    weight = np.ones((3, 4), np.float32)
    weight[1, 2] = value
    with pytest.raises(CheckpointError, match=r"tensor 'model\.x' holds values that are not finite"):
        quantize(weight, kind, "model.x")


def fp8_blocks(rng, shape, block, scales):
    values = rng.standard_normal(shape).astype(np.float32) * 100
    values = values.astype(ml_dtypes.float8_e4m3fn)
    counts = [-(-size // step) for size, step in zip(shape, block, strict=True)]
    scale = rng.choice(scales, counts).astype(np.float32)
    spread = np.repeat(np.repeat(scale, block[0], 0), block[1], 1)[: shape[0], : shape[1]]
    return values, scale, values.astype(np.float32) * spread, spread


@pytest.mark.parametrize("shape", [(8, 12), (9, 13), (3, 4), (1, 1)])
def test_blocks_whose_scales_differ_by_powers_of_two_keep_every_bit(shape):
    values, scale, weight, _ = fp8_blocks(np.random.default_rng(1), shape, (4, 6), [0.01, 0.02, 0.005])
    values[np.abs(values.astype(np.float32)) < 1] = 0  # else a smaller scale would fall below 2^-9
    weight[values.astype(np.float32) == 0] = 0
    held = from_blocks(values, scale, (4, 6), "fp8")
    np.testing.assert_array_equal(dequantize(held), weight)


def test_blocks_with_any_scales_are_rounded_once_more_at_most():
    scales = [0.011, 0.02, 0.0137, 0.003]
    values, scale, weight, spread = fp8_blocks(np.random.default_rng(2), (33, 70), (8, 16), scales)
    held = from_blocks(values, scale, (8, 16), "fp8")
    is_largest = spread == spread.max(axis=1, keepdims=True)
    np.testing.assert_array_equal(held.values[is_largest].view(np.uint8), values[is_largest].view(np.uint8))
    bound = np.maximum(np.abs(weight) / 16, held.scale[:, None] * 2.0**-10) * (1 + 8 * ULP)
    assert (np.abs(dequantize(held) - weight) <= bound).all()


def test_rows_of_blocks_without_scale_are_zero():
    held = from_blocks(np.ones((2, 3), np.int8), np.zeros((1, 2), np.float32), (2, 2), "int8")
    assert (dequantize(held) == 0).all()


def product(x, held, dtype, bias=None):
    leaves = {"p.weight": jnp.asarray(held.values), "p.weight_scale": jnp.asarray(held.scale)}
    if bias is not None:
        leaves["p.bias"] = jnp.asarray(bias, dtype)
    return linear(jnp.asarray(x, dtype), leaves, "p")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_product_equals_that_of_the_dequantised_matrix(kind, dtype):
    rng = np.random.default_rng(3)
    x = np.asarray(jnp.asarray(rng.standard_normal((7, 200)), dtype)).astype(np.float64)
    held = quantize(rng.standard_normal((30, 200)).astype(np.float32) * 5, kind, "w")
    out = product(x, held, dtype)
    assert out.dtype == dtype
    exact = x @ dequantize(held).astype(np.float64).T
    step = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=step / 2, atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_float16_sums_may_pass_its_range_before_they_are_scaled(kind):
    held = quantize(np.full((1, 64), 0.01, np.float32), kind, "w")
    out = product(np.full((1, 64), 300.0), held, "float16")  # 64 * 300 * 127 = 2.4e6 before the scale
    assert float(out[0, 0]) == pytest.approx(192, rel=1e-3)


def test_bias_is_added_after_the_scale():
    held = Quantized(np.ones((2, 3), np.int8), np.array([0.5, 2.0], np.float32))
    np.testing.assert_array_equal(product(np.ones((1, 3)), held, "float32", [10, 20]), [[11.5, 26.0]])


def quantized_weights(weights, kind):
    result = {}
    for name, array in weights.items():
        if is_projection(name):
            held = quantize(np.asarray(array), kind, name)
            result |= {name: jnp.asarray(held.values), scale_name(name): jnp.asarray(held.scale)}
        else:
            result[name] = array
    return result


def dequantized_twin(config, weights):
    """The plain module, its projections multiplied out."""
    model = make_model(config)
    flat = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    for path, leaf in flat.items():
        name = ".".join(map(str, path))
        array = weights[name]
        if scale_name(name) in weights:
            array = jnp.asarray(dequantize(Quantized(np.asarray(array), np.asarray(weights[scale_name(name)]))))
        flat[path] = leaf.replace(array)
    nnx.update(model, nnx.from_flat_state(flat))
    return model


def exact(model, token_ids):
    return np.asarray(jax.nn.log_softmax(model(jnp.asarray(token_ids))[-1]))


def run(config, weights, request, **changes):
    piece = whole_piece(request)
    runner = Runner(config, weights, replace(SETTINGS, **changes), (256,))
    [[item]] = unpack([piece], runner.run(pack([piece], 256)))
    return item


@pytest.mark.parametrize(
    ("config", "kind", "layout", "mean", "largest"),
    [(CONFIG, "int8", "full", 0.02, 0.1), (UNTIED, "fp8", "stream", 0.12, 0.6)],
    ids=["tied-int8-full", "untied-biased-llama3-fp8-stream"],
)
def test_a_model_runs_as_its_dequantised_twin_and_near_the_original(config, kind, layout, mean, largest):
    """Random weights: every direction counts, so the distance is larger than a trained model's."""
    original = make_model(config)
    weights = quantized_weights(flatten(original), kind)
    token_ids = tokens(np.random.default_rng(4), 150)
    item = run(config, weights, prompt(token_ids, ids=tuple(range(300))), layout=layout)
    np.testing.assert_allclose(item.logprobs[0], exact(dequantized_twin(config, weights), token_ids), atol=5e-5)
    difference = np.abs(item.logprobs[0] - exact(original, token_ids))
    assert 0 < difference.mean() < mean
    assert difference.max() < largest


def test_a_quantised_model_runs_in_bfloat16():
    token_ids = tokens(np.random.default_rng(5), 200)
    narrow = {name: array.astype("bfloat16") for name, array in flatten(make_model()).items()}
    weights = quantized_weights(narrow, "int8")
    item = run(CONFIG, weights, prompt(token_ids, ids=tuple(range(300))), dtype="bfloat16", layout="full")
    np.testing.assert_allclose(item.logprobs[0], exact(make_model(), token_ids), atol=0.2)


def test_leaves_of_a_layer_have_the_dtypes_of_the_arrays():
    weights = quantized_weights(flatten(make_model(UNTIED)), "fp8")
    leaves = weight_leaves(UNTIED, np.dtype(np.float32), "fp8")
    assert {name: (array.shape, array.dtype) for name, array in weights.items()} == {
        name: (leaf.shape, leaf.dtype) for name, leaf in leaves.items()
    }
    assert sum(leaf.num_bytes for leaf in leaves.values()) == sum(array.nbytes for array in weights.values())
    assert quantization_of(weights) == "fp8"
    layer = layer_leaves(UNTIED, np.dtype(np.float32), "fp8")
    assert [name for name, leaf in layer.items() if leaf.dtype == QUANTIZED_DTYPES["fp8"]] == [
        f"{part}.weight"
        for part in (
            *(f"self_attn.{p}_proj" for p in "qkvo"),
            *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
        )
    ]


def test_kinds_are_told_by_dtype():
    assert [kind_of(QUANTIZED_DTYPES[kind]) for kind in KINDS] == KINDS
    assert kind_of(np.dtype(np.float32)) is None


def test_a_runner_refuses_weights_of_another_kind_than_its_settings():
    with pytest.raises(ConfigError, match="quantization='int8': the weights came as None"):
        run(CONFIG, flatten(make_model()), prompt(np.zeros(1, np.int32)), quantization="int8")
