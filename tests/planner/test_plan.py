"""The arithmetic of a plan, on programs whose memory is made up."""

from dataclasses import replace

import pytest

from jprefill.errors import ConfigError
from jprefill.planner.models import find_model
from jprefill.planner.plan import MAX_TOKENS, Planner, PlanRequest, make_plans, weights_bytes
from jprefill.planner.targets import find_target

MIB = 2**20
REQUEST = PlanRequest("llama-3.1-8b", find_model("llama-3.1-8b"), find_target("l4"), "triton")


@pytest.fixture(scope="module")
def plans(measure):
    return {plan.layout: plan for plan in make_plans(replace(REQUEST, max_model_len=16_384), measure)}


def test_weights_are_those_of_the_model():
    config = REQUEST.config
    assert weights_bytes(config, None) == 2 * 8_030_261_248
    head_and_norms = 2 * 128256 * 4096 + (2 * 32 + 1) * 4096
    scales = 32 * (4096 + 1024 * 2 + 4096 + 14336 * 2 + 4096)
    quantized = 8_030_261_248 - head_and_norms
    assert weights_bytes(config, "fp8") == 2 * head_and_norms + quantized + 4 * scales


def test_parts_sum_to_the_peak_and_the_device_is_never_exceeded(plans):
    for plan in plans.values():
        parts = ("weights", "activations", "kv", "rows", "scratch", "head")
        assert sum(getattr(plan, f"{part}_bytes") for part in parts) == plan.peak_bytes
        assert plan.peak_bytes + plan.prefix_pool_bytes + plan.reserve_bytes == plan.device_bytes
        assert plan.max_input_peak_bytes + plan.reserve_bytes <= plan.device_bytes
        assert plan.prefix_pool_tokens == plan.prefix_pool_bytes // (4096 * 32)


def test_parts_are_told_apart(plans):
    stream = plans["stream"]
    assert stream.activations_bytes == 16_384 * 8192
    assert stream.kv_bytes == 16_384 * 4096
    assert stream.rows_bytes == 16_384 * 20 + 4
    assert stream.scratch_bytes == 72 * MIB
    assert stream.head_bytes == 28 * MIB
    assert stream.reserve_bytes == 1_180_000_000 + 32 * MIB


def test_the_longest_input_is_the_last_that_fits(plans, measure):
    planner = Planner(REQUEST, measure)
    for layout, plan in plans.items():
        assert plan.max_input_tokens % plan.chunk_size == 0
        assert planner.pass_bytes(layout, plan.max_input_tokens) <= planner.budget_bytes
        assert planner.pass_bytes(layout, plan.max_input_tokens + plan.chunk_size) > planner.budget_bytes


def test_layouts_rank_as_they_should(plans):
    longest = {layout: plan.max_input_tokens for layout, plan in plans.items()}
    assert longest["stream"] > 3 * longest["whole-kv"]
    assert longest["stream"] > longest["hybrid"] > longest["full"]
    assert plans["whole-kv"].kv_bytes == 32 * plans["stream"].kv_bytes


def test_a_length_that_does_not_fit_is_refused_with_the_limit(plans, measure):
    limit = plans["stream"].max_input_tokens
    with pytest.raises(ConfigError, match=rf"max_model_len=600000 does not fit: .* at most {limit} tokens"):
        make_plans(replace(REQUEST, max_model_len=600_000), measure)
    with pytest.raises(ConfigError, match=f"max_model_len=0: must be 1 to {MAX_TOKENS}"):
        make_plans(replace(REQUEST, max_model_len=0), measure)


def test_a_model_that_does_not_fit_has_a_plan_without_tokens(measure):
    [plan, *_] = make_plans(replace(REQUEST, config=find_model("llama-3.3-70b")), measure)
    assert (plan.max_input_tokens, plan.max_model_len, plan.prefix_pool_tokens) == (0, 0, 0)
    assert plan.weights_bytes > plan.device_bytes


def test_quantised_weights_set_one_dequantised_matrix_aside(measure):
    plain, quantized = Planner(REQUEST, measure), Planner(replace(REQUEST, dtype="int8"), measure)
    assert quantized.reserve_bytes - plain.reserve_bytes == 14336 * 4096 * 2
    assert quantized.weights_bytes < 0.6 * plain.weights_bytes
