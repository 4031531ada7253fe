"""The Hopper kernel: barriers, asynchronous copies and arithmetic in simulation; what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from simulate_mosaic import FLOAT16, HEADS, random_case, segments

from jprefill.errors import ConfigError
from jprefill.pallas.attention import attend

LIMIT = {"bfloat16": 2e-2, "float16": 4e-3}


@pytest.fixture(scope="module")
def simulated():
    """What `simulate_mosaic.py` measured."""
    script = Path(__file__).with_name("simulate_mosaic.py")
    child = subprocess.run(
        [sys.executable, "-W", "error", script], env=os.environ | {"NPROC": "16"}, capture_output=True, timeout=280
    )
    assert child.returncode == 0, child.stderr.decode()[-4000:]
    return json.loads(child.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("heads", HEADS)
def test_segments_match_the_reference_with_nan_behind_them(simulated, heads):
    assert simulated[heads] <= LIMIT[HEADS[heads][1].name]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["deep_in_a_prompt", "random_ranges"])
def test_ranges_anywhere_match_the_reference(simulated, case):
    assert simulated[case] <= LIMIT["bfloat16"]


@pytest.mark.slow
def test_barriers_order_all_that_shares_memory(simulated):
    assert simulated["error_with_races_detected"] <= LIMIT["bfloat16"]


@pytest.mark.slow
def test_a_row_does_not_depend_on_its_tile_mates(simulated):
    assert simulated["bits_changed_by_tile_mates"] == 0


@pytest.mark.slow
def test_rows_that_see_nothing_are_zero(simulated):
    assert simulated["nonzero_of_rows_that_see_nothing"] == 0


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2, 1, 64), jnp.dtype("float32"), "attention='mosaic': dtype float32: wgmma takes bfloat16 and float16"),
        ((2, 1, 80), FLOAT16, "attention='mosaic': head_dim 80: blocks exist for 64, 128, 256"),
    ],
)
def test_heads_without_a_kernel_are_refused(shape, dtype, message):
    with pytest.raises(ConfigError, match=message):
        attend(*random_case(shape, segments(0, [4], 0), 4, dtype), implementation="mosaic")
