"""Memory of executables, as the compiler reports it, and of the passes made of them. No JAX here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jprefill.config import Quantization
from jprefill.model.config import ModelConfig
from jprefill.model.weights import is_projection, layer_shapes

# cuBLASLt takes up to this much when the autotuner prefers it; a compile without the GPU does not count it.
LIBRARY_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """Device memory of one executable, in bytes.

    Attributes:
      weight_bytes: arguments that are weights: there before the pass, and after it.
      argument_bytes: all arguments, weights included.
      output_bytes: all results, those that take an argument's place included.
      alias_bytes: results that take the place of a donated argument.
      temp_bytes: scratch while it runs.
      code_bytes: of the executable itself.
      peak_bytes: what the compiler's own simulation gives for arguments, results and scratch together.
    """

    weight_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int
    peak_bytes: int

    @classmethod
    def of(cls, analysis: Any, weight_bytes: int) -> "ProgramMemory":
        """From `Compiled.memory_analysis()`."""
        return cls(
            weight_bytes=weight_bytes,
            argument_bytes=analysis.argument_size_in_bytes,
            output_bytes=analysis.output_size_in_bytes,
            alias_bytes=analysis.alias_size_in_bytes,
            temp_bytes=analysis.temp_size_in_bytes,
            code_bytes=analysis.generated_code_size_in_bytes,
            peak_bytes=analysis.peak_memory_in_bytes,
        )

    @property
    def activation_bytes(self) -> int:
        """Arguments that belong to the pass: x, the KV buffer, row vectors."""
        return self.argument_bytes - self.weight_bytes

    @property
    def added_bytes(self) -> int:
        """What it needs besides its arguments."""
        return self.output_bytes - self.alias_bytes + self.temp_bytes


def pass_bytes(programs: Mapping[str, ProgramMemory]) -> int:
    """The most that one pass holds at any moment besides the weights.

    Args:
      programs: the executables of one bucket by name. The KV buffer is there before the pass, and after it. From
        `embed` on, what the layer program takes (x, the KV buffer, row vectors) is alive until the answer is read,
        whether a program uses all of it or not.
    """
    resident = programs["layer"].activation_bytes
    embed = programs["embed"]
    before = resident - embed.output_bytes  # what the layer program takes that `embed` has not made: the KV buffer
    running = max(program.added_bytes for name, program in programs.items() if name != "embed")
    return max(before + embed.activation_bytes + embed.added_bytes, resident + running)


def library_bytes(config: ModelConfig, quantization: Quantization | None) -> int:
    """What a pass may take beyond the compiler's figures.

    The autotuner of a real GPU may hand a product to cuBLAS, which needs a workspace, and one whole matrix in the
    working dtype where the weights are quantised.
    """
    if quantization is None:
        return LIBRARY_BYTES
    matrices = [math.prod(shape) for name, shape in layer_shapes(config).items() if is_projection(name)]
    return LIBRARY_BYTES + 2 * max(matrices)
