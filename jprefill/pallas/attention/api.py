"""`attend`, and the registry of its implementations."""

import jax
from jaxtyping import Array, Float

from jprefill.errors import ConfigError
from jprefill.pallas.attention.contract import Attend, KeyRanges
from jprefill.pallas.attention.reference import attend_reference
from jprefill.pallas.attention.triton import attend_triton
from jprefill.pallas.attention.xla import attend_xla
from jprefill.pallas.device import trace_target


def implementations() -> dict[str, Attend]:
    """Every implementation by name. All share one test suite (`tests/pallas/attention`)."""
    return {"reference": attend_reference, "xla": attend_xla, "triton": attend_triton, "mosaic": _attend_mosaic}


def _attend_mosaic(
    q: Float[Array, "T N H"], k: Float[Array, "S K H"], v: Float[Array, "S K H"], ranges: KeyRanges
) -> Float[Array, "T N H"]:
    # Imported when asked for: Pallas Mosaic GPU changes from one JAX to the next, and only one kind of GPU needs it.
    from jprefill.pallas.attention.mosaic import attend_mosaic

    return attend_mosaic(q, k, v, ranges)


def default_implementation() -> str:
    """The name that suits the device that is traced for: `triton` on a GPU, `xla` elsewhere."""
    return "triton" if trace_target().platform == "gpu" else "xla"


def attend(
    q: Float[Array, "T N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    ranges: KeyRanges,
    *,
    implementation: str | None = None,
) -> Float[Array, "T N H"]:
    """Scaled dot-product attention of T query rows over the ranges that each may see.

    Args:
      q: queries, rope applied; N is a multiple of K (grouped-query attention).
      k: keys of the layer's whole buffer, rope applied.
      v: values.
      ranges: int32 row numbers of the buffer.
      implementation: a name in `implementations()`; None takes `default_implementation()`.

    Returns:
      The dtype of `q`; softmax in float32, scale 1/sqrt(H); zeros for rows that see nothing.

    Raises:
      ConfigError: while tracing, for an unknown implementation.
    """
    name = implementation or default_implementation()
    known = implementations()
    if name not in known:
        raise ConfigError(f"attention={name!r}: known are {', '.join(known)}")
    with jax.named_scope("attention"):
        return known[name](q, k, v, ranges)
