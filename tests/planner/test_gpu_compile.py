"""Every bucket x layout x attention implementation, compiled for L4, A100 and H100 by XLA's CUDA compiler.

No GPU is needed, only `scripts/setup dev plan`; without its packages all of this is skipped.
"""

import math
from dataclasses import replace
from functools import cache

import pytest

from jprefill.config import default_buckets
from jprefill.model.memory import pass_bytes
from jprefill.model.weights import layer_shapes
from jprefill.planner.deviceless import compile_for, missing_packages
from jprefill.planner.hlo import buffers_of, copies_of, has_known_trip_count
from jprefill.planner.jobs import CompileJob
from jprefill.planner.models import find_model
from jprefill.planner.plan import PlanRequest, kv_bytes
from jprefill.planner.targets import find_target

pytestmark = [
    pytest.mark.gpu_compile,
    pytest.mark.skipif(bool(missing_packages()), reason="the CUDA compiler is not installed: scripts/setup plan"),
    pytest.mark.timeout(600),  # the first test of a GPU compiles for all of them
]

GPUS = ["l4", "a100-40", "h100"]
ATTENTION = {"l4": ["triton", "xla"], "a100-40": ["triton", "xla"], "h100": ["triton", "mosaic", "xla"]}
PAIRS = [(gpu, attention) for gpu in GPUS for attention in ATTENTION[gpu]]
LAYOUTS = ["stream", "hybrid", "full"]
MODEL = find_model("llama-3.1-8b")
MIB = 2**20


def chunk_size(gpu):
    return PlanRequest("", MODEL, find_target(gpu), "").chunk_size


def buckets(gpu):
    return default_buckets(131_072, chunk_size(gpu))


@cache
def matrix(gpu):
    """All programs of one GPU by (attention, layout, bucket). What attention does not touch is compiled once."""
    jobs = [
        CompileJob(MODEL, layout, attention, chunk_size(gpu), bucket, programs=programs(layout, attention))
        for attention in ATTENTION[gpu]
        for layout in LAYOUTS
        for bucket in buckets(gpu)
    ]
    results = compile_for(find_target(gpu), jobs, keep_hlo=True, with_kernels=True)
    return {(job.attention, job.layout, job.bucket): reports for job, reports in zip(jobs, results, strict=True)}


def programs(layout, attention):
    if attention == "triton":
        return ()
    return ("layer", "read_8", "read_64") if layout == "stream" else ("layer",)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("gpu", "attention"), PAIRS)
def test_every_bucket_compiles_in_place(gpu, attention, layout):
    """x and the KV buffer come back where they were, and no weight, x or KV buffer is copied on the way."""
    weights = [shape for shape in layer_shapes(MODEL).values() if len(shape) == 2]
    for bucket in buckets(gpu):
        reports = matrix(gpu)[attention, layout, bucket]
        layer = reports["layer"].memory
        buffers = bucket * MODEL.embed_dim * 2 + kv_bytes(MODEL, bucket)
        assert layer.alias_bytes == buffers
        assert layer.activation_bytes == buffers + bucket * 5 * 4 + 4
        for name, report in reports.items():
            assert not copies_of(report.hlo, weights), name


@pytest.mark.parametrize(("gpu", "attention"), PAIRS)
def test_stream_holds_one_chunk_whatever_the_bucket(gpu, attention):
    shapes = {"x": MODEL.embed_dim, "kv": MODEL.num_kv_heads * MODEL.head_dim}
    temps = []
    for bucket in buckets(gpu)[-2:]:
        reports = matrix(gpu)[attention, "stream", bucket]
        hlo = reports["layer"].hlo
        whole = [(bucket, width) for width in shapes.values()] + [(bucket, MODEL.num_kv_heads, MODEL.head_dim)]
        assert not copies_of(hlo, whole)
        assert not buffers_of(hlo, bucket * MODEL.mlp_dim)
        assert not has_known_trip_count(hlo) or attention == "xla"
        temps.append(reports["layer"].memory.temp_bytes)
    assert temps[0] == temps[1] <= {1024: 80, 2048: 160}[chunk_size(gpu)] * MIB


@pytest.mark.parametrize("gpu", GPUS)
def test_our_kernel_spills_nothing(gpu):
    kernels = [
        kernel
        for (attention, _, _), reports in matrix(gpu).items()
        for report in reports.values()
        for kernel in report.kernels
        if attention == "triton" and "attend_triton" in kernel.name
    ]
    assert len(kernels) >= len(LAYOUTS) * len(buckets(gpu))
    assert not [kernel for kernel in kernels if kernel.spill_store_bytes or kernel.spill_load_bytes]


def test_131072_tokens_need_at_most_1_8_gib_beside_the_weights():
    for gpu in GPUS:
        memory = {name: report.memory for name, report in matrix(gpu)["triton", "stream", 131_072].items()}
        assert pass_bytes(memory) <= 1.8 * 2**30


@cache
def quantised(gpu, quantization):
    job = CompileJob(MODEL, "stream", "triton", chunk_size(gpu), 8192, quantization=quantization)
    [reports] = compile_for(find_target(gpu), [job], keep_hlo=True)
    return reports


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize("gpu", GPUS)
def test_quantised_layers_hold_at_most_one_dequantised_matrix(gpu, quantization):
    plain = matrix(gpu)["triton", "stream", 8192]["layer"].memory
    layer = quantised(gpu, quantization)["layer"].memory
    assert layer.weight_bytes < 0.51 * plain.weight_bytes
    assert layer.temp_bytes <= plain.temp_bytes * 2 + 2 * math.prod(layer_shapes(MODEL)["mlp.up_proj.weight"])


@pytest.mark.parametrize("model", ["qwen2.5-7b", "qwen3-8b", "llama-3.2-1b", "smollm2-135m"])
def test_other_families_compile_for_every_gpu(model):
    job = CompileJob(find_model(model), "stream", "triton", 1024, 4096)
    for gpu in GPUS:
        [reports] = compile_for(find_target(gpu), [job])
        assert set(reports) == {"embed", "layer", "fill_kv", "read_8", "read_64"}


def test_a_program_that_does_not_suit_is_refused_by_name():
    from jprefill.planner.deviceless import CompileError

    job = CompileJob(replace(MODEL, head_dim=512), "stream", "triton", 1024, 1024, programs=("layer",))
    with pytest.raises(CompileError, match=r"layer \(stream, triton, bucket 1024\) does not compile for l4: "):
        compile_for(find_target("l4"), [job])
