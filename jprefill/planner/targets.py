"""GPUs to plan and compile for: XLA's own description of each, as text.

A file is a `GpuTargetConfigProto` in text form (`targets/*.txtpb`, from the vendors' published figures). Copy one to
describe another GPU: every field that a kernel or a plan depends on stands in it.
"""

import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from jprefill.errors import ConfigError

# The CUDA context, its libraries' handles and fragmentation take the rest.
USABLE_FRACTION = 0.95


@dataclass(frozen=True)
class GpuTarget:
    """One GPU.

    Attributes:
      name: as asked for; the file's stem for a FILE.
      description: as the driver calls the device; Pallas chooses by it.
      text: the whole description, for the compiler.
      memory_bytes: of the device.
      capability: compute capability, (8, 9) for an L4.
      is_arch_specific: instructions of this architecture alone may be used (sm_90a).
    """

    name: str
    description: str
    text: str
    memory_bytes: int
    capability: tuple[int, int]
    is_arch_specific: bool

    @property
    def usable_bytes(self) -> int:
        """What a process may plan with."""
        return int(self.memory_bytes * USABLE_FRACTION)

    @property
    def architecture(self) -> str:
        """ptxas' name of it."""
        major, minor = self.capability
        return f"sm_{major}{minor}{'a' if self.is_arch_specific else ''}"


def target_names() -> list[str]:
    """The GPUs that `find_target` knows by name."""
    return sorted(file.name.removesuffix(".txtpb") for file in _folder().iterdir() if file.name.endswith(".txtpb"))


def find_target(name: str) -> GpuTarget:
    """A GPU by its name, or described by a file.

    Raises:
      ConfigError: neither a known name nor a readable description.
    """
    if name in target_names():
        return _parse(name, (_folder() / f"{name}.txtpb").read_text(encoding="utf-8"))
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"gpu={name!r}: known are {', '.join(target_names())}, or the file of a description")
    try:
        return _parse(path.stem, path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ConfigError(f"gpu={name!r}: is not a text file") from None


def _folder():
    return resources.files("jprefill.planner") / "targets"


def _parse(name: str, text: str) -> GpuTarget:
    """Reads the few fields that a plan needs; the compiler reads all of them."""

    def field(key: str, pattern: str) -> str:
        found = re.search(rf"^\s*{key}:\s*{pattern}", text, re.MULTILINE)
        if found is None:
            raise ConfigError(f"gpu={name!r}: the description has no {key}")
        return found[1]

    capability = re.search(r"cuda_compute_capability\s*{([^}]*)}", text)
    numbers = re.findall(r"(?:major|minor):\s*(\d+)", capability[1]) if capability else []
    if len(numbers) != 2:
        raise ConfigError(f"gpu={name!r}: the description has no cuda_compute_capability with major and minor")
    return GpuTarget(
        name=name,
        description=field("device_description_str", r'"([^"]+)"'),
        text=text,
        memory_bytes=int(field("device_memory_size", r"(\d+)")),
        capability=(int(numbers[0]), int(numbers[1])),
        is_arch_specific="ACCELERATED_FEATURES" in text,
    )
