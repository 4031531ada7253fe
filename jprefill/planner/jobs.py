"""What to compile for a GPU, and what the compiler says: records that travel to the worker process and back."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jprefill.config import DType, Layout, Quantization
from jprefill.model.config import ModelConfig, RopeConfig
from jprefill.model.memory import ProgramMemory
from jprefill.types import ClassHead


@dataclass(frozen=True)
class CompileJob:
    """The programs of one bucket.

    Attributes:
      bucket: padded length in tokens; see `declare`.
      attention: implementation name in `jprefill.pallas.attention`.
      programs: names in `declare(...)`; empty: all of them.
    """

    config: ModelConfig
    layout: Layout
    attention: str
    chunk_size: int
    bucket: int
    dtype: DType = "bfloat16"
    quantization: Quantization | None = None
    programs: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """For people: what is compiled."""
        return f"{self.layout}, {self.attention}, bucket {self.bucket}"

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "CompileJob":
        """Undoes `to_dict`, JSON's lists for tuples included."""
        config = dict(values["config"])
        config["rope"] = RopeConfig(**config["rope"])
        if config["class_head"] is not None:
            head = config["class_head"]
            config["class_head"] = ClassHead(**head | {"names": tuple(head["names"])})
        return cls(**{**values, "config": ModelConfig(**config), "programs": tuple(values["programs"])})


@dataclass(frozen=True)
class KernelReport:
    """What ptxas says of one kernel: registers a thread, and bytes a thread that did not fit into them."""

    name: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int


@dataclass(frozen=True)
class ProgramReport:
    """One compiled program.

    Attributes:
      name: as in `declare`.
      hlo: the optimised HLO as text; empty unless it was asked for.
      kernels: empty unless they were asked for.
    """

    name: str
    memory: ProgramMemory
    compile_s: float
    hlo: str = ""
    kernels: tuple[KernelReport, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ProgramReport":
        """Undoes `to_dict`."""
        memory = ProgramMemory(**values["memory"])
        kernels = tuple(KernelReport(**kernel) for kernel in values["kernels"])
        return cls(**{**values, "memory": memory, "kernels": kernels})
