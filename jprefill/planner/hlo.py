"""Questions to optimised HLO: does the program copy or hold what it must not?

Only text is read. A line that counts is an instruction whose result is a buffer: those inside fusions are values in
registers, and those that name a part or another view of a buffer make none.
"""

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+)[^=]*{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_CALLED_FUSION = re.compile(r"kind=k\w+, calls=%?([\w.\-]+)")
_COPIES = {"copy", "copy-start", "transpose"}
_NO_BUFFER = {"parameter", "bitcast", "get-tuple-element", "tuple", "while", "conditional", "constant", "copy-done"}


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: `dims` of its result (of the first part, for a tuple), and where it stands."""

    computation: str
    name: str
    opcode: str
    dims: tuple[int, ...]
    is_fused: bool

    @property
    def size(self) -> int:
        """Elements of the result."""
        return math.prod(self.dims)

    def __str__(self) -> str:
        return f"{self.opcode} {self.name}{list(self.dims)} in {self.computation}"


def instructions(hlo: str) -> Iterator[Instruction]:
    """Every instruction that has an array as its result."""
    fused = set(_CALLED_FUSION.findall(hlo))
    computation = ""
    for line in hlo.splitlines():
        if line and not line[0].isspace():
            if (found := _COMPUTATION.match(line)) is not None:
                computation = found[1]
            continue
        found = _INSTRUCTION.match(line)
        array = _ARRAY.search(found[2]) if found else None
        if found is None or array is None:
            continue
        dims = tuple(int(size) for size in array[2].split(",") if size)
        yield Instruction(computation, found[1], found[3], dims, computation in fused)


def copies_of(hlo: str, shapes: Collection[tuple[int, ...]]) -> list[Instruction]:
    """Copies and transposes of a whole array of one of `shapes`, in any order of its axes, fused ones included.

    A copy inside a fusion that only feeds a part of it onwards would count too; such a fusion is worth a look.
    """
    wanted = {_normal(shape) for shape in shapes}
    return [i for i in instructions(hlo) if i.opcode in _COPIES and _normal(i.dims) in wanted]


def buffers_of(hlo: str, num_elements: int) -> list[Instruction]:
    """Instructions that make a buffer of at least that many elements."""
    return [i for i in instructions(hlo) if not i.is_fused and i.opcode not in _NO_BUFFER and i.size >= num_elements]


def has_known_trip_count(hlo: str) -> bool:
    """Whether a loop's length was fixed while compiling."""
    return "known_trip_count" in hlo


def _normal(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(size for size in dims if size > 1))
