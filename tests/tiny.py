"""Tiny real models for tests: random weights through the whole run-time path."""

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
from flax import nnx

from jprefill.config import EngineConfig
from jprefill.engine import Engine
from jprefill.kvstore.none import NoStore
from jprefill.model.config import ModelConfig, RopeConfig
from jprefill.model.llama import Llama, flatten
from jprefill.model.runner import Runner
from jprefill.scheduler.pieces import Piece
from jprefill.scheduler.queue import PendingRequest
from jprefill.types import Item, ScoreRequest

CONFIG = ModelConfig(
    vocab_size=300,
    num_layers=3,
    embed_dim=96,
    mlp_dim=160,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    norm_eps=1e-5,
    max_position=1024,
    rope=RopeConfig(theta=10_000.0),
    is_tied=True,
)
UNTIED = replace(
    CONFIG,
    is_tied=False,
    has_attention_bias=True,
    has_output_bias=True,
    has_mlp_bias=True,
    num_heads=4,
    num_kv_heads=4,
    rope=RopeConfig(theta=5e5, scaling="llama3", factor=8.0, original_max_len=128),
)
SETTINGS = EngineConfig(dtype="float32", chunk_size=64, compilation_cache="")


def make_model(config=CONFIG, seed=0):
    return Llama(config, nnx.Rngs(seed))


def make_runner(config=CONFIG, buckets=(256, 1024), **changes):
    settings = replace(SETTINGS, **changes)
    return Runner(config, flatten(make_model(config)), settings, buckets)


def make_engine(runner, **changes):
    return Engine(runner, replace(SETTINGS, **changes), model_name="tiny", max_model_len=runner.config.max_position)


def tokens(rng, length, vocab_size=300):
    return rng.integers(0, vocab_size, length).astype(np.int32)


def label_item(token_ids, ids=(5, 17, 250)):
    """Reads `ids` after the last token."""
    return Item(token_ids, np.array([len(token_ids) - 1], np.int32), np.array([ids], np.int32))


def prompt(token_ids, ids=(5, 17, 250)):
    return ScoreRequest(np.zeros(0, np.int32), (label_item(token_ids, ids),))


def whole_piece(request):
    """All of a request in one pass, with no store."""
    store = NoStore()
    keys = store.keys(request)
    pending = PendingRequest(request, Future(), keys)
    return Piece(pending, 0, len(request.items), store.lease(keys, 0), store.block_size)


def logprobs(result):
    return np.concatenate([item.logprobs.reshape(-1) for item in result.items])
