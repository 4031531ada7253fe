"""`Job`: what a task asks of the engine, and how it reads the answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jprefill.types import ScoreRequest, ScoreResult


@dataclass(frozen=True, eq=False)
class Job[T]:
    """A question turned into token requests. No JAX, no waiting: whoever holds it submits and awaits.

    Attributes:
      requests: submitted together, in any order.
      finish: takes their results in the order of `requests`, gives the typed answer.
    """

    requests: tuple[ScoreRequest, ...]
    finish: Callable[[Sequence[ScoreResult]], T]
