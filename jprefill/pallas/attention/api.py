"""The attention contract and the registry of its implementations.

Each query row r sees two half-open or closed ranges of one layer's KV buffer, and nothing else:

    KV buffer:  | prefix A          | prefix B | seg 0 | seg 1 | seg 2 | pad |
    row of seg 1 (an item of A):
                [prefix_lo, prefix_hi)                 [self_lo, self_pos]
                 everything in A                        its own tokens so far

The two ranges of a row do not overlap. A row with both ranges empty (padding) gives zeros. Keys outside a row's
ranges may hold anything, NaN included; so may the values outside all the ranges of the rows around it.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int32

from jprefill.errors import ConfigError


class KeyRanges(NamedTuple):
    """What each of T query rows may see: `[prefix_lo, prefix_hi)` and `[self_lo, self_pos]`, rows of the KV buffer."""

    prefix_lo: Int32[Array, " T"]
    prefix_hi: Int32[Array, " T"]
    self_lo: Int32[Array, " T"]
    self_pos: Int32[Array, " T"]


Attend = Callable[
    [Float[Array, "T N H"], Float[Array, "S K H"], Float[Array, "S K H"], KeyRanges], Float[Array, "T N H"]
]


def implementations() -> dict[str, Attend]:
    """Every implementation by name. All share one test suite (`tests/pallas/attention`)."""
    from jprefill.pallas.attention.reference import attend_reference
    from jprefill.pallas.attention.xla import attend_xla

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
