"""The attention contract: what a query row sees.

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

from jaxtyping import Array, Float, Int32


class KeyRanges(NamedTuple):
    """What each of T query rows may see: `[prefix_lo, prefix_hi)` and `[self_lo, self_pos]`, rows of the KV buffer."""

    prefix_lo: Int32[Array, " T"]
    prefix_hi: Int32[Array, " T"]
    self_lo: Int32[Array, " T"]
    self_pos: Int32[Array, " T"]


Attend = Callable[
    [Float[Array, "T N H"], Float[Array, "S K H"], Float[Array, "S K H"], KeyRanges], Float[Array, "T N H"]
]
