"""Cached = uncached: the whole engine with a prefix store against the same engine without one."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.errors import JaxRuntimeError
from tiny import CONFIG, SETTINGS, label_item, logprobs, make_model, prompt, tokens

from jprefill.engine import Engine
from jprefill.errors import ConfigError
from jprefill.kvstore.build import make_store, num_pool_blocks
from jprefill.kvstore.device_pool import DevicePool
from jprefill.model.compiles import CompileCounter
from jprefill.model.llama import flatten
from jprefill.model.runner import Runner
from jprefill.types import ScoreRequest

BUCKETS = (256, 1024)
ATOL = 5e-5


class Setup:
    """A tiny model, and engines over it that share one runner each."""

    def __init__(self, num_blocks=96, dtype="float32", **changes):
        self.settings = replace(SETTINGS, block_size=16, dtype=dtype, **changes)
        self.weights = {name: leaf.astype(dtype) for name, leaf in flatten(make_model()).items()}
        self.pool = DevicePool.create(CONFIG, dtype, 16, num_blocks, BUCKETS[-1])
        self.runner = Runner(CONFIG, self.weights, self.settings, BUCKETS, pool=self.pool)
        self.runner.warm_up()

    def engine(self, **changes):
        chosen = replace(self.settings, **changes)
        store = make_store(CONFIG, self.weights, chosen, self.pool, "tiny")
        return self._start(chosen, store)

    def plain(self):
        return self._start(self.settings, None)

    def _start(self, chosen, store):
        return Engine(self.runner, chosen, model_name="tiny", max_model_len=1024, store=store, grid=self.runner.grid)


@pytest.fixture(scope="module")
def tiny():
    return Setup()


def ask(engine, *requests):
    """Submitted together, so that they may ride together."""
    futures = [engine.submit(request) for request in requests]
    return [future.result(120) for future in futures]


def request(seed, prefix_length, *item_lengths, **changes):
    """Requests with one seed share their prefix."""
    rng, own = np.random.default_rng(seed), np.random.default_rng([seed, *item_lengths])
    prefix = tokens(rng, 600)[:prefix_length]
    return ScoreRequest(prefix, tuple(label_item(tokens(own, length)) for length in item_lengths), **changes)


def test_a_profile_is_computed_once_over_many_requests(tiny):
    with_store, without = tiny.engine(), tiny.plain()
    requests = [request(0, 300, 20 + i) for i in range(6)]
    for one in requests:
        [ours], [theirs] = ask(with_store, one), ask(without, one)
        np.testing.assert_allclose(logprobs(ours), logprobs(theirs), atol=ATOL)
    stats = with_store.stats()
    assert stats.num_computed_tokens == 300 + sum(range(20, 26)) + 5 * (300 % 16)
    assert stats.num_cached_tokens == 5 * 288
    assert stats.num_kept_tokens == 288
    assert stats.tiers["device"].num_blocks == 18
    with_store.close()
    without.close()


def test_two_simultaneous_cold_requests_compute_their_prefix_once(tiny):
    engine = tiny.engine()
    ask(engine, prompt(np.array([1], np.int32)))
    ask(engine, *[request(1, 320, 20 + i) for i in range(5)])
    assert engine.stats().num_computed_tokens == 1 + 320 + sum(range(20, 25))
    engine.close()


def test_the_same_request_twice_is_equal_and_computes_something(tiny):
    engine = tiny.engine(keep="all")
    first, second = (ask(engine, request(2, 0, 320))[0] for _ in range(2))
    np.testing.assert_allclose(logprobs(first), logprobs(second), atol=ATOL)
    assert second.usage.num_cached_tokens == 304
    engine.close()


def test_nothing_compiles_while_blocks_move(tiny):
    engine, counter = tiny.engine(kv_host_bytes=2**26), CompileCounter()
    for seed in range(3, 12):
        ask(engine, request(seed, 400, 30), request(seed, 400, 31))
    counter.close()
    engine.close()
    assert counter.count == 0


shapes = st.tuples(st.integers(0, 4), st.integers(0, 400), st.lists(st.integers(1, 40), min_size=1, max_size=3))
cases = st.lists(st.lists(shapes, min_size=1, max_size=4), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def pair(tiny):
    """Both live over all examples, so the store meets every state that the examples leave behind."""
    engines = tiny.engine(kv_host_bytes=4 * 2**20), tiny.plain()
    yield engines
    for engine in engines:
        engine.close()


@settings(max_examples=40, deadline=None)
@given(cases)
def test_cached_is_uncached_over_random_requests(pair, cases):
    with_store, without = pair
    for together in cases:
        requests = [request(seed, length, *items) for seed, length, items in together]
        for ours, one in zip(ask(with_store, *requests), requests, strict=True):
            [theirs] = ask(without, one)
            np.testing.assert_allclose(logprobs(ours), logprobs(theirs), atol=ATOL)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def exact(request):
    """Batch-invariant engines: one whose pool is far too small and has a host tier, one without a store."""
    setup = Setup(num_blocks=40, dtype=request.param, chunk_size=256, batch_invariant=True)
    engines = setup.engine(kv_host_bytes=16 * 2**20), setup.plain()
    yield setup, *engines
    for engine in engines:
        engine.close()


@settings(max_examples=15, deadline=None)
@given(cases)
def test_in_batch_invariant_mode_not_one_bit_differs(exact, cases):
    """Packed with others, over blocks of the pool or the host, against each request alone and uncached."""
    _, with_store, without = exact
    for together in cases:
        requests = [request(seed, 260 + length, *items) for seed, length, items in together]
        for ours, one in zip(ask(with_store, *requests), requests, strict=True):
            for index, item in enumerate(one.items):
                [alone] = ask(without, ScoreRequest(one.prefix, (item,)))
                np.testing.assert_array_equal(ours.items[index].logprobs, alone.items[0].logprobs)


def test_in_batch_invariant_mode_the_disk_changes_no_bit_either(exact, tmp_path):
    setup, _, without = exact
    one = request(50, 560, 20, 33)
    for _ in range(2):
        engine = setup.engine(kv_disk_path=str(tmp_path))
        [ours], [plain] = ask(engine, one), ask(without, one)
        np.testing.assert_array_equal(logprobs(ours), logprobs(plain))
        engine.close(timeout_s=30.0)
    assert ours.usage.num_cached_tokens == 2 * 512  # both items; what is beyond the grid is computed again


def test_blocks_that_a_pass_computes_are_not_restored_meanwhile(tiny):
    """Their end lies in a lower tier, their beginning was lost: no block may follow one that is not there yet."""
    store = make_store(CONFIG, tiny.weights, replace(tiny.settings, kv_host_bytes=2**26), tiny.pool, "tiny")
    keys = store.keys(request(60, 160, 20))
    payloads = tiny.pool.read(range(4, 10))
    store._lower.put([(keys.hashes[i], keys.tokens[i]) for i in range(4, 10)], payloads)
    running = store.lease(keys.head(6), 6)
    store.keep(running, request(60, 160, 20), 6)
    assert len(running.reservation.blocks) == 6
    store.restore(keys)
    store.release(running, is_good=True)
    assert store.num_cached(keys, len(keys)) == 10
    lease = store.lease(keys, len(keys))
    assert len(lease.cached) == 10
    store.release(lease, is_good=True)
    store.close(0.0)


def random_requests(rng, num_requests):
    """A few at a time, of eight prefixes: sometimes the prefix alone, sometimes with an ending that came before."""
    while num_requests > 0:
        together = []
        for _ in range(int(rng.integers(1, 6))):
            lengths = [int(n) for n in rng.integers(1, 40, rng.integers(1, 3))]
            together.append(request(int(rng.integers(8)), int(rng.integers(0, 500)), *lengths))
        num_requests -= len(together)
        yield together


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["float32", "bit for bit"])
def test_two_thousand_random_requests_through_every_tier(mode, tmp_path):
    """Pool, host and disk are all too small, and the engine starts anew ten times over the same disk."""
    is_exact = mode != "float32"
    changes = {"dtype": "bfloat16", "chunk_size": 256, "batch_invariant": True} if is_exact else {}
    setup = Setup(num_blocks=48, **changes)
    payload_bytes = setup.pool.block_bytes
    tiers = {
        "kv_host_bytes": 40 * payload_bytes,
        "kv_disk_path": str(tmp_path),
        "kv_disk_bytes": 150 * (payload_bytes + 1024),
    }
    rng, without, num_hits = np.random.default_rng(11), setup.plain(), {"device": 0, "host": 0, "disk": 0}
    for _ in range(10):
        with_store = setup.engine(**tiers)
        for together in random_requests(rng, 200):
            for ours, theirs in zip(ask(with_store, *together), [ask(without, r)[0] for r in together], strict=True):
                if is_exact:
                    np.testing.assert_array_equal(logprobs(ours), logprobs(theirs))
                else:
                    np.testing.assert_allclose(logprobs(ours), logprobs(theirs), atol=ATOL)
        for name, stats in with_store.stats().tiers.items():
            num_hits[name] += stats.num_hits if name == "device" else stats.num_restores
        with_store.close(timeout_s=30.0)
    without.close()
    assert all(count > 50 for count in num_hits.values()), num_hits


def test_evicted_blocks_come_back_from_the_host(tiny):
    engine, without = tiny.engine(kv_host_bytes=2**26), tiny.plain()
    for seed in range(20, 26):  # 6 x 37 blocks through a pool of 96
        ask(engine, request(seed, 600, 20))
    [again], [plain] = ask(engine, request(20, 600, 33)), ask(without, request(20, 600, 33))
    np.testing.assert_allclose(logprobs(again), logprobs(plain), atol=ATOL)
    tiers = engine.stats().tiers
    assert again.usage.num_cached_tokens == 592
    assert tiers["device"].num_evictions > 0
    assert tiers["host"].num_restores > 0
    engine.close()
    without.close()


def test_a_profile_of_yesterday_is_a_hit_today(tiny, tmp_path):
    folder = str(tmp_path / "kv")
    for host_bytes in (0, 2**26):
        engine = tiny.engine(kv_disk_path=folder, kv_host_bytes=host_bytes)
        [first] = ask(engine, request(30, 300, 20))
        engine.close(timeout_s=30.0)
        engine = tiny.engine(kv_disk_path=folder, kv_host_bytes=host_bytes)
        [second] = ask(engine, request(30, 300, 20))
        assert second.usage.num_cached_tokens == 288
        np.testing.assert_allclose(logprobs(first), logprobs(second), atol=ATOL)
        engine.close()


def test_another_model_finds_nothing_in_the_same_folder(tiny, tmp_path):
    engine = tiny.engine(kv_disk_path=str(tmp_path))
    ask(engine, request(31, 300, 20))
    engine.close(timeout_s=30.0)
    name = next(name for name in tiny.weights if name.endswith("down_proj.weight"))
    other = dict(tiny.weights)
    other[name] = other[name].at[3, 5].add(1e-3)
    store = make_store(CONFIG, other, replace(tiny.settings, kv_disk_path=str(tmp_path)), tiny.pool, "other")
    keys = store.keys(request(31, 300, 20))
    assert store.num_cached(keys, len(keys)) == 0
    store.close(0.0)


def test_a_device_failure_empties_the_store_and_answers_are_right(tiny, monkeypatch):
    engine, without = tiny.engine(), tiny.plain()
    ask(engine, request(40, 300, 20))

    def explode(*_, **__):
        monkeypatch.undo()
        raise JaxRuntimeError("INTERNAL: the device is gone")

    monkeypatch.setattr(tiny.pool, "keep", explode)
    results = ask(engine, request(41, 300, 20), request(42, 300, 21))
    for ours, one in zip(results, (request(41, 300, 20), request(42, 300, 21)), strict=True):
        np.testing.assert_allclose(logprobs(ours), logprobs(ask(without, one)[0]), atol=ATOL)
    assert engine.stats().num_failed == 0
    ask(engine, request(40, 300, 20))
    assert ask(engine, request(40, 300, 22))[0].usage.num_cached_tokens == 288
    engine.close()
    without.close()


def test_a_fault_while_planning_is_one_answer_and_the_engine_lives(tiny, monkeypatch):
    engine = tiny.engine()
    monkeypatch.setattr(engine._store, "lease", lambda *_: 1 / 0)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        ask(engine, request(43, 100, 20))
    monkeypatch.undo()
    assert ask(engine, request(43, 100, 20))
    engine.close()


def test_the_pool_has_the_size_that_is_asked_for_or_the_limit_is_named():
    per_block = 2 * 3 * 16 * 2 * 32 * 4
    settings_ = replace(SETTINGS, kv_cache_memory_bytes=10 * per_block)
    assert num_pool_blocks(CONFIG, settings_, None) == 10
    assert num_pool_blocks(CONFIG, settings_, 20 * per_block) == 10
    with pytest.raises(ConfigError, match=f"kv_cache_memory_bytes={10 * per_block}.*leave {9 * per_block} bytes"):
        num_pool_blocks(CONFIG, settings_, 9 * per_block)
    assert num_pool_blocks(CONFIG, SETTINGS, 7 * per_block + 1) == 7
    assert num_pool_blocks(CONFIG, replace(SETTINGS, keep="none"), None) == 0
    assert num_pool_blocks(CONFIG, replace(SETTINGS, kv_cache_memory_bytes=0), None) == 0
