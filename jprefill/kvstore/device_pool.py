"""The device pool: per layer, arrays of KV blocks. Which block holds what stands in `index.py`, never here.

    load    blocks -> rows of a layer's KV buffer      before the layer runs
    keep    rows of a layer's KV buffer -> blocks      after the layer ran; what is not kept is discarded
    read    blocks, all layers -> host                 on their way to a lower tier
    write   host -> blocks, all layers                 and back

Compiled once for an engine: the KV buffer is the same for every bucket. A pass that has nothing to move calls nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, stages
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import Array, Float, Int32, Shaped

from jprefill.config import DType
from jprefill.model.config import ModelConfig
from jprefill.model.declared import DeclaredProgram
from jprefill.model.layouts import KeyValues, empty_kv
from jprefill.model.programs import compile_all
from jprefill.types import BlockMoves

# Blocks per step of a loop: a GPU is slow at loops with small bodies, a CPU at blocks that only fill a group.
GROUP, CPU_GROUP = 64, 16
TRANSFER_GROUP = 8  # blocks of all layers per transfer: 16 MiB of Llama-3.1-8B
PINNED = "pinned_host"

Payloads = Shaped[np.ndarray, "_ L 2 block_size K H"]


class MoveTable(NamedTuple):
    """`BlockMoves`, padded with blocks and rows that do not exist and that all differ."""

    blocks: Int32[Array, " _"]
    rows: Int32[Array, " _"]
    num_groups: Int32[Array, ""]


@dataclass(frozen=True)
class PoolShape:
    """The static sizes of a pool's programs. `group`: blocks per step of a loop."""

    num_layers: int
    num_blocks: int
    block_size: int
    kv_rows: int
    group: int = GROUP

    @property
    def table_length(self) -> int:
        """The most blocks that one buffer can hold, in whole groups."""
        return max(1, -(-(self.kv_rows // self.block_size) // self.group)) * self.group


def block_bytes(config: ModelConfig, dtype: DType, block_size: int) -> int:
    """Bytes of one block: keys and values of all layers."""
    return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize


class DevicePool:
    """Blocks of KV on the device.

    Invariant: every array is in place; programs that write take it donated and give it back. Used by the engine thread
    alone. After a pass that failed between `keep` calls some arrays may be lost: `reset` makes new ones.
    """

    def __init__(self, config: ModelConfig, dtype: DType, shape: PoolShape, programs: dict[str, stages.Compiled]):
        self.num_blocks = shape.num_blocks
        self.block_size = shape.block_size
        self.kv_rows = shape.kv_rows
        self.block_bytes = block_bytes(config, dtype, shape.block_size)
        self._shape = shape
        self._programs = programs
        self._payload = np.dtype(dtype), (config.num_layers, 2, shape.block_size, config.num_kv_heads, config.head_dim)
        self._layers: list[KeyValues] = []
        self._pinned = _pinned_sharding()
        self.reset()

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        dtype: DType,
        block_size: int,
        num_blocks: int,
        kv_rows: int,
        *,
        progress: bool = False,
    ) -> "DevicePool":
        """Compiles the programs and takes the memory: `num_blocks * block_bytes(...)`.

        Args:
          kv_rows: of the KV buffer that blocks are moved to and from: the runner's last bucket.
        """
        group = CPU_GROUP if jax.default_backend() == "cpu" else GROUP
        shape = PoolShape(config.num_layers, num_blocks, block_size, kv_rows, group)
        declared = declare_pool(config, dtype, shape)
        declared["new_layer"] = DeclaredProgram(partial(_new_layer, shape, config, jnp.dtype(dtype)), ())
        lowered = {name: program.trace().lower() for name, program in declared.items()}
        return cls(config, dtype, shape, compile_all(lowered, progress=progress))

    @property
    def num_bytes(self) -> int:
        """Of all blocks."""
        return self.num_blocks * self.block_bytes

    def reset(self) -> None:
        """New arrays of zeros: what any block held is gone."""
        self._layers = []
        self._layers = [self._programs["new_layer"]() for _ in range(self._shape.num_layers)]

    def table(self, moves: BlockMoves) -> MoveTable:
        """Moves as the programs take them; made once for a pass. Blocks numbered `num_blocks` or more are dropped."""
        num_moves, length = len(moves.blocks), self._shape.table_length
        number = np.arange(length, dtype=np.int32)
        blocks, rows = self.num_blocks + number, self.kv_rows + number * self.block_size
        blocks[:num_moves] = np.where(moves.blocks < self.num_blocks, moves.blocks, blocks[:num_moves])
        rows[:num_moves] = moves.rows
        # `_make`: host arrays where device arrays are declared.
        return jax.device_put(MoveTable._make((blocks, rows, np.int32(-(-num_moves // self._shape.group)))))

    def load(self, kv: KeyValues, layer: int, moves: MoveTable) -> KeyValues:
        """The KV buffer, in place, with blocks of one layer copied to their rows."""
        return self._programs["load"](kv, self._layers[layer], moves)

    def keep(self, layer: int, kv: KeyValues, moves: MoveTable) -> None:
        """Copies rows of the KV buffer, which now holds this layer's, to their blocks."""
        self._layers[layer] = self._programs["keep"](self._layers[layer], kv, moves)

    def read(self, block_ids: Sequence[int]) -> "BlockReading":
        """Copies whole blocks, all layers, to the host. They are safe at once: later writes do not change them."""
        ids = np.asarray(block_ids, np.int32)
        parts = []
        for start in range(0, len(ids), TRANSFER_GROUP):
            group = ids[start : start + TRANSFER_GROUP]
            part = self._programs["read_blocks"](self._layers, _padded(group, 0))
            if self._pinned is not None:
                part = jax.device_put(part, self._pinned)
            part.copy_to_host_async()
            parts.append(part)
        return BlockReading(parts, len(ids), self._payload)

    def write(self, block_ids: Sequence[int], payloads: Payloads) -> None:
        """Puts payloads, as `read` gave them, into blocks. The transfer goes on after this returns."""
        ids = np.asarray(block_ids, np.int32)
        for start in range(0, len(ids), TRANSFER_GROUP):
            group = ids[start : start + TRANSFER_GROUP]
            dtype, shape = self._payload
            # A copy of our own: the transfer may read it later than the caller keeps it.
            staged = np.zeros((TRANSFER_GROUP, *shape), dtype)
            staged[: len(group)] = payloads[start : start + TRANSFER_GROUP]
            numbers = _padded(group, self.num_blocks)
            self._layers = self._programs["write_blocks"](self._layers, numbers, staged)

    def warm_up(self, kv: KeyValues) -> KeyValues:
        """Runs every program once; no block changes. Returns the buffer, of which a few rows may have changed."""
        kv = self.load(kv, 0, self.table(BlockMoves(np.zeros(1, np.int32), np.zeros(1, np.int32))))
        self.keep(0, kv, self.table(BlockMoves(np.full(1, self.num_blocks, np.int32), np.zeros(1, np.int32))))
        self.write([self.num_blocks], self.read([0]).wait())
        return kv


class BlockReading:
    """Blocks on their way to the host."""

    def __init__(self, parts: list[jax.Array], num_blocks: int, payload: tuple[np.dtype, tuple[int, ...]]):
        self._parts = parts
        self._num_blocks = num_blocks
        self._payload = payload

    def wait(self) -> Payloads:
        """The blocks in the order that was asked for. Blocks until they are there; call it once.

        Raises:
          jax.errors.JaxRuntimeError: the device failed.
        """
        dtype, shape = self._payload
        out = np.empty((self._num_blocks, *shape), dtype)
        for start, part in zip(range(0, self._num_blocks, TRANSFER_GROUP), self._parts, strict=True):
            here = out[start : start + TRANSFER_GROUP]
            here[:] = np.asarray(part)[: len(here)]
        self._parts = []  # device memory, or pinned
        return out


def declare_pool(
    config: ModelConfig, dtype: DType, shape: PoolShape, *, sharding: Sharding | None = None
) -> dict[str, DeclaredProgram]:
    """The pool's programs by name, in the form of `model.declared.declare`."""
    width = config.num_kv_heads, config.head_dim

    # `Any`: they stand where the programs' arguments are declared arrays.
    def floats(*axes: int) -> Any:
        return jax.ShapeDtypeStruct(axes, jnp.dtype(dtype), sharding=sharding)

    def ints(*axes: int) -> Any:
        return jax.ShapeDtypeStruct(axes, jnp.int32, sharding=sharding)

    kv = KeyValues(*[floats(shape.kv_rows, *width)] * 2)
    layer = KeyValues(*[floats(shape.num_blocks, shape.block_size, *width)] * 2)
    layers = [layer] * config.num_layers
    moves = MoveTable(ints(shape.table_length), ints(shape.table_length), ints())
    numbers, payload = ints(TRANSFER_GROUP), floats(TRANSFER_GROUP, config.num_layers, 2, shape.block_size, *width)
    return {
        "load": DeclaredProgram(partial(_load, shape), (kv, layer, moves), donated=(0,)),
        "keep": DeclaredProgram(partial(_keep, shape), (layer, kv, moves), donated=(0,)),
        "read_blocks": DeclaredProgram(_read_blocks, (layers, numbers)),
        "write_blocks": DeclaredProgram(_write_blocks, (layers, numbers, payload), donated=(0,)),
    }


def _new_layer(shape: PoolShape, config: ModelConfig, dtype: jnp.dtype) -> KeyValues:
    flat = empty_kv(config, dtype, shape.num_blocks * shape.block_size)
    return KeyValues(*(array.reshape(shape.num_blocks, shape.block_size, *array.shape[1:]) for array in flat))


def _load(shape: PoolShape, kv: KeyValues, layer: KeyValues, moves: MoveTable) -> KeyValues:
    def step(index: Int32[Array, ""], kv: KeyValues) -> KeyValues:
        blocks, rows = _group(shape, moves, index)

        def put(
            buffer: Float[Array, "S K H"], pool: Float[Array, "num_blocks block_size K H"]
        ) -> Float[Array, "S K H"]:
            found = jnp.take(pool, blocks, 0, mode="clip").reshape(-1, *buffer.shape[1:])
            return buffer.at[rows].set(found, mode="drop", unique_indices=True)

        return jax.tree.map(put, kv, layer)

    return lax.fori_loop(0, moves.num_groups, step, kv)


def _keep(shape: PoolShape, layer: KeyValues, kv: KeyValues, moves: MoveTable) -> KeyValues:
    def step(index: Int32[Array, ""], layer: KeyValues) -> KeyValues:
        blocks, rows = _group(shape, moves, index)

        def put(
            pool: Float[Array, "num_blocks block_size K H"], buffer: Float[Array, "S K H"]
        ) -> Float[Array, "num_blocks block_size K H"]:
            found = jnp.take(buffer, rows, 0, mode="clip").reshape(-1, *pool.shape[1:])
            return _put_blocks(pool, blocks, found)

        return jax.tree.map(put, layer, kv)

    return lax.fori_loop(0, moves.num_groups, step, layer)


def _read_blocks(layers: list[KeyValues], blocks: Int32[Array, " _"]) -> Float[Array, "_ L 2 block_size K H"]:
    parts = [jnp.stack([jnp.take(pool, blocks, 0, mode="clip") for pool in layer], 1) for layer in layers]
    return jnp.stack(parts, 1)


def _write_blocks(
    layers: list[KeyValues], blocks: Int32[Array, " _"], payload: Float[Array, "_ L 2 block_size K H"]
) -> list[KeyValues]:
    return [
        KeyValues(*(_put_blocks(pool, blocks, payload[:, number, part]) for part, pool in enumerate(layer)))
        for number, layer in enumerate(layers)
    ]


def _group(
    shape: PoolShape, moves: MoveTable, index: Int32[Array, ""]
) -> tuple[Int32[Array, " _"], Int32[Array, " _"]]:
    """The blocks of one step, and every row of each."""
    blocks, first_rows = (
        lax.dynamic_slice_in_dim(table, index * shape.group, shape.group) for table in (moves.blocks, moves.rows)
    )
    rows = first_rows[:, None] + jnp.arange(shape.block_size, dtype=jnp.int32)[None, :]
    return blocks, rows.reshape(-1)


def _put_blocks(
    pool: Float[Array, "num_blocks block_size K H"],
    blocks: Int32[Array, " _"],
    values: Float[Array, "_ block_size K H"],
) -> Float[Array, "num_blocks block_size K H"]:
    return pool.at[blocks].set(values, mode="drop", unique_indices=True)


def _padded(block_ids: Int32[np.ndarray, " _"], padding: int) -> Int32[np.ndarray, " _"]:
    """Up to a whole transfer, with numbers that differ where they must: from `padding` on."""
    missing = TRANSFER_GROUP - len(block_ids)
    return np.concatenate([block_ids, padding + np.arange(missing, dtype=np.int32)])


def _pinned_sharding() -> Sharding | None:
    """Host memory that the default device copies to without a detour; None where there is no such thing."""
    device = jax.local_devices()[0]
    if device.platform == "cpu" or PINNED not in {memory.kind for memory in device.addressable_memories()}:
        return None
    return SingleDeviceSharding(device, memory_kind=PINNED)
