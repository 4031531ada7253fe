"""Whole passes of jprefill's own `Runner` over random weights of a model's shape."""

import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu.parity_weights import parity_tokens, parity_weights
from jprefill.config import EngineConfig
from jprefill.kvstore.none import NoStore
from jprefill.model.config import ModelConfig, RopeConfig
from jprefill.model.layer import Rows
from jprefill.model.layouts import KeyValues, LayoutSpec, layer_of
from jprefill.model.programs import Programs
from jprefill.model.runner import Runner, layout_spec
from jprefill.model.weights import EMBED, layer_name, layer_shapes, weight_shapes
from jprefill.pallas.attention import KeyRanges
from jprefill.scheduler.packer import pack
from jprefill.scheduler.pieces import Piece
from jprefill.scheduler.queue import PendingRequest
from jprefill.types import Batch, Item, ScoreRequest

LABEL_IDS = (5, 17)


class LoadedModel:
    """Weights, executables and batches of one model. Used by one thread."""

    def __init__(
        self, model: dict[str, Any], settings: EngineConfig, buckets: tuple[int, ...], *, compiles_first: bool
    ):
        self.config = model_config(model)
        self.settings = settings
        started = time.perf_counter()
        # Only the dtype of the weights decides, so the programs can be compiled before there are any.
        abstract: Any = {name: jax.ShapeDtypeStruct(s, jnp.bfloat16) for name, s in weight_shapes(self.config).items()}
        self.spec = layout_spec(self.config, abstract, settings)
        if compiles_first and jax.default_backend() != "cpu":
            # Autotuning takes device memory for its trials. Done once before there are weights, and found in the
            # compilation cache by `Runner`, it stays out of the peak that passes are measured by.
            Programs.compile(self.spec, settings.layout, settings.dtype, buckets)
        self.compile_s = time.perf_counter() - started
        self.weights = random_weights(self.config)
        self.weights_bytes = sum(array.nbytes for array in self.weights.values())
        self.runner = Runner(self.config, self.weights, settings, buckets)
        self.load_s = time.perf_counter() - started
        self.peak_before_bytes = peak_bytes()

    @property
    def programs(self) -> Programs:
        """The executables by bucket."""
        return self.runner.programs

    def batch(self, count: int, length: int, bucket: int) -> Batch:
        """`count` random prompts of `length` tokens, two labels read after the last token of each."""
        return packed_prompts(count, length, bucket, self.config.vocab_size)

    def layer(self, index: int) -> dict[str, jax.Array]:
        """The weights of layer number `index` modulo the number of layers."""
        index %= self.config.num_layers
        return {leaf: self.weights[layer_name(index, leaf)] for leaf in layer_shapes(self.config)}

    def start(self, batch: Batch) -> tuple[jax.Array, KeyValues, Rows]:
        """What the first layer of a pass is given."""
        ranges = KeyRanges._make((batch.prefix_lo, batch.prefix_hi, batch.self_lo, batch.self_pos))
        rows = Rows._make((batch.positions, ranges, None))
        x, rows = self.programs.of(len(batch.token_ids)).embed(self.weights[EMBED], batch.token_ids, rows)
        return x, self.programs.new_kv(), rows

    def planned_bytes(self, bucket: int) -> int:
        """What a pass of this bucket holds at most, weights included, by the compiler's figures."""
        return self.weights_bytes + self.programs.of(bucket).pass_bytes


def peak_bytes() -> int | None:
    """Most device memory this process has held at once; None where the device does not say."""
    stats = jax.devices()[0].memory_stats()
    return stats and stats.get("peak_bytes_in_use")


def model_config(model: dict[str, Any]) -> ModelConfig:
    """`sizes.ModelShape` as jprefill's config, with the rope of Llama 3.1."""
    shape = {key: value for key, value in model.items() if key != "rope_theta"}
    rope = RopeConfig(model["rope_theta"], "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    return ModelConfig(**shape, max_position=131_072, rope=rope)


def settings_for(chunk_size: int, attention: str | None, dtype: str = "bfloat16") -> EngineConfig:
    """The engine's settings for a run."""
    return EngineConfig(dtype=dtype, chunk_size=chunk_size, attention=attention)  # pyright: ignore[reportArgumentType]


def random_weights(config: ModelConfig) -> dict[str, jax.Array]:
    """Spread weights, made on the device: zeros would run faster than a real model does.

    Largest first, so that what the generator needs besides is gone before the device is full.
    """
    make = jax.jit(_spread, static_argnums=(1,))
    shapes = sorted(weight_shapes(config).items(), key=lambda item: -np.prod(item[1]))
    made = {name: make(jax.random.key(index), shape) for index, (name, shape) in enumerate(shapes)}
    return jax.block_until_ready(made)


def _spread(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    values = jax.random.normal(key, shape, jnp.bfloat16)
    return 1 + values * 0.1 if len(shape) == 1 else values * shape[-1] ** -0.5


def packed_prompts(count: int, length: int, bucket: int, vocab_size: int) -> Batch:
    """A batch as the engine packs it."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab_size, length).astype(np.int32) for _ in range(count)]
    return pack([_piece(prompt, LABEL_IDS) for prompt in prompts], bucket)


def _piece(token_ids: np.ndarray, label_ids: tuple[int, ...]) -> Piece:
    item = Item(token_ids, np.array([len(token_ids) - 1], np.int32), np.array([label_ids], np.int32))
    request, store = ScoreRequest(np.zeros(0, np.int32), (item,)), NoStore()
    keys = store.keys(request)
    return Piece(PendingRequest(request, Future(), keys), 0, 1, store.lease(keys, 0), store.block_size)


def parity(model: dict[str, Any], lengths: list[int], chunk_size: int, attention: str | None) -> dict[str, Any]:
    """Log-probabilities of every token after the last token of prompts that the peer reads too, bfloat16."""
    config = model_config(model)
    weights = parity_weights(weight_shapes(config))
    on_device = {name: jnp.asarray(values, jnp.bfloat16) for name, values in weights.items()}
    bucket = -(-max(lengths) // chunk_size) * chunk_size
    runner = Runner(config, on_device, settings_for(chunk_size, attention), (bucket,))
    label_ids = tuple(range(0, config.vocab_size, max(1, config.vocab_size // 64)))
    logprobs = []
    for length in lengths:
        scores = runner.run(pack([_piece(parity_tokens(length, config.vocab_size), label_ids)], bucket))
        logprobs.append(scores.pair_logprobs.tolist())
    return {"label_ids": label_ids, "logprobs": logprobs}


class LayerProgram:
    """One layer program beside the runner's own: another chunk size, trip count, attention or layout."""

    def __init__(self, model: LoadedModel, batch: Batch, layout: str, **changes: Any):
        self._model = model
        spec: LayoutSpec = replace(model.spec, **changes)
        program = partial(layer_of(layout), spec)  # pyright: ignore[reportArgumentType]
        self._num_chunks = jnp.int32(-(-batch.num_tokens // spec.chunk_size))
        self._x, self._kv, self._rows = model.start(batch)
        arguments = (self._x, self._kv, model.layer(0), self._rows, self._num_chunks)
        started = time.perf_counter()
        self._compiled = jax.jit(program, donate_argnums=(0, 1)).lower(*arguments).compile()
        self.compile_s = time.perf_counter() - started
        memory = self._compiled.memory_analysis()
        self.temp_bytes = memory.temp_size_in_bytes if memory else None

    def run(self, num_layers: int) -> tuple[float, float]:
        """Calls it for `num_layers` layers: seconds until the host was free, and until the device was done."""
        started = time.perf_counter()
        for index in range(num_layers):
            self._x, self._kv = self._compiled(
                self._x, self._kv, self._model.layer(index), self._rows, self._num_chunks
            )
        host_s = time.perf_counter() - started
        jax.block_until_ready(self._x)
        return host_s, time.perf_counter() - started
