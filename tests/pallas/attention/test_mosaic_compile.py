"""The Hopper kernel through the CUDA compiler, in the layer programs of real models. No GPU is needed."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from jprefill.planner.deviceless import compile_for, missing_packages
from jprefill.planner.jobs import CompileJob
from jprefill.planner.models import find_model
from jprefill.planner.ptxas import parse_reports
from jprefill.planner.targets import find_target

pytestmark = [
    pytest.mark.gpu_compile,
    pytest.mark.skipif(bool(missing_packages()), reason="the CUDA compiler is not installed: scripts/setup plan"),
]

LLAMA = find_model("llama-3.1-8b")
MODELS = {
    "4 query heads a KV head": LLAMA,
    "7 query heads a KV head": find_model("qwen2.5-7b"),
    "head_dim 64": find_model("smollm2-135m"),
    "head_dim 256": replace(LLAMA, num_heads=16, head_dim=256),
}


@pytest.fixture(scope="module")
def compiled():
    """(program reports of each model, what ptxas said of the kernels)."""
    jobs = [CompileJob(model, "stream", "mosaic", 1024, 2048, programs=("layer",)) for model in MODELS.values()]
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setenv("MOSAIC_GPU_DUMP_TO", folder)
        patch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
        reports = compile_for(find_target("h100"), jobs, keep_hlo=True)
        said = "".join(file.read_text() for file in sorted(Path(folder).glob("*.ptxas")))
    return dict(zip(MODELS, reports, strict=True)), parse_reports(said)


@pytest.mark.parametrize("model", MODELS)
def test_the_layer_program_calls_the_kernel(compiled, model):
    assert "mosaic_gpu" in compiled[0][model]["layer"].hlo


def test_no_register_is_spilled(compiled):
    kernels = [kernel for kernel in compiled[1] if "attend_mosaic" in kernel.name]
    assert len(kernels) == len(MODELS)
    assert not [kernel for kernel in kernels if kernel.spill_store_bytes or kernel.spill_load_bytes]


def test_scratch_memory_is_that_of_the_triton_kernel(compiled):
    [reports] = compile_for(
        find_target("h100"), [CompileJob(LLAMA, "stream", "triton", 1024, 2048, programs=("layer",))]
    )
    ours = compiled[0]["4 query heads a KV head"]["layer"].memory.temp_bytes
    assert ours <= reports["layer"].memory.temp_bytes + 4096  # the bounds of the blocks
