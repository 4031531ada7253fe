"""Prompts on kept and loaded blocks score as if computed whole; the pool changes where it is told and nowhere else."""

from copy import copy
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kv_batches import Segment, make_batch, moves
from tiny import CONFIG, SETTINGS, make_model, tokens

from jprefill.kvstore.device_pool import CPU_GROUP, TRANSFER_GROUP, DevicePool, block_bytes
from jprefill.model.compiles import CompileCounter
from jprefill.model.llama import flatten
from jprefill.model.runner import Runner

BOUND = 5e-6  # nats; what the store must reach is 5e-5
BLOCK_SIZE, NUM_BLOCKS, KV_ROWS = 16, 40, 512
BUCKETS = (64, KV_ROWS)
LAYOUTS = ["stream", "hybrid", "full"]
SHAPE = (BLOCK_SIZE, CONFIG.num_kv_heads, CONFIG.head_dim)


@cache
def runner_of(layout):
    pool = DevicePool.create(CONFIG, "float32", BLOCK_SIZE, NUM_BLOCKS, KV_ROWS)
    return Runner(CONFIG, flatten(make_model()), replace(SETTINGS, layout=layout), BUCKETS, pool=pool)


@pytest.fixture(scope="module", params=LAYOUTS)
def runner(request):
    return runner_of(request.param)


@pytest.fixture(scope="module")
def stream():
    return runner_of("stream")


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def rows_of(blocks, first_row):
    return [first_row + BLOCK_SIZE * i for i in range(len(blocks))]


def score(runner, segments, **changes):
    """One row of log-probabilities for each segment that is read."""
    num_tokens = sum(len(segment.token_ids) for segment in segments)
    bucket = next(b for b in runner.buckets if b >= num_tokens)
    return runner.run(make_batch(segments, bucket, **changes)).pair_logprobs.reshape(-1, 3)


def keep(runner, token_ids, blocks):
    """Computes a prompt and keeps its first blocks."""
    return score(runner, [Segment(token_ids, 0)], keeps=moves(blocks, rows_of(blocks, 0)))[0]


def whole_pool(runner):
    return runner.pool.read(range(NUM_BLOCKS)).wait()


def test_a_suffix_on_loaded_blocks_scores_as_the_whole_prompt(runner, rng):
    prompt = tokens(rng, 200)
    blocks = [7, 3, 30, 4, 39, 0, 12, 9, 22, 21]
    whole = keep(runner, prompt, blocks)
    score(runner, [Segment(tokens(rng, 300), 0)])  # another pass leaves its own rows behind
    for first_row in (0, 16, 37):
        end = first_row + 160
        loads = moves(blocks, rows_of(blocks, first_row))
        behind = Segment(prompt[160:], end, 160, self_lo=first_row)
        np.testing.assert_allclose(score(runner, [behind], loads=loads)[0], whole, atol=BOUND)
        apart = Segment(prompt[160:], end + 50, 160, prefix=(first_row, end))
        np.testing.assert_allclose(score(runner, [apart], loads=loads)[0], whole, atol=BOUND)


def test_prompts_share_one_loaded_prefix_and_strangers_ride_along(runner, rng):
    prefix, other = tokens(rng, 64), tokens(rng, 96)
    keep(runner, prefix, [1, 2, 3, 4])
    keep(runner, other, [10, 11, 12, 13, 14, 15])
    tails = [tokens(rng, length) for length in (20, 1, 33)]
    alone = [
        score(runner, [Segment(np.concatenate([start, tail]), 0)])[0]
        for start, tail in zip((prefix, prefix, other), tails, strict=True)
    ]
    stranger = tokens(rng, 40)
    alone.append(score(runner, [Segment(stranger, 0)])[0])
    loads = moves([1, 2, 3, 4, 10, 11, 12, 13, 14, 15], [*rows_of(range(4), 0), *rows_of(range(6), 100)])
    segments = [
        Segment(tails[0], 64, 64, prefix=(0, 64)),
        Segment(tails[1], 84, 64, prefix=(0, 64)),
        Segment(tails[2], 196, 96, self_lo=100),
        Segment(stranger, 400),
    ]
    np.testing.assert_allclose(score(runner, segments, loads=loads), np.stack(alone), atol=BOUND)


def test_a_pass_may_keep_what_it_loads_on(stream, rng):
    """A longer prefix grows out of a shorter one; both kept parts then serve a third pass."""
    prompt = tokens(rng, 150)
    whole = score(stream, [Segment(prompt, 0)])[0]
    keep(stream, prompt[:64], [20, 21, 22, 23])
    loads = moves([20, 21, 22, 23], rows_of(range(4), 32))
    middle = Segment(prompt[64:140], 96, 64, self_lo=32)
    score(stream, [middle], loads=loads, keeps=moves([30, 31, 32, 33], rows_of(range(4), 96)))
    loads = moves([20, 21, 22, 23, 30, 31, 32, 33], rows_of(range(8), 0))
    tail = Segment(prompt[128:], 128, 128, self_lo=0)
    np.testing.assert_allclose(score(stream, [tail], loads=loads)[0], whole, atol=BOUND)


def test_a_full_buffer_of_blocks_is_moved(stream, rng):
    """More than one group of blocks, and a table that is full."""
    prompt = tokens(rng, KV_ROWS)
    blocks = list(range(KV_ROWS // BLOCK_SIZE))
    assert len(blocks) > CPU_GROUP
    whole = keep(stream, prompt, blocks)
    last = Segment(prompt[-1:], KV_ROWS - 1, KV_ROWS - 1, self_lo=0)
    # The last token's own row is loaded, and then written again.
    np.testing.assert_allclose(score(stream, [last], loads=moves(blocks, rows_of(blocks, 0)))[0], whole, atol=BOUND)


def test_dropped_blocks_and_passes_without_keeps_leave_the_pool_alone(stream, rng):
    keep(stream, tokens(rng, 200), range(12))
    before = whole_pool(stream)
    dropped = [NUM_BLOCKS] * 6 + [5]
    score(stream, [Segment(tokens(rng, 128), 0)], keeps=moves(dropped, rows_of(dropped, 0)))
    after = whole_pool(stream)
    assert (after[5] != before[5]).any()
    np.testing.assert_array_equal(np.delete(after, 5, 0), np.delete(before, 5, 0))
    score(stream, [Segment(tokens(rng, 20), 200, 64, prefix=(0, 64))], loads=moves(range(4), rows_of(range(4), 0)))
    np.testing.assert_array_equal(whole_pool(stream), after)


def test_kept_rows_are_what_a_block_holds(stream, rng):
    """Straight from the buffer: block b of layer l, keys then values."""
    prompt = tokens(rng, 100)
    keep(stream, prompt, [8, 9])
    score(stream, [Segment(prompt, 3)], keeps=moves([18, 19], [3, 19]))
    pool = whole_pool(stream)
    assert pool.shape == (NUM_BLOCKS, CONFIG.num_layers, 2, *SHAPE)
    assert pool.nbytes == stream.pool.num_bytes == NUM_BLOCKS * block_bytes(CONFIG, "float32", BLOCK_SIZE)
    np.testing.assert_allclose(pool[[18, 19]], pool[[8, 9]], atol=1e-5)
    assert np.abs(pool[8]).min(axis=(2, 3, 4)).all()
    assert not np.array_equal(pool[8, 0, 0], pool[8, 0, 1])


@pytest.mark.parametrize("num_blocks", [1, TRANSFER_GROUP, TRANSFER_GROUP + 3])
def test_blocks_come_back_from_the_host(stream, rng, num_blocks):
    length = num_blocks * BLOCK_SIZE
    prompt = tokens(rng, length + 9)
    blocks, elsewhere = list(range(num_blocks)), list(range(39, 39 - num_blocks, -1))
    whole = keep(stream, prompt, blocks)
    reading = stream.pool.read(blocks)
    keep(stream, tokens(rng, 400), range(25))  # overwrites them before anybody waits
    payloads = reading.wait()
    assert payloads.shape == (num_blocks, CONFIG.num_layers, 2, *SHAPE)
    stream.pool.write(elsewhere, payloads)
    payloads[:] = np.nan  # the pool has what it was given
    tail = Segment(prompt[length:], length, length, self_lo=0)
    loads = moves(elsewhere, rows_of(elsewhere, 0))
    np.testing.assert_allclose(score(stream, [tail], loads=loads)[0], whole, atol=BOUND)


def test_nothing_to_read_is_an_empty_answer(stream):
    assert stream.pool.read([]).wait().shape == (0, CONFIG.num_layers, 2, *SHAPE)


def test_nan_in_other_blocks_and_rows_changes_nothing(runner, rng):
    prompt = tokens(rng, 90)
    whole = keep(runner, prompt, [5, 6, 7, 8])
    others = [block for block in range(NUM_BLOCKS) if block not in (5, 6, 7, 8)]
    runner.pool.write(others, np.full((len(others), CONFIG.num_layers, 2, *SHAPE), np.nan, np.float32))
    # NaN in every row of the buffer that the prompt neither loads nor writes.
    free = [*range(16), *range(112, KV_ROWS - 15, BLOCK_SIZE)]
    loads = moves([5, 6, 7, 8, 0, *others[:1] * 24], [*rows_of(range(4), 16), 0, *free[16:][:24]])
    tail = Segment(prompt[64:], 80, 64, self_lo=16)
    np.testing.assert_allclose(score(runner, [tail], loads=loads)[0], whole, atol=BOUND)
    assert np.isfinite(keep(runner, prompt, [5, 6, 7, 8])).all()


def test_a_pass_that_is_not_finite_leaves_no_buffer_behind(stream, rng):
    stream.pool.write([0], np.full((1, CONFIG.num_layers, 2, *SHAPE), np.nan, np.float32))
    poisoned = score(stream, [Segment(tokens(rng, 9), 16, 16, self_lo=0)], loads=moves([0], [0]))
    assert np.isnan(poisoned).all()
    first, second = tokens(rng, 10), tokens(rng, 20)
    # Rows 10 to 31 lie between two prompts of one tile of queries.
    apart = score(stream, [Segment(first, 0), Segment(second, 32)])
    together = score(stream, [Segment(first, 0), Segment(second, 10)])
    np.testing.assert_allclose(apart, together, atol=BOUND)


def test_a_pass_that_fails_midway_costs_only_itself(runner, rng, monkeypatch):
    prompt = tokens(rng, 70)
    whole = keep(runner, prompt, [1, 2])
    layers = runner._layers
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_layers", [layers[0], {}, layers[2]])  # the second call is refused
        with pytest.raises(TypeError):
            score(runner, [Segment(prompt, 0)])
    tail = Segment(prompt[32:], 32, 32, self_lo=0)
    np.testing.assert_allclose(score(runner, [tail], loads=moves([1, 2], [0, 16]))[0], whole, atol=BOUND)


def test_a_pool_that_lost_its_arrays_starts_again(stream, rng):
    prompt = tokens(rng, 60)
    keep(stream, prompt, [1, 2])
    for leaf in jax.tree.leaves(stream.pool._layers[1:]):
        leaf.delete()
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        score(stream, [Segment(prompt, 0)], keeps=moves([1], [0]))
    stream.pool.reset()
    assert not whole_pool(stream).any()
    whole = keep(stream, prompt, [1, 2])
    tail = Segment(prompt[32:], 32, 32, self_lo=0)
    np.testing.assert_allclose(score(stream, [tail], loads=moves([1, 2], [0, 16]))[0], whole, atol=BOUND)


def test_a_batch_that_moves_blocks_needs_a_pool():
    runner = copy(runner_of("full"))
    runner.pool = None
    with pytest.raises(ValueError, match="no pool"):
        score(runner, [Segment(np.arange(9, dtype=np.int32), 0)], loads=moves([0], [0]))


def test_nothing_compiles_after_warm_up_and_warm_up_changes_no_block(rng):
    runner = runner_of("stream")
    prompt = tokens(rng, 100)
    whole = keep(runner, prompt, range(5))
    before = whole_pool(runner)
    runner.warm_up()  # includes the programs that no test before this one has run
    counter = CompileCounter()
    np.testing.assert_array_equal(whole_pool(runner), before)
    runner.pool.write([30, 31], runner.pool.read([0, 1]).wait())
    keep(runner, tokens(rng, 30), [17])
    tail = Segment(prompt[32:], 32, 32, self_lo=0)
    np.testing.assert_allclose(score(runner, [tail], loads=moves([30, 31], [0, 16]))[0], whole, atol=BOUND)
    runner._take_kv()  # as after a pass that failed
    keep(runner, prompt, [3])
    counter.close()
    assert counter.count == 0


@pytest.mark.parametrize("name", ["load", "keep", "write_blocks"])
def test_the_pools_programs_work_in_place(stream, name):
    memory = stream.pool._programs[name].memory_analysis()
    kv_bytes = 2 * KV_ROWS * CONFIG.num_kv_heads * CONFIG.head_dim * 4
    expected = {"load": kv_bytes, "keep": stream.pool.num_bytes // CONFIG.num_layers}
    assert memory.alias_size_in_bytes == expected.get(name, stream.pool.num_bytes)
    assert memory.temp_size_in_bytes < kv_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_work_in_place_whatever_the_bucket(layout):
    runner = runner_of(layout)
    kv_bytes = 2 * KV_ROWS * CONFIG.num_kv_heads * CONFIG.head_dim * 4
    for bucket in BUCKETS:
        memory = runner.programs.of(bucket).layer.memory_analysis()
        assert memory.alias_size_in_bytes == bucket * CONFIG.embed_dim * 4 + kv_bytes


def test_bfloat16_blocks_survive_the_host_bit_by_bit():
    pool = DevicePool.create(CONFIG, "bfloat16", BLOCK_SIZE, 4, 64)
    bits = np.random.default_rng(1).integers(0, 2**15, (3, CONFIG.num_layers, 2, *SHAPE)).astype(np.uint16)
    pool.write([3, 0, 1], bits.view(jnp.bfloat16))
    np.testing.assert_array_equal(pool.read([3, 0, 1]).wait().view(np.uint16), bits)
