"""From log-probabilities over the vocabulary to probabilities over the labels. Float64 throughout."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jprefill.errors import EngineError, InvalidRequestError


def check_temperature(temperature: Any) -> float:
    """Returns the temperature as a float.

    Raises:
      InvalidRequestError: not a finite number above 0.
    """
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not is_number or not math.isfinite(temperature) or temperature <= 0:
        raise InvalidRequestError(f"temperature={temperature!r}: must be a finite number above 0", param="temperature")
    return float(temperature)


def softmax(logprobs: Sequence[float], temperature: float = 1.0) -> tuple[float, ...]:
    """Probabilities over the labels alone; they sum to 1.

    Raises:
      EngineError: the model gave a NaN, or minus infinity for every label.
    """
    logits = np.asarray(logprobs, np.float64) / temperature
    top = logits.max()
    if not np.isfinite(top):  # a NaN anywhere makes the maximum NaN
        raise EngineError("the model gave no finite log-probability for the labels")
    weights = np.exp(logits - top)
    return tuple((weights / weights.sum()).tolist())


def label_mass(logprobs: Sequence[float]) -> float:
    """Probability over the full vocabulary that the next token is any of the labels, 0 to 1.

    A low mass says that the model wanted to answer something else: prompt and model do not fit.
    """
    mass = np.exp(np.asarray(logprobs, np.float64)).sum()
    return float(min(mass, 1.0))  # float32 rounding may pass 1 by a few ulp
