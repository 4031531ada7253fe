"""Every entry of the tile table through the CUDA compiler, in small layer programs. No GPU is needed.

Llama's own shapes, 4 and 7 heads a KV head, are in `tests/planner/test_gpu_compile.py`.
"""

from dataclasses import replace

import pytest

from jprefill.planner.deviceless import compile_for, missing_packages
from jprefill.planner.jobs import CompileJob
from jprefill.planner.models import find_model
from jprefill.planner.targets import find_target

pytestmark = [
    pytest.mark.gpu_compile,
    pytest.mark.skipif(bool(missing_packages()), reason="the CUDA compiler is not installed: scripts/setup plan"),
]

SMALL = replace(find_model("llama-3.1-8b"), vocab_size=512, embed_dim=256, mlp_dim=512)
# (heads, KV heads, head_dim, dtype): each head size, and 1 to 8 heads that share a KV head.
HEADS = [
    (9, 3, 64, "bfloat16"),
    (32, 4, 64, "float16"),
    (8, 8, 80, "bfloat16"),
    (16, 4, 96, "bfloat16"),
    (8, 8, 128, "bfloat16"),
    (32, 4, 128, "float16"),
    (8, 4, 256, "bfloat16"),
    (8, 4, 64, "float32"),
    (8, 2, 128, "float32"),
    (8, 4, 256, "float32"),
]
PROGRAMS = ("layer", "read_8")  # the large tiles, and those for few rows


def job(num_heads, num_kv_heads, head_dim, dtype):
    config = replace(SMALL, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    return CompileJob(config, "stream", "triton", 1024, 2048, dtype=dtype, programs=PROGRAMS)


@pytest.mark.parametrize("gpu", ["l4", "a100-40", "h100"])
def test_every_tile_compiles_without_a_spilled_register(gpu):
    reports = compile_for(find_target(gpu), [job(*heads) for heads in HEADS], with_kernels=True)
    kernels = {
        (heads, name): [kernel for kernel in report.kernels if "attend_triton" in kernel.name]
        for heads, programs in zip(HEADS, reports, strict=True)
        for name, report in programs.items()
    }
    assert [len(found) for found in kernels.values()] == [1] * len(PROGRAMS) * len(HEADS)
    assert not {key: found for key, found in kernels.items() if found[0].spill_store_bytes or found[0].spill_load_bytes}
