"""Which programs a pass is made of: the functions, and the shapes of their arguments. Nothing is compiled here.

    embed      token ids -> x, rope angles                         per bucket
    layer      x, kv -> x, kv        called once per layer         per bucket
    fill_kv    x, kv -> kv           the last layer's first loop   per bucket, layout `stream`
    read_R     R rows of x -> log-probabilities                    per bucket and head size

The KV buffer is the runner's, as long as the longest bucket for all of them, and goes from pass to pass. What moves
blocks of the prefix store in and out of it stands in `kvstore.device_pool`.

Every argument is kept, used or not: a donated buffer that one layout does not read must still be given back in place,
and the compiler's memory figures must hold for the arguments that the runner really passes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import stages
from jax.sharding import Sharding
from jaxtyping import Array, Float, Int32

from jprefill.config import DType, Layout
from jprefill.model import heads
from jprefill.model.layer import Rows
from jprefill.model.layouts import KeyValues, LayoutSpec, layer_of
from jprefill.model.layouts.stream import fill_kv
from jprefill.model.rope import Angles, angles_at
from jprefill.model.weights import head_shape, layer_leaves
from jprefill.pallas.attention import KeyRanges


@dataclass(frozen=True)
class HeadSize:
    """One head call reads `num_rows` rows and `num_pairs` (row, id) pairs."""

    num_rows: int
    num_pairs: int

    @property
    def name(self) -> str:
        """Of the program that makes this call."""
        return f"read_{self.num_rows}"


# A single decision must not pay for 64 rows of the vocabulary; a long continuation must not pay 8 calls instead of 1.
HEAD_SIZES = (HeadSize(8, 512), HeadSize(64, 4096))


@dataclass(frozen=True)
class DeclaredProgram:
    """A function and what it will be called with.

    Attributes:
      arguments: abstract arrays, one tree per parameter.
      donated: numbers of the parameters whose memory the results take.
      weights: numbers of the parameters that are weights.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()

    def trace(self) -> stages.Traced:
        """Traces it for the arguments; lower and compile what comes back."""
        jitted = jax.jit(self.function, donate_argnums=self.donated, keep_unused=True)
        return jitted.trace(*self.arguments)

    @property
    def weight_bytes(self) -> int:
        """Size of the arguments that are weights."""
        leaves = jax.tree.leaves([self.arguments[number] for number in self.weights])
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def declare(
    spec: LayoutSpec,
    layout: Layout,
    dtype: DType,
    bucket: int,
    kv_rows: int | None = None,
    *,
    sharding: Sharding | None = None,
) -> dict[str, DeclaredProgram]:
    """The programs of one bucket by name.

    Args:
      dtype: of activations and of weights that are not quantised.
      bucket: T in tokens: a multiple of `spec.chunk_size`, or below one chunk and walked in one piece.
      kv_rows: S, the KV buffer's rows, `bucket` or more; None: `bucket`.
      sharding: where the arguments will lie; None: the default device. A device to compile for need not exist.
    """
    spec = replace(spec, chunk_size=min(spec.chunk_size, bucket))
    shapes = _Shapes(spec, jnp.dtype(dtype), bucket, kv_rows or bucket, sharding)
    layer_arguments = (shapes.x, shapes.kv, shapes.layer, shapes.rows, shapes.scalar)
    programs = {
        "embed": DeclaredProgram(
            partial(embed, spec), (shapes.table, shapes.token_ids, shapes.rows_without_angles), weights=(0,)
        ),
        "layer": DeclaredProgram(partial(layer_of(layout), spec), layer_arguments, donated=(0, 1), weights=(2,)),
    }
    if layout == "stream":
        programs["fill_kv"] = DeclaredProgram(partial(fill_kv, spec), layer_arguments, donated=(1,), weights=(2,))
    for size in HEAD_SIZES:
        reads = shapes.reads(size)
        if layout == "stream":
            arguments = (shapes.x, shapes.kv, shapes.layer, shapes.head, shapes.rows, reads)
            programs[size.name] = DeclaredProgram(partial(heads.read_last_layer, spec), arguments, weights=(2, 3))
        else:
            arguments = (shapes.x, shapes.head, reads)
            programs[size.name] = DeclaredProgram(partial(heads.read_hidden, spec), arguments, weights=(1,))
    return programs


def embed(
    spec: LayoutSpec, table: Float[Array, "V D"], token_ids: Int32[Array, " T"], rows: Rows
) -> tuple[Float[Array, "T D"], Rows]:
    """What a pass starts from: rows of the table, and the rope angles."""
    if spec.keeps_angles:
        rows = rows._replace(angles=angles_at(rows.positions, spec.config.rope, spec.config.head_dim))
    return jnp.take(table, token_ids, axis=0), rows


class _Shapes:
    """Abstract arguments of one bucket's programs."""

    def __init__(self, spec: LayoutSpec, dtype: jnp.dtype, bucket: int, kv_rows: int, sharding: Sharding | None):
        config = spec.config

        # `Any`: they stand where the programs' arguments are declared arrays.
        def floats(*shape: int, dtype: jnp.dtype = dtype) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        def ints(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)

        self.table = floats(config.vocab_size, config.embed_dim)
        self.token_ids = ints(bucket)
        self.scalar = ints()
        self.x = floats(bucket, config.embed_dim)
        buffer = floats(kv_rows, config.num_kv_heads, config.head_dim)
        self.kv = KeyValues(buffer, buffer)
        leaves = layer_leaves(config, dtype, spec.quantization)
        self.layer = {name: floats(*leaf.shape, dtype=leaf.dtype) for name, leaf in leaves.items()}
        self.head = heads.HeadWeights(floats(config.embed_dim), floats(*head_shape(config)))
        self.rows_without_angles = Rows(ints(bucket), KeyRanges(*[ints(bucket)] * 4))
        self.rows = self.rows_without_angles
        if spec.keeps_angles:
            half = floats(bucket, config.head_dim // 2, dtype=jnp.dtype(jnp.float32))
            self.rows = self.rows._replace(angles=Angles(half, half))
        self._ints = ints

    def reads(self, size: HeadSize) -> heads.Reads:
        """Arguments of a head call."""
        return heads.Reads(self._ints(size.num_rows), self._ints(size.num_pairs), self._ints(size.num_pairs))
