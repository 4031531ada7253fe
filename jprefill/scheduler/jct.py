"""How long a pass takes, as a model that is fitted once and goes on learning. Pure Python and NumPy.

    seconds = a + b * num_chunks + c * attention_area + d * restore_bytes          a, b, c, d >= 0

Times span three orders of magnitude, so what is made small is the *relative* error.
"""

import json
import logging
import math
from collections.abc import Sequence
from copy import deepcopy
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from jprefill.scheduler.features import Amounts, Features

log = logging.getLogger("jprefill.scheduler")

Coefficients = Float64[np.ndarray, "4"]
Matrix = Float64[np.ndarray, "n m"]

FORGETTING = 0.995  # what a pass still counts after another one: the last 200 or so matter
MAX_ERROR = 0.5  # relative; more counts as much as this
MAX_TRACE = 4.0  # of the covariance: learning nothing new for long must not make it jumpy
NUM_OUTLIERS = 8  # in a row on one side are no outliers: the device has changed

# Seconds, per chunk, per key seen, per byte (10 GB/s). They stand until something was measured.
_DEFAULT = np.array([1e-3, 1e-1, 1e-9, 1e-10])
_MIN_S = 1e-6
_NUM_ROUNDS = 5  # of reweighting
_HUBER = 1.345  # standard deviations within which a sample counts in full
_FORMAT = "jprefill jct model 1"


class Sample(NamedTuple):
    """A pass that was timed."""

    features: Features
    seconds: float


class JctModel:
    """Job completion time of a pass on one device with one model. One thread owns it.

    Invariant: coefficients are finite and at least 0, so more work never costs less; the covariance is bounded.
    """

    def __init__(self):
        """A guess, to be replaced by `fit` or corrected by `observe`."""
        self._coefficients: Coefficients = _DEFAULT.copy()
        self._scales: Coefficients = _DEFAULT.copy()
        self._covariance: Matrix = np.eye(4)
        self._num_outliers = 0  # in a row; below 0: passes that were too fast

    @classmethod
    def of(cls, per_pass_s: float, per_chunk_s: float, per_key_s: float, per_byte_s: float = _DEFAULT[3]) -> "JctModel":
        """A model whose coefficients are known. It goes on learning from there.

        Raises:
          ValueError: a coefficient is negative or not finite.
        """
        model = cls()
        model._coefficients = _checked([per_pass_s, per_chunk_s, per_key_s, per_byte_s], (4,))
        model._scales = np.maximum(model._coefficients, 1e-3 * _DEFAULT)
        model._covariance = np.eye(4) * 1e-3
        return model

    def copy(self) -> "JctModel":
        """Another one that knows the same, and learns by itself."""
        return deepcopy(self)

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """a, b, c, d: seconds per pass, chunk, key and byte."""
        a, b, c, d = self._coefficients.tolist()
        return a, b, c, d

    def predict(self, features: Features) -> float:
        """Seconds of one pass, above 0."""
        return max(_MIN_S, float(_row(features) @ self._coefficients))

    def predict_all(self, num_chunks: Amounts, attention_area: Amounts, restore_bytes: Amounts) -> Amounts:
        """Seconds of many passes."""
        a, b, c, d = self._coefficients
        return np.maximum(_MIN_S, a + b * num_chunks + c * attention_area + d * restore_bytes)

    def fit(self, samples: Sequence[Sample]) -> None:
        """Starts anew from timed passes: least squares of relative errors, none negative, outliers weighed down.

        What no sample shows (nothing was restored, say) keeps its default.

        Raises:
          ValueError: no samples, or one whose seconds are not above 0; nothing was changed.
        """
        if not samples or not all(0 < sample.seconds < math.inf for sample in samples):
            raise ValueError(f"fit: {len(samples)} samples; needed is one at least, each with seconds above 0")
        rows = np.stack([_row(sample.features) / sample.seconds for sample in samples])
        sizes = np.sqrt((rows**2).mean(0))
        is_seen = sizes > 0
        scaled = rows[:, is_seen] / sizes[is_seen]
        weights = np.ones(len(samples))
        shares = np.zeros(scaled.shape[1])
        for _ in range(_NUM_ROUNDS):
            shares = _solve(scaled * weights[:, None], weights)
            errors = np.abs(scaled @ shares - 1)
            spread = max(1.4826 * float(np.median(errors)), 1e-9)
            weights = np.sqrt(np.minimum(1.0, _HUBER * spread / np.maximum(errors, 1e-12)))
        self._coefficients, self._scales = _DEFAULT.copy(), _DEFAULT.copy()
        self._scales[is_seen] = 1 / sizes[is_seen]
        self._coefficients[is_seen] = shares * self._scales[is_seen]
        weighted = np.zeros((len(samples), 4))
        weighted[:, is_seen] = scaled * weights[:, None]
        self._covariance = _bounded(np.linalg.inv(np.eye(4) + weighted.T @ weighted))
        self._num_outliers = 0

    def observe(self, features: Features, seconds: float) -> None:
        """Learns from a pass: recursive least squares of relative errors, with forgetting.

        One pass that took ten times too long moves little: its error is cut to `MAX_ERROR`. Many of them in a row are
        a device that has changed, and then the model learns fast. A time that is not above 0 is ignored.
        """
        if not 0 < seconds < math.inf:
            return
        predicted_s = self.predict(features)
        error = seconds / predicted_s - 1
        self._count_outlier(error)
        row = _row(features) * self._scales / predicted_s
        reach = self._covariance @ row
        gain = reach / (FORGETTING + row @ reach)
        shares = self._coefficients / self._scales + gain * max(-MAX_ERROR, min(MAX_ERROR, error))
        self._coefficients = np.maximum(shares, 0.0) * self._scales
        self._covariance = _bounded((self._covariance - np.outer(gain, reach)) / FORGETTING)

    def _count_outlier(self, error: float) -> None:
        if abs(error) < MAX_ERROR / 2:
            self._num_outliers = 0
            return
        sign = 1 if error > 0 else -1
        self._num_outliers = sign * (abs(self._num_outliers) + 1 if self._num_outliers * sign > 0 else 1)
        if abs(self._num_outliers) >= NUM_OUTLIERS:
            self._num_outliers = 0
            self._covariance = np.eye(4)

    # ---- on disk --------------------------------------------------------------------------------------------------

    def save(self, path: Path, identity: str) -> None:
        """Writes the model; a reader sees the old file or the new one, never half of it.

        Args:
          identity: model, device and settings that the times hold for.

        Raises:
          OSError: the folder cannot be written.
        """
        record = {
            "format": _FORMAT,
            "identity": identity,
            "coefficients": self._coefficients.tolist(),
            "scales": self._scales.tolist(),
            "covariance": self._covariance.tolist(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path, identity: str) -> "JctModel | None":
        """What `save` wrote for the same identity; None if there is nothing that can be used."""
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["format"] != _FORMAT or record["identity"] != identity:
                return None
            model = cls()
            model._coefficients = _checked(record["coefficients"], (4,))
            model._scales = _checked(record["scales"], (4,))
            model._covariance = _checked(record["covariance"], (4, 4))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s cannot be used and is left out: %s", path.name, error)
            return None
        model._covariance = _bounded(model._covariance)
        return model


def _row(features: Features) -> Coefficients:
    return np.array([1.0, features.num_chunks, features.attention_area, features.restore_bytes])


def _solve(rows: Matrix, targets: Amounts) -> Amounts:
    """Non-negative least squares, exactly: of all sets of columns with no negative coefficient, the best one.

    There are four columns, so 15 sets; an iteration over active sets would be longer than this loop.
    """
    num_columns = rows.shape[1]
    best, best_loss = np.zeros(num_columns), math.inf
    for size in range(num_columns, 0, -1):
        for columns in map(list, combinations(range(num_columns), size)):
            part, *_ = np.linalg.lstsq(rows[:, columns], targets, rcond=None)
            loss = float(((rows[:, columns] @ part - targets) ** 2).sum())
            if (part >= 0).all() and loss < best_loss:
                best, best_loss = np.zeros(num_columns), loss
                best[columns] = part
    return best


def _bounded(covariance: Matrix) -> Matrix:
    """Symmetric, with a trace of at most `MAX_TRACE`."""
    covariance = (covariance + covariance.T) / 2
    return covariance * min(1.0, MAX_TRACE / max(float(np.trace(covariance)), 1e-12))


def _checked(values: object, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of a file.

    Raises:
      ValueError: another shape, or a number that is negative where none may be, or not finite.
    """
    array = np.asarray(values, np.float64)
    smallest = array if len(shape) == 1 else np.diagonal(array)
    if array.shape != shape or not np.isfinite(array).all() or (smallest < 0).any():
        raise ValueError(f"expected {shape} finite numbers, none below 0")
    return array
