"""The process that compiles: `python -m jprefill.planner.worker REQUEST RESULTS`.

It stands apart because a wrong kernel can abort it, and because it may crash while it exits. Each result is a line of
RESULTS as soon as it is there; the last line says that all are.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import jax
from jax import stages
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

from jprefill.errors import JPrefillError
from jprefill.kvstore.device_pool import PoolShape, declare_pool
from jprefill.model.declared import DeclaredProgram, declare
from jprefill.model.layouts import LayoutSpec
from jprefill.model.memory import ProgramMemory
from jprefill.planner.jobs import CompileJob, KernelReport, ProgramReport
from jprefill.planner.ptxas import kernel_reports, make_toolkit

NUM_THREADS = 2
STACK_BYTES = 64 * 2**20  # as in `model.programs`
# What tracing, lowering or compiling may raise for a program that does not suit the GPU.
REFUSALS = (JPrefillError, ValueError, TypeError, NotImplementedError, RuntimeError)


class Worker:
    """Compiles jobs and writes what comes out. Tracing happens in the caller's thread, compiling in two others."""

    def __init__(self, request: dict[str, Any], results: TextIO):
        self._results = results
        self._lock = threading.Lock()
        self._keep_hlo: bool = request["keep_hlo"]
        self._with_kernels: bool = request["with_kernels"]
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="t", topology="1x1x1", target_config=request["target"]
        )
        self._sharding = SingleDeviceSharding(topology.devices[0])
        device = AbstractDevice(device_kind=request["description"], num_cores=None, platform="gpu")
        # Pallas asks the mesh which GPU it lowers for; there is no real device to ask.
        self._mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)

    def run(self, jobs: list[CompileJob]) -> None:
        """Compiles everything; a program that fails is one line, and the others go on."""
        threading.stack_size(STACK_BYTES)
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            pending = [
                pool.submit(self._compile, number, name, lowered, program.weight_bytes)
                for number, job in enumerate(jobs)
                for name, program in self._declared(job)
                if (lowered := self._lower(number, name, program)) is not None
            ]
        for future in pending:
            future.result()  # a bug in this file must end the process, not vanish in its thread
        self._write({"done": True})

    def _declared(self, job: CompileJob) -> Iterator[tuple[str, DeclaredProgram]]:
        spec = LayoutSpec(job.config, job.chunk_size, job.attention, quantization=job.quantization)
        programs = declare(spec, job.layout, job.dtype, job.bucket, sharding=self._sharding)
        if job.num_blocks:
            shape = PoolShape(job.config.num_layers, job.num_blocks, job.block_size, job.bucket)
            programs |= declare_pool(job.config, job.dtype, shape, sharding=self._sharding)
        yield from ((name, programs[name]) for name in job.programs or programs)

    def _lower(self, number: int, name: str, program: DeclaredProgram) -> stages.Lowered | None:
        try:
            with jax.sharding.use_abstract_mesh(self._mesh):
                return program.trace().lower(lowering_platforms=("cuda",))
        except REFUSALS as error:
            self._write({"job": number, "name": name, "error": _one_line(error)})

    def _compile(self, number: int, name: str, lowered: stages.Lowered, weight_bytes: int) -> None:
        started_s = time.monotonic()
        try:
            compiled, kernels = self._compile_listening(lowered) if self._with_kernels else (lowered.compile(), ())
        except REFUSALS as error:
            self._write({"job": number, "name": name, "error": _one_line(error)})
            return
        report = ProgramReport(
            name=name,
            memory=ProgramMemory.of(compiled.memory_analysis(), weight_bytes),
            compile_s=time.monotonic() - started_s,
            hlo=(compiled.as_text() or "") if self._keep_hlo else "",
            kernels=kernels,
        )
        self._write({"job": number, **report.to_dict()})

    def _compile_listening(self, lowered: stages.Lowered) -> tuple[stages.Compiled, tuple[KernelReport, ...]]:
        with TemporaryDirectory() as folder:
            toolkit = make_toolkit(Path(folder))
            compiled = lowered.compile(compiler_options={"xla_gpu_cuda_data_dir": str(toolkit)})
            return compiled, kernel_reports(toolkit)

    def _write(self, record: dict[str, Any]) -> None:
        with self._lock:
            self._results.write(json.dumps(record) + "\n")
            self._results.flush()


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:600]}"


def main() -> None:
    """Reads the request named by the first argument, writes to the file named by the second."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with Path(sys.argv[2]).open("w", encoding="utf-8") as results:
        Worker(request, results).run([CompileJob.from_dict(job) for job in request["jobs"]])


if __name__ == "__main__":
    main()
