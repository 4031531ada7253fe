"""Registers and spills of our kernels: what ptxas says while XLA compiles.

XLA runs `bin/ptxas` of a toolkit folder and keeps what it says to itself. A folder with a script in its place, which
asks for one report more and keeps a copy, tells us. (Triton kernels reach ptxas in no file that XLA dumps.)
"""

import re
import shlex
from importlib import metadata
from pathlib import Path

from jprefill.errors import ConfigError
from jprefill.planner.jobs import KernelReport

NVCC_PACKAGE = "nvidia-cuda-nvcc-cu12"
_KERNEL = re.compile(
    r"Compiling entry function '([^']+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
    re.DOTALL,
)
_SCRIPT = """#!/bin/sh
case $1 in --version) exec {ptxas} "$@" ;; esac
{ptxas} -v "$@" 2>{log}.$$
status=$?
cat {log}.$$ >&2
exit $status
"""


def find_ptxas() -> Path:
    """The assembler of the compiler's packages.

    Raises:
      ConfigError: the package is not installed.
    """
    try:
        files = metadata.files(NVCC_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "ptxas":
            return Path(str(file.locate())).resolve()
    raise ConfigError(f"{NVCC_PACKAGE} is not installed: scripts/setup plan, or pip install 'jprefill[plan]'")


def make_toolkit(folder: Path) -> Path:
    """Fills an empty folder so that it serves as `xla_gpu_cuda_data_dir`, and returns it."""
    ptxas = find_ptxas()
    (folder / "nvvm").symlink_to(ptxas.parent.parent / "nvvm")
    (folder / "bin").mkdir()
    script = folder / "bin" / "ptxas"
    script.write_text(_SCRIPT.format(ptxas=shlex.quote(str(ptxas)), log=shlex.quote(str(folder / "said"))))
    script.chmod(0o700)
    return folder


def kernel_reports(folder: Path) -> tuple[KernelReport, ...]:
    """Every kernel that was compiled with the toolkit in `folder`."""
    said = "".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob("said.*")))
    return parse_reports(said)


def parse_reports(said: str) -> tuple[KernelReport, ...]:
    """The kernels in what `ptxas -v` wrote."""
    return tuple(
        KernelReport(name, int(registers), int(stores), int(loads))
        for name, stores, loads, registers in _KERNEL.findall(said)
    )
