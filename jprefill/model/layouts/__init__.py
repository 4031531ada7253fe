"""How a layer program walks its tokens: three layouts behind one contract.

    layer(x[T,D], kv, weights, rows, num_chunks) -> x, kv

`x` and `kv` are donated and come back in place. `T` is the bucket; the first `num_chunks * chunk_size` rows are real.
Rows beyond may hold anything finite and are never read by a real row.

    stream   two loops over chunks; scratch memory is one chunk               the default
    hybrid   attention whole, token-wise parts chunk by chunk (lax.map)       PrefillOnly, arXiv 2505.07203
    full     everything at once                                               the plain twin
"""

from jprefill.model.layouts.api import layer_of
from jprefill.model.layouts.contract import KeyValues, Layer, LayoutSpec

__all__ = ["KeyValues", "Layer", "LayoutSpec", "layer_of"]
