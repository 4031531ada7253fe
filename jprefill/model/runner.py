"""Runs one batch on the device: embed, L layer programs, head. The engine thread alone calls it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jprefill.config import DType, EngineConfig
from jprefill.errors import ConfigError
from jprefill.kvstore.device_pool import DevicePool, MoveTable
from jprefill.model.config import ModelConfig
from jprefill.model.declared import HEAD_SIZES, HeadSize
from jprefill.model.heads import HeadWeights, Reads, RowScores
from jprefill.model.layer import LayerWeights, Rows
from jprefill.model.layouts import KeyValues, LayoutSpec
from jprefill.model.programs import BucketPrograms, Programs
from jprefill.model.weights import EMBED, FINAL_NORM, head_name, layer_leaves, layer_name, quantization_of
from jprefill.pallas.attention import KeyRanges
from jprefill.pallas.attention.grid import key_block
from jprefill.pallas.attention.selection import Heads, select_for_device
from jprefill.pallas.device import default_chunk_size
from jprefill.types import Batch, BatchScores, BlockMoves


class HeadCall(NamedTuple):
    """One call of the head: which slice of the batch's pairs it serves, from which read row on."""

    size: HeadSize
    first_row: int
    pairs: slice


class Runner:
    """Weights on the device and the executables that use them.

    Invariant: `run` compiles nothing; a batch that fits no bucket never gets here (`Engine.submit` refused it).

    Attributes:
      grid: KV rows on which cached prefixes and segments must start (see `scheduler.pieces`); 1 but for
        `batch_invariant`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, jax.Array],
        settings: EngineConfig,
        buckets: tuple[int, ...],
        *,
        pool: DevicePool | None = None,
        progress: bool = False,
    ):
        """Compiles everything but the pool's programs.

        Args:
          pool: where `Batch.loads` come from and `Batch.keeps` go to; its `kv_rows` is the last bucket.

        Raises:
          ConfigError: weights, attention or buckets that the settings cannot go with.
        """
        self.config = config
        self.pool = pool
        self.vocab_size = config.vocab_size
        spec = layout_spec(config, weights, settings)
        self.grid = _grid(spec, settings, buckets) if settings.batch_invariant else 1
        # The same row in a call of another size is another product, with other bits.
        self._head_sizes = HEAD_SIZES[:1] if settings.batch_invariant else HEAD_SIZES
        leaves = layer_leaves(config, np.dtype(settings.dtype), spec.quantization)
        self._layers = [_layer_weights(weights, layer, leaves) for layer in range(config.num_layers)]
        self._table = weights[EMBED]
        self._head = HeadWeights(weights[FINAL_NORM], weights[head_name(config)])
        self.programs = Programs.compile(spec, settings.layout, settings.dtype, buckets, progress=progress)
        self.buckets = self.programs.buckets
        self.dtype: DType = settings.dtype
        self._kv: KeyValues | None = self.programs.new_kv()

    def run(
        self,
        batch: Batch,
        meanwhile: Callable[[], None] | None = None,
        between_layers: Callable[[float], bool] | None = None,
    ) -> BatchScores | None:
        """One forward pass. Blocks until the scores are on the host.

        Between two layers all that lives of a pass are its activations and rows: the KV buffer is free, and other
        passes may run.

        Args:
          meanwhile: called once everything is dispatched, while the device works. It may write to the pool: what it
            writes comes after the pass.
          between_layers: called with the share of the layers that are left whenever one is done; it may call `run`.
            False ends the pass there: there are no scores.

        Raises:
          jax.errors.JaxRuntimeError: the device failed. The next pass gets a new KV buffer; blocks that this one was
            to keep hold anything, and the pool needs a `reset` if there were such blocks.
        """
        programs = self.programs.of(len(batch.token_ids))
        num_chunks = jax.device_put(np.int32(-(-batch.num_tokens // programs.chunk_size)))
        x, rows = programs.embed(self._table, batch.token_ids, _rows(batch))
        pool, loads, keeps = self.pool, self._table_of(batch.loads), self._table_of(batch.keeps)
        kv = self._take_kv()
        for number, layer in enumerate(self._layers):
            if number and between_layers is not None:
                jax.block_until_ready(x)
                self._kv = kv
                if not between_layers(1 - number / len(self._layers)):
                    return None
                kv = self._take_kv()
            if pool is not None and loads is not None:
                kv = pool.load(kv, number, loads)
            if programs.fill_kv is not None and number == self.config.num_layers - 1:
                kv = programs.fill_kv(x, kv, layer, rows, num_chunks)
            else:
                x, kv = programs.layer(x, kv, layer, rows, num_chunks)
            if pool is not None and keeps is not None:
                pool.keep(number, kv, keeps)
        scores = self._read(programs, batch, x, kv, rows, meanwhile)
        # Attention may multiply stale rows by 0, which only finite ones survive.
        self._kv = kv if np.isfinite(scores.top_logprobs).all() else None
        return scores

    def warm_up(self) -> None:
        """Runs every executable once, so that the first request finds the device as later ones do."""
        if self.pool is not None:
            self._kv = self.pool.warm_up(self._take_kv())
        for bucket in self.buckets:
            for size in self._head_sizes:
                self.run(_one_token(bucket, size.num_rows))

    def _take_kv(self) -> KeyValues:
        """The KV buffer. A pass that fails does not bring it back: its programs took it, and the next makes another."""
        kv, self._kv = self._kv, None
        return self.programs.new_kv() if kv is None else kv

    def _table_of(self, moves: BlockMoves) -> MoveTable | None:
        if not len(moves.blocks):
            return None
        if self.pool is None:
            raise ValueError("the batch moves blocks, but the runner has no pool")
        return self.pool.table(moves)

    def _read(
        self,
        programs: BucketPrograms,
        batch: Batch,
        x: jax.Array,
        kv: KeyValues,
        rows: Rows,
        meanwhile: Callable[[], None] | None,
    ) -> BatchScores:
        """Head calls over all read rows; all are dispatched before the first is awaited."""
        calls = list(_head_calls(batch, self._head_sizes))
        if programs.fill_kv is None:
            answers = [programs.read[call.size](x, self._head, _reads(batch, call)) for call in calls]
        else:
            last = self._layers[-1]
            answers = [programs.read[call.size](x, kv, last, self._head, rows, _reads(batch, call)) for call in calls]
        if meanwhile is not None:
            meanwhile()
        return _gather(batch, calls, answers)


def layout_spec(config: ModelConfig, weights: dict[str, jax.Array], settings: EngineConfig) -> LayoutSpec:
    """What the programs are compiled for on the default device.

    Raises:
      ConfigError: the weights are quantised in another way than the settings say.
    """
    quantization = quantization_of(weights)
    if settings.quantization not in (None, quantization):
        raise ConfigError(f"quantization={settings.quantization!r}: the weights came as {quantization!r}")
    heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim, settings.dtype)
    return LayoutSpec(
        config,
        settings.chunk_size or default_chunk_size(),
        settings.attention or select_for_device(heads),
        keeps_angles=jax.default_backend() == "cpu",
        quantization=quantization,
    )


def _grid(spec: LayoutSpec, settings: EngineConfig, buckets: tuple[int, ...]) -> int:
    """The KV rows on which `spec.attention` sums, where the buckets allow scores that never differ by a bit."""
    kind = jax.local_devices()[0].device_kind
    grid = key_block(spec.attention, head_dim=spec.config.head_dim, dtype=settings.dtype, device_kind=kind)
    if min(buckets) < spec.chunk_size or max(buckets) % grid:
        raise ConfigError(
            f"buckets={buckets} with batch_invariant: each must be at least chunk_size={spec.chunk_size}, the last a "
            f"multiple of {grid}"
        )
    return grid


def _layer_weights(weights: dict[str, jax.Array], layer: int, leaves: Iterable[str]) -> LayerWeights:
    """The flat leaves of one layer, in the order its program was compiled for."""
    return {leaf: weights[layer_name(layer, leaf)] for leaf in leaves}


def _rows(batch: Batch) -> Rows:
    # `_make`: host arrays where device arrays are declared; the call of `embed` moves them.
    ranges = KeyRanges._make((batch.prefix_lo, batch.prefix_hi, batch.self_lo, batch.self_pos))
    return Rows._make((batch.positions, ranges, None))


def _head_calls(batch: Batch, sizes: Sequence[HeadSize]) -> Iterator[HeadCall]:
    """Cuts the pairs into calls; a row with more targets than a call holds is read again by the next one."""
    small, large = sizes[0], sizes[-1]
    start, num_pairs = 0, len(batch.pair_ids)
    while start < num_pairs:
        first_row = int(batch.pair_rows[start])
        is_small = len(batch.read_rows) - first_row <= small.num_rows and num_pairs - start <= small.num_pairs
        size = small if is_small else large
        end_of_rows = int(np.searchsorted(batch.pair_rows, first_row + size.num_rows))
        end = min(start + size.num_pairs, end_of_rows)
        yield HeadCall(size, first_row, slice(start, end))
        start = end


def _reads(batch: Batch, call: HeadCall) -> Reads:
    """The call's arguments, padded to its size."""
    rows = batch.read_rows[call.first_row : call.first_row + call.size.num_rows]
    pair_rows = batch.pair_rows[call.pairs] - np.int32(call.first_row)
    pair_ids = batch.pair_ids[call.pairs]
    num_pairs = call.size.num_pairs
    # `_make`: host arrays, as in `_rows`.
    return Reads._make((_padded(rows, call.size.num_rows), _padded(pair_rows, num_pairs), _padded(pair_ids, num_pairs)))


def _one_token(bucket: int, num_rows: int) -> Batch:
    """The smallest batch: token 0, read `num_rows` times."""
    zeros = np.zeros(bucket, np.int32)
    self_pos = np.full(bucket, -1, np.int32)
    self_pos[0] = 0
    rows = np.arange(num_rows, dtype=np.int32)
    return Batch(zeros, zeros, zeros, zeros, zeros, self_pos, 1, np.zeros_like(rows), rows, np.zeros_like(rows))


def _padded(values: np.ndarray, length: int) -> np.ndarray:
    return np.pad(values, (0, length - len(values)))


def _gather(batch: Batch, calls: list[HeadCall], answers: list[RowScores]) -> BatchScores:
    """Brings the answers to the host and puts them where the batch expects them."""
    scores = BatchScores(
        pair_logprobs=np.empty(len(batch.pair_ids), np.float32),
        top_ids=np.empty(len(batch.read_rows), np.int32),
        top_logprobs=np.empty(len(batch.read_rows), np.float32),
    )
    for call, answer in zip(calls, jax.device_get(answers), strict=True):
        num_pairs = call.pairs.stop - call.pairs.start
        rows = slice(call.first_row, min(call.first_row + call.size.num_rows, len(batch.read_rows)))
        num_rows = rows.stop - rows.start
        scores.pair_logprobs[call.pairs] = answer.pair_logprobs[:num_pairs]
        scores.top_ids[rows] = answer.top_ids[:num_rows]
        scores.top_logprobs[rows] = answer.top_logprobs[:num_rows]
    return scores
