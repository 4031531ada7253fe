"""Programs whose memory is made up."""

import pytest

from jprefill.model.memory import ProgramMemory
from jprefill.planner.plan import kv_bytes

MIB = 2**20
LAYER_BYTES, TABLE_BYTES = 416 * MIB, 1002 * MIB
ROW_BYTES = 20


def program(weights, resident, temp, output=0, alias=0):
    return ProgramMemory(weights, weights + resident, output, alias, temp, code_bytes=0, peak_bytes=0)


def made_up(job):
    """`stream` has 72 MiB of scratch, `hybrid` and `full` grow with the bucket. The head takes 100 MiB."""
    per_token = {"stream": 0, "hybrid": 20_000, "full": 80_000}[job.layout]
    scratch = 72 * MIB + per_token * job.bucket
    x = job.bucket * job.config.embed_dim * 2
    x_and_kv = x + kv_bytes(job.config, job.bucket)
    resident = x_and_kv + job.bucket * ROW_BYTES + 4
    return {
        "embed": program(TABLE_BYTES, job.bucket * (ROW_BYTES + 4), 0, output=x + job.bucket * ROW_BYTES),
        "layer": program(LAYER_BYTES, resident, scratch, output=x_and_kv, alias=x_and_kv),
        "read_64": program(LAYER_BYTES + TABLE_BYTES, resident, 100 * MIB),
    }


@pytest.fixture(scope="session")
def measure():
    return lambda jobs: [made_up(job) for job in jobs]
