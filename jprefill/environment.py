"""What must stand in the environment before JAX is imported. No JAX here, and nothing is overwritten."""

from collections.abc import MutableMapping
from pathlib import Path

# Where a driver shows itself on Linux, and on Windows' Linux.
GPU_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg")
# As `planner.targets.USABLE_FRACTION`: the engine plans its memory itself, and a process of `jprefill serve` has the
# device to itself. JAX alone would take 75 %.
MEMORY_FRACTION = "0.95"


def prepare(environ: MutableMapping[str, str]) -> None:
    """Sets JAX's variables for a process of the `jprefill` command.

    Without an NVIDIA driver JAX is told to use the CPU: with the compiler's packages installed (`jprefill plan`) it
    would look for a GPU and print a page about not finding one.
    """
    environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_FRACTION)
    if not any(Path(file).exists() for file in GPU_FILES):
        environ.setdefault("JAX_PLATFORMS", "cpu")
