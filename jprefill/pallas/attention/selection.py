"""Which attention implementation to trust on this device.

    choose       what the device and the model allow, best first; the rest with reasons        no device needed
    check        one candidate against the float32 reference, on the device itself             seconds
    select       the first candidate that passes; what fails is dropped with one warning

Kernels are compiled by compilers that have had wrong versions (ptxas of CUDA 12.8 mis-compiles masked wgmma loops), so
even a kernel that is right in interpret mode must prove itself on the real device before it serves anybody.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jprefill.pallas.attention.api import implementations
from jprefill.pallas.attention.contract import Attend, KeyRanges
from jprefill.pallas.attention.reference import attend_reference

log = logging.getLogger("jprefill.attention")

TRUSTED = ("xla", "reference")  # plain JAX: nothing to prove
NUM_ROWS, NUM_KEYS = 300, 700  # several tiles of every kernel, and a buffer that ends inside a block
# Largest and mean absolute error for values of unit size: what rounding inputs and weights costs, four times over.
TOLERANCE = {"float32": (1e-4, 1e-5), "float16": (8e-3, 5e-4), "bfloat16": (6e-2, 4e-3)}


class Heads(NamedTuple):
    """What a kernel is built for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str


@dataclass(frozen=True)
class Choice:
    """Implementations for a device, best first, and why the others are not among them."""

    candidates: tuple[str, ...]
    refused: dict[str, str]


def choose(
    platform: str, device_kind: str, compute_capability: str | None = None, heads: Heads | None = None
) -> Choice:
    """What a device can run, from its description alone.

    Args:
      platform: as `jax.Device.platform`: "cpu", "gpu" ("cuda" too).
      device_kind: the vendor's name of the device, for the reasons.
      compute_capability: as `jax.Device.compute_capability`, such as "9.0"; None off NVIDIA.
      heads: also refuse what cannot run these heads; None: judge the device only.

    Returns:
      At least one candidate: `xla` runs everywhere.
    """
    capability = _parse_capability(compute_capability)
    rules: tuple[tuple[str, Callable[[], str | None]], ...] = (
        ("mosaic", lambda: _refuse_mosaic(capability, heads)),
        ("triton", lambda: _refuse_triton(capability)),
    )
    if platform not in ("gpu", "cuda"):
        reason = f"needs an NVIDIA GPU, the platform is {platform!r}"
        return Choice(("xla",), {name: reason for name, _ in rules})
    refused = {name: f"{reason} ({device_kind})" for name, rule in rules if (reason := rule())}
    return Choice((*(name for name, _ in rules if name not in refused), "xla"), refused)


def _parse_capability(compute_capability: str | None) -> tuple[int, int] | None:
    """(major, minor); None for what is not NVIDIA's, such as "gfx942"."""
    major, _, minor = (compute_capability or "").partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _refuse_mosaic(capability: tuple[int, int] | None, heads: Heads | None) -> str | None:
    if capability is None or capability[0] != 9:
        return f"needs compute capability 9.x for wgmma, the device has {_show(capability)}"
    try:
        from jprefill.pallas.attention.mosaic import refusal
    except ImportError as error:
        return f"this JAX cannot import Pallas Mosaic GPU: {error}"
    return refusal(heads.dtype, heads.head_dim) if heads else None


def _refuse_triton(capability: tuple[int, int] | None) -> str | None:
    if capability is None or capability < (8, 0):
        return f"needs compute capability 8.0, the device has {_show(capability)}"
    return None


def _show(capability: tuple[int, int] | None) -> str:
    return "none" if capability is None else f"{capability[0]}.{capability[1]}"


@cache
def select_for_device(heads: Heads) -> str:
    """The implementation to use for these heads on the default device; decided once per process."""
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    return select(choose(device.platform, device.device_kind, capability, heads), implementations(), heads)


def select(choice: Choice, implementations: dict[str, Attend], heads: Heads) -> str:
    """The first candidate that `check` finds nothing against. Compiles and runs on the default device.

    A candidate that is wrong, or cannot be compiled or run, is dropped with one warning in the log.
    """
    for name in choice.candidates:
        if name in TRUSTED:
            return name
        fault = check(implementations[name], heads)
        if fault is None:
            return name
        log.warning("attention implementation %r is not used: %s", name, fault)
    return "xla"


def check(implementation: Attend, heads: Heads, *, seed: int = 0) -> str | None:
    """Runs random segment layouts through an implementation and the float32 reference.

    Returns:
      None if all outputs agree within `TOLERANCE`; else what was wrong, in one line.
    """
    run = jax.jit(implementation)
    for case, (inputs, ranges) in enumerate(_cases(heads, seed)):
        try:
            ours = np.asarray(run(*inputs, ranges), np.float32)
        except Exception as error:  # whatever a young compiler raises must not stop the engine from starting
            return f"{type(error).__name__}: {_first_line(error)}"
        exact = np.asarray(jax.jit(attend_reference)(*(x.astype(jnp.float32) for x in inputs), ranges))
        if fault := _compare(ours, exact, heads.dtype):
            return f"layout {case}: {fault}"
    return None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:200]


def _compare(ours: np.ndarray, exact: np.ndarray, dtype: str) -> str | None:
    if not np.isfinite(ours).all():
        return f"{np.count_nonzero(~np.isfinite(ours))} of {ours.size} outputs are not finite"
    error = np.abs(ours - exact)
    max_allowed, mean_allowed = TOLERANCE[dtype]
    if error.max() > max_allowed or error.mean() > mean_allowed:
        return (
            f"error against the float32 reference: largest {error.max():.2g} (allowed {max_allowed:.2g}), "
            f"mean {error.mean():.2g} (allowed {mean_allowed:.2g})"
        )
    is_unseen = ~exact.any(axis=(1, 2))
    if ours[is_unseen].any():
        return f"{np.count_nonzero(ours[is_unseen].any(axis=(1, 2)))} rows that see nothing are not zero"
    return None


Inputs = tuple[Float[Array, "T N H"], Float[Array, "S K H"], Float[Array, "S K H"]]


def _cases(heads: Heads, seed: int) -> Iterator[tuple[Inputs, KeyRanges]]:
    """A prompt, a chunk far into a prompt, items over one prefix, unrelated prompts. NaN behind every last key."""
    rng = np.random.default_rng(seed)
    far = int(rng.integers(150, 390))
    layouts = (
        [(0, 0, NUM_ROWS)],
        [(0, far, NUM_ROWS)],
        [(int(rng.integers(60, 300)), 0, int(length)) for length in rng.integers(1, 90, 6)],
        [(0, 0, int(length)) for length in rng.integers(1, 90, 6)],
    )
    for segments in layouts:
        rows, end_key = _rows(segments)
        shapes = [(NUM_ROWS, heads.num_heads), *[(NUM_KEYS, heads.num_kv_heads)] * 2]
        q, k, v = (rng.standard_normal((*shape, heads.head_dim)).astype(np.float32) for shape in shapes)
        k[end_key:] = v[end_key:] = np.nan
        arrays = [jnp.asarray(x).astype(heads.dtype) for x in (q, k, v)]
        yield (arrays[0], arrays[1], arrays[2]), KeyRanges(*(jnp.asarray(column) for column in rows.T))


def _rows(segments: list[tuple[int, int, int]]) -> tuple[np.ndarray, int]:
    """`KeyRanges` of segments (prefix length, tokens seen before, new tokens), as rows, and the end of their keys.

    The longest prefix lies first in the buffer; then come the segments' own keys, one after the other.
    """
    rows = np.tile(np.array([0, 0, 0, -1], np.int32), (NUM_ROWS, 1))
    row, key = 0, max(prefix for prefix, _, _ in segments)
    for prefix, seen, new in segments:
        new = min(new, NUM_ROWS - row)
        positions = key + seen + np.arange(new)
        rows[row : row + new] = np.stack([0 * positions, 0 * positions + prefix, 0 * positions + key, positions], 1)
        row, key = row + new, key + seen + new
    return rows, key
