"""Compiles our programs for a GPU that is not there. No JAX in this process: a child does it (see `worker`)."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jprefill.errors import ConfigError, JPrefillError
from jprefill.planner.jobs import CompileJob, ProgramReport
from jprefill.planner.ptxas import NVCC_PACKAGE
from jprefill.planner.targets import GpuTarget

PACKAGES = ("jax-cuda12-plugin", "jax-cuda12-pjrt", NVCC_PACKAGE)
TIMEOUT_S = 1800.0


class CompileError(JPrefillError):
    """A program does not compile for a GPU; the message names both and ends in the compiler's words."""


def missing_packages() -> list[str]:
    """The compiler's packages that are not installed."""
    return [name for name in PACKAGES if not _is_installed(name)]


def compile_for(
    target: GpuTarget, jobs: Sequence[CompileJob], *, keep_hlo: bool = False, with_kernels: bool = False
) -> list[dict[str, ProgramReport]]:
    """Compiles every program of every job in one child process.

    Args:
      keep_hlo: fill in `ProgramReport.hlo`.
      with_kernels: fill in `ProgramReport.kernels`.

    Returns:
      For each job its programs by name.

    Raises:
      ConfigError: the compiler's packages are missing.
      CompileError: a program was refused, or the child process ended before it was done.
    """
    if missing := missing_packages():
        raise ConfigError(
            f"compiling for a GPU needs {', '.join(missing)}: run scripts/setup plan, or pip install 'jprefill[plan]'"
        )
    request = {
        "target": target.text,
        "description": target.description,
        "keep_hlo": keep_hlo,
        "with_kernels": with_kernels,
        "jobs": [job.to_dict() for job in jobs],
    }
    with TemporaryDirectory() as folder:
        request_file, results_file = Path(folder) / "request.json", Path(folder) / "results.jsonl"
        request_file.write_text(json.dumps(request), encoding="utf-8")
        problem = _run_worker(request_file, results_file)
        lines = results_file.read_text(encoding="utf-8").splitlines() if results_file.exists() else []
    return _collect(target, jobs, [json.loads(line) for line in lines], problem)


def _run_worker(request: Path, results: Path) -> str:
    """Runs the child; what it said last, for the case that it did not finish."""
    # Its own platform is the CPU, and what it compiles must not land in the cache of a machine that has the GPU.
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-m", "jprefill.planner.worker", request, results]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"took more than {TIMEOUT_S:.0f} s"
    last_words = [line for line in done.stderr.splitlines() if line.strip()][-1:]
    return f"exit status {done.returncode}: {' '.join(last_words) or 'no message'}"


def _collect(
    target: GpuTarget, jobs: Sequence[CompileJob], records: list[dict[str, Any]], problem: str
) -> list[dict[str, ProgramReport]]:
    """Sorts the results by job. The exit status counts only where results are missing: the process may crash later."""
    results: list[dict[str, ProgramReport]] = [{} for _ in jobs]
    is_done = False
    for record in records:
        if record.get("done"):
            is_done = True
            continue
        number = record.pop("job")
        if "error" in record:
            job = jobs[number]
            raise CompileError(f"{record['name']} ({job.title}) does not compile for {target.name}: {record['error']}")
        results[number][record["name"]] = ProgramReport.from_dict(record)
    if not is_done:
        raise CompileError(f"the compiling process for {target.name} ended early: {problem}")
    return results


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
