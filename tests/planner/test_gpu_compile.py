"""Every bucket x layout x attention implementation, compiled for L4, A100 and H100 by XLA's CUDA compiler.

No GPU is needed, only `scripts/setup dev plan`; without its packages all of this is skipped. About 240 programs, 2 s of
one core each.
"""

import math
from dataclasses import replace
from functools import cache

import pytest

from jprefill.config import default_buckets
from jprefill.model.memory import pass_bytes
from jprefill.model.weights import layer_shapes
from jprefill.planner.command import attention_for
from jprefill.planner.deviceless import CompileError, compile_for, missing_packages
from jprefill.planner.hlo import buffers_of, copies_of, has_known_trip_count
from jprefill.planner.jobs import CompileJob
from jprefill.planner.measured import Measurements
from jprefill.planner.models import find_model
from jprefill.planner.plan import PlanRequest, kv_bytes, make_plans
from jprefill.planner.targets import find_target

pytestmark = [
    pytest.mark.gpu_compile,
    pytest.mark.skipif(bool(missing_packages()), reason="the CUDA compiler is not installed: scripts/setup plan"),
    pytest.mark.timeout(1800),  # the first test of a GPU compiles for all of them
]

ATTENTION = {"l4": ["triton", "xla"], "a100-40": ["triton", "xla"], "h100": ["triton", "mosaic", "xla"]}
CHUNK_SIZE = {"l4": 1024, "a100-40": 2048, "h100": 2048}
PAIRS = [(gpu, attention) for gpu, names in ATTENTION.items() for attention in names]
LAYOUTS = ["stream", "hybrid", "full"]
FAMILIES = ["qwen2.5-7b", "qwen3-8b", "llama-3.2-1b", "smollm2-135m"]
MODEL = find_model("llama-3.1-8b")
SHAPES = layer_shapes(MODEL)
MIB, GIB = 2**20, 2**30
NUM_BLOCKS = 10_000  # of 16 tokens


def buckets(gpu):
    return default_buckets(131_072, CHUNK_SIZE[gpu])


def matrix_job(gpu, attention, layout, bucket):
    """What neither layout nor attention changes is compiled once; `read_8` is `read_64` with fewer rows."""
    is_last = bucket == buckets(gpu)[-1]
    programs = ("layer", "read_64") if layout == "stream" and is_last else ("layer",)
    if (layout, attention) == ("stream", "triton"):
        programs = () if is_last else ("embed", "layer", "fill_kv", "read_64")
    return CompileJob(MODEL, layout, attention, CHUNK_SIZE[gpu], bucket, programs=programs)


def read_job(gpu, layout):
    """Layouts that keep the whole of x read it without attention: the same for every implementation, and one bucket."""
    return replace(matrix_job(gpu, "triton", layout, 8192), programs=("read_8", "read_64"))


def quantized_job(gpu, quantization):
    job = matrix_job(gpu, "triton", "stream", 8192)
    return replace(job, quantization=quantization, programs=("layer",))


def family_job(gpu, model):
    job = matrix_job(gpu, "triton", "stream", 8192)
    return replace(job, config=find_model(model), programs=("layer", "read_64"))


def pool_job(gpu):
    """What moves blocks between a pool and the KV buffer, and between the pool and the host."""
    programs = ("load", "keep", "read_blocks", "write_blocks")
    return CompileJob(MODEL, "stream", "triton", CHUNK_SIZE[gpu], 32_768, programs=programs, num_blocks=NUM_BLOCKS)


@cache
def compiled_pool(gpu):
    """By name; a few seconds, where `compiled` takes minutes."""
    return compile_for(find_target(gpu), [pool_job(gpu)], keep_hlo=True)[0]


@cache
def compiled(gpu):
    """All programs of one GPU, by job."""
    jobs = [
        matrix_job(gpu, attention, layout, bucket)
        for attention in ATTENTION[gpu]
        for layout in LAYOUTS
        for bucket in buckets(gpu)
    ]
    jobs += [read_job(gpu, layout) for layout in LAYOUTS if layout != "stream"]
    jobs += [quantized_job(gpu, kind) for kind in ("int8", "fp8")] + [family_job(gpu, model) for model in FAMILIES]
    return dict(zip(jobs, compile_for(find_target(gpu), jobs, keep_hlo=True, with_kernels=True), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("gpu", "attention"), PAIRS)
def test_every_bucket_compiles_in_place(gpu, attention, layout):
    """x and the KV buffer come back where they were, and no weight is copied on the way."""
    weights = [shape for shape in SHAPES.values() if len(shape) == 2]
    for bucket in buckets(gpu):
        reports = compiled(gpu)[matrix_job(gpu, attention, layout, bucket)]
        layer = reports["layer"].memory
        buffers = bucket * MODEL.embed_dim * 2 + kv_bytes(MODEL, bucket)
        assert layer.alias_bytes == buffers
        assert layer.activation_bytes == buffers + bucket * 5 * 4 + 4
        for name, report in reports.items():
            assert not copies_of(report.hlo, weights), (name, bucket)


@pytest.mark.parametrize(("gpu", "attention"), PAIRS)
def test_stream_holds_one_chunk_whatever_the_bucket(gpu, attention):
    temps = []
    for bucket in buckets(gpu)[-2:]:
        reports = compiled(gpu)[matrix_job(gpu, attention, "stream", bucket)]
        hlo = reports["layer"].hlo
        kv_shape = (bucket, MODEL.num_kv_heads, MODEL.head_dim)
        assert not copies_of(hlo, [(bucket, MODEL.embed_dim), (bucket, kv_shape[1] * kv_shape[2]), kv_shape])
        assert not buffers_of(hlo, bucket * MODEL.mlp_dim)
        assert attention == "xla" or not has_known_trip_count(hlo)  # attend_xla has loops of its own
        temps.append(reports["layer"].memory.temp_bytes)
    assert max(temps) - min(temps) <= MIB
    assert max(temps) <= CHUNK_SIZE[gpu] * 80 * 1024


@pytest.mark.parametrize("gpu", ATTENTION)
def test_our_kernel_spills_nothing(gpu):
    kernels = [
        kernel
        for job, reports in compiled(gpu).items()
        for report in reports.values()
        for kernel in report.kernels
        if "attend_triton" in kernel.name
    ]
    assert len(kernels) >= len(LAYOUTS) * len(buckets(gpu))
    assert not [kernel for kernel in kernels if kernel.spill_store_bytes or kernel.spill_load_bytes]


@pytest.mark.parametrize("gpu", ATTENTION)
def test_131072_tokens_need_at_most_1_8_gib_beside_the_weights(gpu):
    reports = compiled(gpu)[matrix_job(gpu, "triton", "stream", 131_072)]
    assert pass_bytes({name: report.memory for name, report in reports.items()}) <= 1.8 * GIB


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize("gpu", ATTENTION)
def test_quantised_layers_hold_at_most_one_dequantised_matrix(gpu, quantization):
    """And their products come out in the working dtype, or in float32 for one matrix of the MLP at a time."""
    plain = compiled(gpu)[matrix_job(gpu, "triton", "stream", 8192)]["layer"].memory
    layer = compiled(gpu)[quantized_job(gpu, quantization)]["layer"].memory
    matrix_bytes = 2 * math.prod(SHAPES["mlp.up_proj.weight"])
    assert layer.weight_bytes < 0.51 * plain.weight_bytes
    assert layer.temp_bytes <= 2 * plain.temp_bytes + matrix_bytes


@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("gpu", ATTENTION)
def test_other_families_compile_in_place(gpu, model):
    job = family_job(gpu, model)
    layer = compiled(gpu)[job]["layer"].memory
    assert layer.alias_bytes == job.bucket * job.config.embed_dim * 2 + kv_bytes(job.config, job.bucket)


@pytest.mark.parametrize("gpu", ATTENTION)
def test_blocks_move_in_place(gpu):
    """The pool and the KV buffer come back where they were; nothing as large as either is made on the way."""
    job, reports = pool_job(gpu), compiled_pool(gpu)
    layer_bytes = kv_bytes(MODEL, NUM_BLOCKS * job.block_size)
    assert reports["load"].memory.alias_bytes == kv_bytes(MODEL, job.bucket)
    assert reports["keep"].memory.alias_bytes == layer_bytes
    assert reports["write_blocks"].memory.alias_bytes == layer_bytes * MODEL.num_layers
    heads = (MODEL.num_kv_heads, MODEL.head_dim)
    pool, buffer = (NUM_BLOCKS, job.block_size, *heads), (job.bucket, *heads)
    flat = [(size[0], math.prod(size[1:])) for size in (pool, buffer)]
    for name, report in reports.items():
        assert not copies_of(report.hlo, [pool, buffer, *flat]), name
        assert report.memory.temp_bytes <= 16 * MIB, name
        # What comes back in place is the result of an update: a scatter, or the loop around it.
        made = [i for i in buffers_of(report.hlo, math.prod(buffer)) if not _is_update(i)]
        assert not made, (name, *map(str, made))


def _is_update(instruction):
    return instruction.opcode == "scatter" or "scatter" in instruction.name


@pytest.mark.parametrize(
    ("model", "gpu", "dtype", "least"),
    [
        ("llama-3.1-8b", "l4", "bf16", 455_000),
        ("qwen2.5-32b", "a100-40", "fp8", 300_000),
        ("llama-3.3-70b", "h100", "fp8", 340_000),
    ],
)
def test_the_longest_input_is_3_5_times_the_papers(model, gpu, dtype, least, tmp_path):
    """PrefillOnly (arXiv 2505.07203) has 130k, 87k and 97k tokens. What a plan adds up by hand is checked too."""
    config, target = find_model(model), find_target(gpu)
    request = PlanRequest(
        model, config, target, attention_for(target, config, None), dtype, max_model_len=131_072, layouts=("stream",)
    )
    [plan] = make_plans(request, Measurements(target, tmp_path))
    assert plan.max_input_tokens >= least
    per_token = config.embed_dim * 2 + kv_bytes(config, 1) + 5 * 4
    by_hand = plan.weights_bytes + plan.max_input_tokens * per_token + plan.scratch_bytes
    assert plan.max_input_peak_bytes == pytest.approx(by_hand, rel=0.03)


def test_a_program_that_does_not_suit_is_refused_by_name():
    job = replace(matrix_job("l4", "triton", "stream", 1024), config=replace(MODEL, head_dim=512), programs=("layer",))
    with pytest.raises(CompileError, match=r"layer \(stream, triton, bucket 1024\) does not compile for l4: "):
        compile_for(find_target("l4"), [job])
