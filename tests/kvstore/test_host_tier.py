"""Host memory holds what fits, gives back what had to go, and never mixes blocks up."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kvblocks import chain, form, payload, same

from jprefill.kvstore.host_tier import HostBlock, HostTier

SIZE = form().payload_bytes
KEYS = chain(6)


def block(i):
    return HostBlock(KEYS.hashes[i], KEYS.tokens[i], payload(KEYS.hashes[i]))


def filled(*numbers, room=3):
    tier = HostTier(room * SIZE)
    for i in numbers:
        tier.put(block(i))
    return tier


def held(tier):
    return [KEYS.hashes.index(found.key) for found in tier.blocks()]


def test_what_was_put_is_found_bit_for_bit():
    found = filled(0).get(KEYS.hashes[0], KEYS.tokens[0])
    assert found is not None
    assert same(found.payload, payload(KEYS.hashes[0]))


def test_nobody_can_write_to_a_held_payload():
    found = filled(0).get(KEYS.hashes[0], KEYS.tokens[0])
    assert found is not None
    assert not found.payload.flags.writeable


def test_other_tokens_are_a_miss():
    assert filled(0).get(KEYS.hashes[0], KEYS.tokens[1]) is None


def test_the_block_unused_for_longest_is_given_back():
    tier = filled(0, 1, 2)
    tier.get(KEYS.hashes[0], KEYS.tokens[0])
    evicted = tier.put(block(3))
    assert [found.key for found in evicted] == [KEYS.hashes[1]]
    assert held(tier) == [2, 0, 3]


def test_looking_without_asking_changes_no_order():
    tier = filled(0, 1, 2)
    assert tier.has(KEYS.hashes[0])
    assert tier.peek(KEYS.hashes[0]) is not None
    assert held(tier) == [0, 1, 2]


def test_putting_a_block_again_renews_it():
    tier = filled(0, 1, 2)
    assert tier.put(block(0)) == []
    assert held(tier) == [1, 2, 0]
    assert tier.stats().num_insertions == 3


def test_touched_blocks_go_last_in_the_order_given():
    tier = filled(0, 1, 2)
    tier.touch([KEYS.hashes[1], KEYS.hashes[5], KEYS.hashes[0]])
    assert held(tier) == [2, 1, 0]


def test_a_block_larger_than_the_tier_comes_straight_back():
    tier = HostTier(SIZE - 1)
    one = block(0)
    assert tier.put(one) == [one]
    assert tier.stats().num_blocks == 0


def test_the_counters_say_what_happened():
    stats = filled(0, 1, 2, 3).stats()
    assert (stats.num_blocks, stats.num_bytes, stats.max_bytes) == (3, 3 * SIZE, 3 * SIZE)
    assert (stats.num_insertions, stats.num_evictions, stats.is_on) == (4, 1, True)


@given(st.lists(st.tuples(st.sampled_from(["put", "get", "touch"]), st.integers(0, 5)), max_size=40), st.integers(0, 4))
def test_any_order_of_calls_acts_like_a_list_of_recent_blocks(calls, room):
    tier, model = HostTier(room * SIZE), []
    for what, i in calls:
        if what == "put":
            evicted = [KEYS.hashes.index(found.key) for found in tier.put(block(i))]
            model = [j for j in model if j != i] + [i]
            assert evicted == model[:-room] if room else evicted == [i]
            model = model[-room:] if room else []
        elif what == "get":
            assert (tier.get(KEYS.hashes[i], KEYS.tokens[i]) is not None) == (i in model)
            model = [j for j in model if j != i] + [i] * (i in model)
        else:
            tier.touch([KEYS.hashes[i]])
            model = [j for j in model if j != i] + [i] * (i in model)
        assert held(tier) == model
        assert tier.stats().num_bytes == len(model) * SIZE <= tier.stats().max_bytes
    assert np.all([same(found.payload, payload(found.key)) for found in tier.blocks()])
