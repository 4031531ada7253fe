"""`attend`, and the registry of its implementations."""

import jax
from jaxtyping import Array, Float

from jprefill.errors import ConfigError
from jprefill.pallas.attention.contract import Attend, KeyRanges
from jprefill.pallas.attention.reference import attend_reference
from jprefill.pallas.attention.xla import attend_xla


def implementations() -> dict[str, Attend]:
    """Every implementation by name. All share one test suite (`tests/pallas/attention`)."""
    return {"reference": attend_reference, "xla": attend_xla}


def default_implementation() -> str:
    """The name that suits the platform: `xla` everywhere until a kernel has been proven on the device."""
    return "xla"


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
