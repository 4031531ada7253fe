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
      programs: names in `declare(...)` and, with a pool, in `declare_pool(...)`; empty: all of them.
      num_blocks: of a device pool; 0: none.
      block_size: of the pool's blocks, in tokens.
    """

    config: ModelConfig
    layout: Layout
    attention: str
    chunk_size: int
    bucket: int
    dtype: DType = "bfloat16"
    quantization: Quantization | None = None
    programs: tuple[str, ...] = ()
    num_blocks: int = 0
    block_size: int = 16

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
