"""What a block is worth, and the queue that hands out the least valuable one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jprefill.config import Eviction
from jprefill.kvstore.eviction import EvictionOrder, EvictionQueue, LeastRecentlyUsed, SavedTime, make_order
from jprefill.kvstore.hashing import BlockKeys, KeyMaker
from jprefill.kvstore.index import BlockIndex

BLOCK_SIZE = 16
MAKER = KeyMaker(b"model", BLOCK_SIZE)
NUM_BLOCKS = 4000
PROFILE, LONG = 1500, 60_000  # tokens


def worth(order: EvictionOrder, num_hits: int, position: int, now: float) -> float:
    return float(order.values(np.asarray([num_hits], np.int32), np.asarray([position], np.int32), now)[0])


# ---- values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), [("saved_time", SavedTime), ("lru", LeastRecentlyUsed)])
def test_a_setting_names_an_order(name: Eviction, kind: type):
    order = make_order(name, 100)
    assert isinstance(order, kind)
    assert isinstance(order, EvictionOrder)


def test_saved_time_is_the_formula_of_its_docstring():
    order = SavedTime(half_life=100, crossover_tokens=1000)
    assert worth(order, 1, 0, 0.0) == pytest.approx(np.log2(5 / 8))
    assert worth(order, 3, 2000, 0.0) == pytest.approx(np.log2(13 / 16 * 3))
    assert worth(order, 3, 2000, 250.0) == pytest.approx(np.log2(13 / 16 * 3) + 2.5)


def test_saved_time_grows_with_uses_recency_and_position():
    order = SavedTime(half_life=100)
    assert worth(order, 0, 0, 0.0) < worth(order, 1, 0, 0.0) < worth(order, 2, 0, 0.0) < worth(order, 9, 0, 0.0)
    assert worth(order, 1, 0, 0.0) < worth(order, 1, 0, 1.0)
    assert worth(order, 1, 0, 0.0) < worth(order, 1, 50_000, 0.0)


def test_one_turnover_of_the_pool_weighs_as_much_as_half_the_cost():
    order = SavedTime(half_life=100, crossover_tokens=1000)
    assert worth(order, 1, 1000, 0.0) == pytest.approx(worth(order, 1, 0, 100.0))


@pytest.mark.parametrize("position", [0, 1000, 60_000])
def test_before_anything_is_known_an_unused_block_is_worth_at_most_a_quarter(position: int):
    assert -3.0 < worth(SavedTime(half_life=100), 0, position, 0.0) <= -2.0


def test_the_chance_of_unused_blocks_is_counted_where_they_lie():
    order = SavedTime(half_life=6400)
    before = worth(order, 0, 20_000, 0.0)
    order.learn(np.full(300, 1000, np.int32), is_used=True)
    order.learn(np.full(100, 1010, np.int32), is_used=False)
    cost = 1 + 1000 / 16_384
    prior = 1 / 4 / (1 + 1024 / 16_384)
    assert worth(order, 0, 1000, 0.0) == pytest.approx(np.log2((300 + 100 * prior) / 500 * cost))
    assert worth(order, 0, 20_000, 0.0) == before


def test_a_chance_is_never_held_for_nothing_and_what_was_counted_fades():
    order = SavedTime(half_life=64)
    for _ in range(100):
        order.learn(np.zeros(64, np.int32), is_used=False)
    assert worth(order, 0, 0, 0.0) == np.log2(1 / 64)
    for _ in range(3):
        order.learn(np.zeros(64, np.int32), is_used=True)
    assert worth(order, 0, 0, 0.0) > np.log2(3 / 4)


def test_lru_sees_nothing_but_the_time():
    order = LeastRecentlyUsed()
    assert worth(order, 9, 9000, 3.0) == worth(order, 0, 0, 3.0) < worth(order, 0, 0, 4.0)


# ---- the pool under each order --------------------------------------------------------------------------------


def prompt(seed: int, num_tokens: int) -> BlockKeys:
    return MAKER.keys(np.random.default_rng(seed).integers(0, 50_000, num_tokens, np.int32))


def ask(index: BlockIndex, keys: BlockKeys) -> int:
    """One request: uses what is there, stores the rest; returns the number of blocks that were there."""
    found = index.match(keys)
    if len(found):
        index.touch(found)
    index.pin(found)
    index.commit(index.reserve(keys, len(found), len(keys)))
    index.unpin(found)
    return len(found)


def share_of_profiles_served(eviction: Eviction, num_rounds: int) -> float:
    """Twenty profiles (47 % of the pool) are asked for in turns; after each turn comes a long prompt, never again."""
    index = BlockIndex(NUM_BLOCKS, BLOCK_SIZE, make_order(eviction, NUM_BLOCKS))
    profiles = [prompt(seed, PROFILE) for seed in range(20)]
    for keys in profiles * 2:
        ask(index, keys)
    served = 0
    for i in range(num_rounds):
        ask(index, prompt(1000 + i, LONG))
        served += sum(ask(index, keys) for keys in profiles)
    index.check()
    return served / (num_rounds * sum(len(keys) for keys in profiles))


def test_long_prompts_do_not_flush_profiles_in_use():
    assert share_of_profiles_served("saved_time", 8) == 1.0


def test_long_prompts_do_flush_them_under_lru():
    assert share_of_profiles_served("lru", 4) < 0.5


def test_profiles_that_nobody_asks_for_any_more_make_room():
    index = BlockIndex(NUM_BLOCKS, BLOCK_SIZE, make_order("saved_time", NUM_BLOCKS))
    old, new = ([prompt(seed, PROFILE) for seed in range(first, first + 40)] for first in (0, 100))
    for keys in old * 5:
        ask(index, keys)
    assert sum(index.num_matched(keys) for keys in old) == 40 * len(old[0])
    for _ in range(5):
        for keys in new:
            ask(index, keys)
    assert sum(index.num_matched(keys) for keys in new) == 40 * len(new[0])


@pytest.mark.parametrize("eviction", ["saved_time", "lru"])
def test_where_each_profile_comes_twice_the_second_time_is_served(eviction: Eviction):
    index = BlockIndex(500, BLOCK_SIZE, make_order(eviction, 500))
    served = sum(ask(index, prompt(seed, PROFILE)) for seed in range(100) for _ in range(2))
    assert served > 0.95 * 100 * (PROFILE // BLOCK_SIZE)


def test_a_block_seen_before_comes_in_where_a_new_one_does_not():
    index = BlockIndex(4, BLOCK_SIZE, make_order("saved_time", 1000, crossover_tokens=10**9))
    used, newcomer = prompt(0, 4 * BLOCK_SIZE), prompt(1, BLOCK_SIZE)
    ask(index, used)
    ask(index, used)
    assert len(index.reserve(newcomer, 0, 1).blocks) == 0
    reservation = index.reserve(newcomer, 0, 1, num_seen=1)
    assert len(reservation.blocks) == 1
    assert [entry.key for entry in reservation.evicted] == [used.hashes[3]]


def test_a_restored_block_displaces_even_a_more_valuable_one():
    index = BlockIndex(2, BLOCK_SIZE, make_order("saved_time", 1000))
    used, lower = prompt(0, 2 * BLOCK_SIZE), prompt(1, BLOCK_SIZE)
    for _ in range(9):
        ask(index, used)
    assert len(index.reserve(lower, 0, 1, num_seen=1).blocks) == 0
    assert len(index.reserve(lower, 0, 1, is_restore=True).blocks) == 1


# ---- queue ----------------------------------------------------------------------------------------------------


def test_an_empty_queue_has_no_next_block():
    queue = EvictionQueue(3)
    assert queue.peek() == -1
    queue.discard(1)
    assert len(queue) == 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 9)), max_size=80))
def test_the_queue_always_hands_out_the_least_value(steps: list[tuple[int, int]]):
    queue, naive = EvictionQueue(16), dict[int, float]()
    for block, value in steps:
        if block in naive:
            queue.discard(block)
            del naive[block]
        else:
            queue.values[block] = value
            queue.add(block)
            naive[block] = value
        assert queue.is_consistent()
        assert {b for b in range(16) if b in queue} == naive.keys()
        assert len(queue) == len(naive)
        assert (queue.values[queue.peek()] == min(naive.values())) if naive else queue.peek() == -1
    drained = []
    while queue:
        drained.append(queue.values[queue.peek()])
        queue.discard(queue.peek())
    assert drained == sorted(naive.values())
