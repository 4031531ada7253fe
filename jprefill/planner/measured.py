"""Memory figures of compiled programs, kept on disk: a second plan compiles nothing."""

import hashlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib import metadata
from pathlib import Path

import jprefill.model
import jprefill.pallas
from jprefill.model.memory import ProgramMemory
from jprefill.planner.deviceless import PACKAGES, compile_for
from jprefill.planner.jobs import CompileJob
from jprefill.planner.targets import GpuTarget


class Measurements:
    """Compiles each job once for one GPU. Thread safe: two threads may at worst compile the same job."""

    def __init__(self, target: GpuTarget, folder: Path | None = None):
        """Keeps the figures in `folder`; None: `~/.cache/jprefill/plans`."""
        self._target = target
        self._folder = folder or _default_folder()

    def __call__(self, jobs: Sequence[CompileJob]) -> list[Mapping[str, ProgramMemory]]:
        """The programs of each job by name. What is not stored is compiled, all of it in one process.

        Raises:
          ConfigError, CompileError: see `compile_for`.
        """
        stored = [self._read(job) for job in jobs]
        missing = [job for job, figures in zip(jobs, stored, strict=True) if figures is None]
        fresh = iter(compile_for(self._target, missing) if missing else ())
        results: list[Mapping[str, ProgramMemory]] = []
        for job, figures in zip(jobs, stored, strict=True):
            if figures is None:
                figures = {name: report.memory for name, report in next(fresh).items()}
                self._write(job, figures)
            results.append(figures)
        return results

    def _file(self, job: CompileJob) -> Path:
        return self._folder / f"{self._key(job)}.json"

    def _read(self, job: CompileJob) -> dict[str, ProgramMemory] | None:
        try:
            stored = json.loads(self._file(job).read_text(encoding="utf-8"))
            return {name: ProgramMemory(**figures) for name, figures in stored.items()}
        except (OSError, ValueError, TypeError, AttributeError):  # not there, or damaged: it is made again
            return None

    def _write(self, job: CompileJob, figures: Mapping[str, ProgramMemory]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._file(job)
        partial = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}.partial")
        partial.write_text(json.dumps({name: asdict(memory) for name, memory in figures.items()}), encoding="utf-8")
        partial.replace(file)

    def _key(self, job: CompileJob) -> str:
        """Everything that the figures follow from: job, GPU, compiler, and the source of the programs."""
        identity = [job.to_dict(), self._target.text, _compiler(), _program_source()]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _default_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "jprefill" / "plans"


@cache
def _compiler() -> dict[str, str | None]:
    """Versions of the packages that turn a program into code; None: not installed."""
    installed = {dist.name: dist.version for dist in metadata.distributions()}
    return {name: installed.get(name) for name in ("jax", "jaxlib", *PACKAGES)}


@cache
def _program_source() -> str:
    """Digest of every file that a program is made of."""
    digest = hashlib.sha256()
    for package in (jprefill.model, jprefill.pallas):
        folder = Path(package.__path__[0])
        for file in sorted(folder.rglob("*.py")):
            digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return digest.hexdigest()
