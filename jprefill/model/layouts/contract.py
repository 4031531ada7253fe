"""The contract of a layer program."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Array, Float, Int32

from jprefill.config import Quantization
from jprefill.model.config import ModelConfig
from jprefill.model.layer import LayerWeights, Rows


class KeyValues(NamedTuple):
    """One layer's KV buffer. Every layer of every pass reuses it: one layer of KV is alive, never L.

    Rows that a pass neither writes nor loads hold what an earlier pass left there.
    """

    k: Float[Array, "S K H"]
    v: Float[Array, "S K H"]


@dataclass(frozen=True)
class LayoutSpec:
    """What a layer program is compiled for: static, so a change of any field is another executable.

    `keeps_angles`: rope angles are computed once per pass and kept, not once per layer (see `Rows`).
    `quantization`: what the projection matrices are; see `weights.layer_leaves`.
    `static_chunks`: layout `stream` visits every chunk of the bucket, with a trip count known while compiling. The
    naive twin of the traced count: the numbers are the same, the work follows the bucket (`bench/gpu` times both).
    """

    config: ModelConfig
    chunk_size: int
    attention: str
    keeps_angles: bool = False
    quantization: Quantization | None = None
    static_chunks: bool = False


Layer = Callable[
    [LayoutSpec, Float[Array, "T D"], KeyValues, LayerWeights, Rows, Int32[Array, ""]],
    tuple[Float[Array, "T D"], KeyValues],
]
