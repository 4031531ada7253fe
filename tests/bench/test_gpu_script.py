"""`bench/gpu/run.sh`: the tiny run end to end, a child that dies or hangs, the counting of FLOPs."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, make_model

from bench.gpu.child import Child, ChildError
from bench.gpu.jax_profile import summary
from bench.gpu.parity_weights import llama_shapes
from bench.gpu.report import table
from bench.gpu.segments import LAYOUTS, segment_rows
from bench.gpu.sizes import FULL, LLAMA_8B, TINY, Prompts
from jprefill.model.layer import Rows
from jprefill.model.layouts import KeyValues, LayoutSpec
from jprefill.model.layouts.stream import layer_stream
from jprefill.model.llama import flatten
from jprefill.model.weights import layer_name, layer_shapes
from jprefill.pallas.attention import KeyRanges

ROOT = Path(__file__).resolve().parents[2]
STEPS = {
    "numerics",
    "matmul",
    "attention",
    "parity",
    "load",
    "passes",
    "layers",
    "profile",
    "tiles",
    "quantized",
    "copies",
    "compiled_peer",
}


# ---- the run -----------------------------------------------------------------------------------------------


def run_script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "bench/gpu/run.sh"), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env=dict(os.environ) | {"JPREFILL_PYTHON": sys.executable} | environment,
    )


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    """Output and JSON of one tiny run, with time enough for a busy machine."""
    out = tmp_path_factory.mktemp("out")
    done = run_script("--tiny", "--out", str(out), "--limit-s", "250")
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("gpu-tiny-*.json")
    return done.stdout, json.loads(path.read_text())


@pytest.mark.slow
def test_tiny_run_takes_every_step_and_says_how_it_went(tiny_run: tuple[str, dict]):
    output, report = tiny_run
    assert set(report["steps"]) == set(report["results"]) == STEPS
    assert {step["status"] for step in report["steps"].values()} <= {"ok", "cut"}
    assert {"date", "command", "commit", "machine", "limit_s", "total_s", "ceiling_tflops"} <= set(report)
    assert {"device", "nvidia_smi", "versions", "xla_flags", "implementations"} <= set(report["machine"])
    assert all(f"== {name}:" in output for name in STEPS)


@pytest.mark.slow
def test_tiny_run_measures_passes_layers_and_numerics(tiny_run: tuple[str, dict]):
    results = tiny_run[1]["results"]
    assert [record["prompts"] for record in results["passes"]] == [prompts.name for prompts in TINY.prompts]
    for record in results["passes"]:
        assert record["ours_tokens_per_s"] == pytest.approx(record["tokens"] / record["ours_s"])
        assert record["planned_bytes"] > 0
        assert record["ours_share"] > 0
    variants = {record["variant"]: record for record in results["layers"]}
    assert {"traced count", "static count", "layout full"} <= set(variants)
    assert all(record["layer_s"] > 0 for record in variants.values() if "error" not in record)
    right = [record for record in results["numerics"] if record["implementation"] == "xla"]
    assert {record["segments"] for record in right} == set(LAYOUTS)
    assert all(record["is_right"] for record in right)


def test_what_the_interpreter_lacks_is_said_at_once(tmp_path: Path):
    # Without site packages nothing but the standard library is there.
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    done = run_script("--tiny", "--out", str(tmp_path), JPREFILL_PYTHON=str(bare), PYTHONPATH="")
    assert done.returncode == 2
    assert "has no jax, numpy, jaxtyping, tqdm" in done.stderr
    assert "JPREFILL_WHEELS" in done.stderr


def test_an_unknown_step_is_refused_before_anything_starts(tmp_path: Path):
    done = run_script("--tiny", "--only", "naps", "--out", str(tmp_path))
    assert done.returncode != 0
    assert "--only 'naps': known are numerics" in done.stderr


# ---- children ----------------------------------------------------------------------------------------------

WORKER = """
import os, time
from bench.gpu.worker import serve
commands = {
    "add": lambda left, right: left + right,
    "fail": lambda: {}["nothing"],
    "die": lambda: os._exit(3),
    "hang": lambda: time.sleep(60),
}
serve(commands, lambda: %s)
"""


def child_of(tmp_path: Path, is_healthy: bool = True) -> Child:
    command = [sys.executable, "-c", WORKER % is_healthy]
    return Child("worker", command, tmp_path / "log", dict(os.environ) | {"PYTHONPATH": str(ROOT)})


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    with child_of(tmp_path) as worker:
        yield worker


def test_a_child_answers_and_its_errors_are_one_line(child: Child):
    assert child.ask("add", timeout_s=20, left=2, right=3) == 5
    with pytest.raises(ChildError, match=r"^KeyError: 'nothing' \[<string>:\d+\]$"):
        child.ask("fail", timeout_s=20)
    assert child.ask("add", timeout_s=20, left=2, right=3) == 5
    assert child.generation == 1


def test_a_child_that_dies_is_started_again(child: Child):
    with pytest.raises(ChildError, match=r"worker ended \(exit 3\)"):
        child.ask("die", timeout_s=20)
    assert child.ask("add", timeout_s=20, left=2, right=3) == 5
    assert child.generation == 2


def test_a_child_that_hangs_is_started_again(child: Child):
    assert child.ask("add", timeout_s=20, left=1, right=1) == 2
    started = time.monotonic()
    with pytest.raises(ChildError, match="no answer in 0 s"):
        child.ask("hang", timeout_s=0.2)
    assert time.monotonic() - started < 10
    assert child.ask("add", timeout_s=20, left=2, right=3) == 5


def test_a_child_whose_device_is_gone_is_started_again(tmp_path: Path):
    with child_of(tmp_path, is_healthy=False) as worker:
        with pytest.raises(ChildError, match="KeyError"):
            worker.ask("fail", timeout_s=20)
        assert worker.ask("add", timeout_s=20, left=2, right=3) == 5
        assert worker.generation == 2


# ---- counting ----------------------------------------------------------------------------------------------


def test_flops_of_a_whole_pass_are_counted_exactly():
    model, prompts = TINY.model, Prompts(2, 3, 64)
    gemms = 2 * 64 * (4 * 16 + 2 * 2 * 16 + 4 * 16 + 3 * 96)  # q, k and v, output, MLP
    seen = 1 + 2 + 3
    attention = 2 * 2 * 4 * 16 * seen  # two products of 4 heads
    head = 2 * 64 * 128
    assert prompts.model_flops(model) == 2 * (2 * (3 * gemms + attention) + head)


def test_flops_that_are_done_leave_out_what_the_last_layer_skips():
    model, prompts = TINY.model, Prompts(1, 10, 64)
    skipped_rows = 9
    gemms = 2 * 64 * (2 * 4 * 16 + 3 * 96)
    skipped_pairs = sum(range(1, 10))
    skipped = skipped_rows * gemms + 4 * 4 * 16 * skipped_pairs
    assert prompts.model_flops(model) - prompts.done_flops(model) == skipped


def test_the_full_run_is_of_the_shape_of_llama_8b():
    assert sum(np.prod(shape) for shape in llama_shapes(asdict(LLAMA_8B)).values()) == 8_030_261_248
    assert FULL.main_prompt.name == "1x16384"
    assert [prompts.num_tokens <= prompts.bucket for prompts in FULL.prompts] == [True] * len(FULL.prompts)


# ---- layouts of segments, tables ---------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_keys", [64, 128, 1000])
def test_rows_of_a_segment_layout_see_only_real_keys(layout: str, num_keys: int):
    rows, num_real = segment_rows(layout, num_keys)
    prefix_lo, prefix_hi, self_lo, self_pos = rows.T
    assert rows.shape == (num_keys, 4)
    np.testing.assert_array_equal(self_pos[:num_real], np.arange(num_real))
    assert (self_pos[num_real:] == -1).all()
    assert (prefix_lo <= prefix_hi).all()
    assert (prefix_hi <= self_lo)[prefix_hi > 0].all()
    assert (self_lo <= np.maximum(self_pos, 0)).all()


def test_a_table_shows_units_and_failures():
    records = [{"side": "a", "median_s": 0.002, "x_bytes": 2**21, "share": 0.5}, {"side": "b", "error": "broken\nmore"}]
    lines = table(("side", "median_s", "x_bytes", "share", "absent"), records).splitlines()
    assert lines[0].split() == ["side", "median_s", "x_bytes", "share"]
    assert lines[1].split() == ["a", "2.000", "ms", "2.0", "MiB", "50.0", "%"]
    assert lines[2].split() == ["b", "-", "-", "-", "!", "broken"]


def test_a_profile_tells_busy_time_from_gaps():
    # Two streams overlap, then the device waits 30 ns.
    seen = summary([("gemm", 100, 150), ("copy", 120, 160), ("gemm", 190, 200)])
    assert seen["span_s"] == pytest.approx(100e-9)
    assert seen["busy_s"] == pytest.approx(70e-9)
    assert seen["longest_gap_s"] == pytest.approx(30e-9)
    assert seen["kernels"][0] == {"name": "gemm", "seconds": pytest.approx(60e-9), "count": 2}
    assert summary([])["num_kernels"] == 0


# ---- the switch that the run compares ----------------------------------------------------------------------


def test_static_and_traced_trip_counts_give_the_same_numbers():
    weights = flatten(make_model())
    shapes = layer_shapes(CONFIG)
    layer = {leaf: weights[layer_name(0, leaf)] for leaf in shapes}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(192, CONFIG.embed_dim)), jnp.float32)
    kv = KeyValues(*(jnp.zeros((192, CONFIG.num_kv_heads, CONFIG.head_dim)) for _ in range(2)))
    zeros, positions = jnp.zeros(192, jnp.int32), jnp.arange(192, dtype=jnp.int32)
    rows = Rows(positions, KeyRanges(zeros, zeros, zeros, positions))
    traced = LayoutSpec(CONFIG, 64, "xla")
    static = replace(traced, static_chunks=True)
    # The static program visits the whole bucket, whatever number of chunks it is told.
    told = {traced: jnp.int32(3), static: jnp.int32(1)}
    outputs = [jax.jit(partial(layer_stream, spec))(x, kv, layer, rows, n) for spec, n in told.items()]
    for left, right in zip(*map(jax.tree.leaves, outputs), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-6)
