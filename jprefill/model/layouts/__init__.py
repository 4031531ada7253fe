"""How a layer program walks its tokens: three layouts behind one contract.

    layer(x[T,D], kv, weights, rows, num_chunks) -> x, kv

`x` and `kv` are donated and come back in place. `T` is the bucket; the first `num_chunks * chunk_size` rows are real.
Rows beyond may hold anything finite. `kv` has its own rows, the same for every bucket (see `types.Batch`): a layer
writes those of its tokens, finds cached ones there already, and leaves the others as they are.

    stream   two loops over chunks; scratch memory is one chunk               the default
    hybrid   attention whole, token-wise parts chunk by chunk (lax.map)       PrefillOnly, arXiv 2505.07203
    full     everything at once                                               the plain twin
"""

from jprefill.model.layouts.api import layer_of
from jprefill.model.layouts.buffer import empty_kv
from jprefill.model.layouts.contract import KeyValues, Layer, LayoutSpec

__all__ = ["KeyValues", "Layer", "LayoutSpec", "empty_kv", "layer_of"]
