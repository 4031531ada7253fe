"""With `batch_invariant` a score has the same bits alone, behind other prompts, and on blocks of the store."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from kv_batches import Segment, make_batch, moves
from tiny import CONFIG, SETTINGS, make_model, tokens

from jprefill.errors import ConfigError
from jprefill.kvstore.device_pool import DevicePool
from jprefill.model.llama import flatten
from jprefill.model.runner import Runner
from jprefill.pallas.attention.grid import key_block

BUCKETS, BLOCK_SIZE, NUM_BLOCKS = (256, 1024), 32, 32
DTYPES = ["float32", "bfloat16"]


def make(dtype, buckets, **changes):
    """Chunks of 256 tokens, a whole block of keys."""
    settings = replace(SETTINGS, dtype=dtype, chunk_size=256, batch_invariant=True, **changes)
    weights = {name: leaf.astype(dtype) for name, leaf in flatten(make_model()).items()}
    return Runner(CONFIG, weights, settings, buckets)


@cache
def runner_of(dtype, layout):
    runner = make(dtype, BUCKETS, layout=layout)
    runner.pool = DevicePool.create(CONFIG, dtype, BLOCK_SIZE, NUM_BLOCKS, BUCKETS[-1])
    return runner


def score(runner, segments, **changes):
    num_tokens = sum(len(segment.token_ids) for segment in segments)
    bucket = next(b for b in runner.buckets if b >= num_tokens)
    return runner.run(make_batch(segments, bucket, **changes)).pair_logprobs.reshape(-1, 3)


@pytest.mark.parametrize(
    ("dtype", "layout"), [("float32", "stream"), ("bfloat16", "stream"), ("bfloat16", "hybrid"), ("float32", "full")]
)
def test_alone_packed_and_cached_have_the_same_bits(dtype, layout):
    runner = runner_of(dtype, layout)
    assert runner.grid == 256
    rng = np.random.default_rng(0)
    for length, other_length in ((257, 1), (300, 77), (511, 256), (256, 300)):
        prompt, other, third = tokens(rng, length), tokens(rng, other_length), tokens(rng, 100)
        [alone] = score(runner, [Segment(prompt, 0)])
        start = -(-other_length // 256) * 256
        packed = score(runner, [Segment(other, 0), Segment(prompt, start)])
        np.testing.assert_array_equal(packed[1], alone)
        if start == 256:
            packed = score(runner, [Segment(other, 0), Segment(prompt, 256), Segment(third, 768)])
            np.testing.assert_array_equal(packed[1], alone)
            np.testing.assert_array_equal(packed[2], score(runner, [Segment(third, 0)])[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_on_loaded_blocks_has_the_same_bits(dtype):
    runner = runner_of(dtype, "stream")
    rng = np.random.default_rng(1)
    prompt, other = tokens(rng, 400), tokens(rng, 60)
    blocks = [9, 3, 30, 4, 1, 0, 12, 7]
    rows = [BLOCK_SIZE * i for i in range(8)]
    [whole] = score(runner, [Segment(prompt, 0)], keeps=moves(blocks, rows))
    # Rows that end where the grid does may lie anywhere on it; others go on where the loaded ones end.
    for first_row, suffix_row, strangers in ((0, 256, []), (256, 768, [Segment(other, 0)]), (512, 0, [])):
        loads = moves(blocks, [first_row + row for row in rows])
        suffix = Segment(prompt[256:], suffix_row, 256, prefix=(first_row, first_row + 256))
        segments = sorted([*strangers, suffix], key=lambda segment: segment.kv_row)
        np.testing.assert_array_equal(score(runner, segments, loads=loads)[-1], whole)
    loads = moves(blocks[:5], [256 + row for row in rows[:5]])
    np.testing.assert_array_equal(score(runner, [Segment(prompt[160:], 416, 160, self_lo=256)], loads=loads)[0], whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_items_have_the_same_bits_however_many_ride_along(dtype):
    """More reads than one head call takes, each of which is the same small product."""
    runner = runner_of(dtype, "stream")
    rng = np.random.default_rng(2)
    prefix, item = tokens(rng, 256), tokens(rng, 30)
    alone = score(runner, [Segment(prefix, 0, is_read=False), Segment(item, 256, 256, prefix=(0, 256))])[0]
    first, second = tokens(rng, 5), tokens(rng, 200)
    many = [
        Segment(prefix, 0, is_read=False),
        Segment(first, 256, 256, prefix=(0, 256)),
        Segment(item, 512, 256, prefix=(0, 256)),
        Segment(second, 768, 256, prefix=(0, 256)),
    ]
    np.testing.assert_array_equal(score(runner, many)[1], alone)


def test_many_reads_have_the_same_bits_as_one():
    runner = runner_of("bfloat16", "stream")
    prompt = tokens(np.random.default_rng(3), 200)
    [last] = score(runner, [Segment(prompt, 0)])
    batch = make_batch([Segment(prompt, 0)], 256)
    rows = np.arange(150, 200, dtype=np.int32)
    pairs = np.repeat(np.arange(50, dtype=np.int32), 3)
    many = replace(batch, read_rows=rows, pair_rows=pairs, pair_ids=np.tile(batch.pair_ids, 50))
    np.testing.assert_array_equal(runner.run(many).pair_logprobs[-3:], last)


def test_what_cannot_keep_its_bits_is_refused():
    with pytest.raises(ConfigError, match=r"buckets=\(128, 512\) with batch_invariant: .*at least chunk_size=256"):
        make("float32", (128, 512))
    with pytest.raises(ConfigError, match=r"attention='reference' with batch_invariant: .*xla, triton, mosaic"):
        make("float32", (256,), attention="reference")


@pytest.mark.parametrize(
    ("implementation", "dtype", "head_dim", "kind", "expected"),
    [
        ("xla", "bfloat16", 64, "cpu", 256),
        ("triton", "bfloat16", 128, "NVIDIA L4", 64),
        ("triton", "bfloat16", 128, "NVIDIA H100 80GB HBM3", 128),
        ("triton", "float32", 128, "NVIDIA L4", 16),
        ("triton", "float16", 200, "NVIDIA H100 80GB HBM3", 64),
        ("mosaic", "bfloat16", 256, "NVIDIA H100 80GB HBM3", 64),
    ],
)
def test_the_grid_holds_every_tile(implementation, dtype, head_dim, kind, expected):
    assert key_block(implementation, head_dim=head_dim, dtype=dtype, device_kind=kind) == expected


def test_heads_without_a_kernel_have_no_grid():
    with pytest.raises(ConfigError, match=r"mosaic.*float32"):
        key_block("mosaic", head_dim=128, dtype="float32", device_kind="NVIDIA H100 80GB HBM3")
