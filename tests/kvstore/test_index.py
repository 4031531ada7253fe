"""The index: what it finds, stores and evicts, step by step. Random steps: `test_index_machine.py`."""

import numpy as np
import pytest

from jprefill.config import Eviction
from jprefill.errors import EngineError
from jprefill.kvstore.eviction import make_order
from jprefill.kvstore.hashing import BlockKeys, KeyMaker
from jprefill.kvstore.index import BlockIndex, Reservation

BLOCK_SIZE = 2
MAKER = KeyMaker(b"model", BLOCK_SIZE)


def prompt(*token_ids: int, salt: str = "") -> BlockKeys:
    """One block of equal tokens per number."""
    return MAKER.keys(np.repeat(np.asarray(token_ids, np.int32), BLOCK_SIZE), salt)


def new_index(num_blocks: int, eviction: Eviction = "lru") -> BlockIndex:
    return BlockIndex(num_blocks, BLOCK_SIZE, make_order(eviction, num_blocks))


def store(index: BlockIndex, keys: BlockKeys) -> Reservation:
    reservation = index.reserve(keys, 0, len(keys))
    index.commit(reservation)
    index.check()
    return reservation


# ---- looking ---------------------------------------------------------------------------------------------------


def test_an_empty_index_finds_nothing():
    index = new_index(4)
    assert index.match(prompt(1, 2)).tolist() == []
    assert index.match(prompt()).tolist() == []
    assert index.num_matched(prompt(1, 2)) == 0
    assert list(index.entries()) == []
    assert (index.num_free, index.num_cached, index.num_reserved, index.num_pinned) == (4, 0, 0, 0)


def test_the_longest_stored_front_is_found_block_by_block():
    index = new_index(8)
    stored = store(index, prompt(1, 2, 3))
    for keys, count in ((prompt(1, 2, 3, 4), 3), (prompt(1, 2, 9), 2), (prompt(9, 2, 3), 0), (prompt(1), 1)):
        assert index.match(keys).tolist() == stored.blocks[:count].tolist()
        assert index.num_matched(keys) == count


def test_a_limit_bounds_what_is_found():
    index = new_index(8)
    store(index, prompt(1, 2, 3))
    assert [len(index.match(prompt(1, 2, 3), limit)) for limit in (0, 2, 3, 9)] == [0, 2, 3, 3]
    assert [index.num_matched(prompt(1, 2, 3), limit) for limit in (0, 2, 3, 9)] == [0, 2, 3, 3]


def test_another_salt_finds_nothing():
    index = new_index(8)
    store(index, prompt(1, 2, salt="a"))
    assert len(index.match(prompt(1, 2, salt="a"))) == 2
    assert len(index.match(prompt(1, 2, salt="b"))) == len(index.match(prompt(1, 2))) == 0


def test_the_right_key_with_other_tokens_is_a_miss():
    index = new_index(8)
    keys = prompt(1, 2, 3)
    store(index, keys)
    forged = BlockKeys(keys.hashes, np.asarray([[1, 1], [2, 7], [3, 3]], np.int32))
    assert len(index.match(forged)) == 1


def test_entries_come_parents_first_and_are_copies():
    index = new_index(8)
    for keys in (prompt(1, 2, 3), prompt(1, 5), prompt(4)):
        store(index, keys)
    entries = list(index.entries())
    assert [entry.depth for entry in entries] == [0, 0, 1, 1, 2]
    assert {entry.key for entry in entries} == {*prompt(1, 2, 3).hashes, *prompt(1, 5).hashes, *prompt(4).hashes}
    entries[0].tokens[:] = 99
    assert len(index.match(prompt(1, 2, 3))) == 3


# ---- storing ---------------------------------------------------------------------------------------------------


def test_reserved_blocks_are_found_after_the_commit_only():
    index = new_index(4)
    reservation = index.reserve(prompt(1, 2), 0, 2)
    assert len(index.match(prompt(1, 2))) == index.num_matched(prompt(1, 2)) == 0
    assert (index.num_free, index.num_cached, index.num_reserved) == (2, 0, 2)
    assert index.commit(reservation) == 2
    assert index.match(prompt(1, 2)).tolist() == reservation.blocks.tolist()
    assert (index.num_free, index.num_cached, index.num_reserved) == (2, 2, 0)


def test_an_abandoned_reservation_leaves_no_trace():
    index = new_index(4)
    index.abandon(index.reserve(prompt(1, 2), 0, 2))
    index.check()
    assert index.num_free == 4
    assert len(index.match(prompt(1, 2))) == 0


def test_blocks_that_are_there_already_are_left_out():
    index = new_index(8)
    store(index, prompt(1, 2))
    longer = index.reserve(prompt(1, 2, 3), 0, 3)
    assert (longer.first, longer.end, len(longer.blocks)) == (2, 3, 1)
    again = index.reserve(prompt(1, 2, 3, 4), 1, 4)  # the third block is reserved, not yet cached
    assert (again.first, again.end) == (3, 4)
    nothing = index.reserve(prompt(1, 2, 3), 0, 3)
    assert (nothing.first, nothing.end) == (3, 3)
    assert index.commit(nothing) == 0
    index.commit(longer)
    index.commit(again)
    index.check()
    assert len(index.match(prompt(1, 2, 3, 4))) == 4


def test_more_blocks_than_the_prompt_has_are_cut():
    index = new_index(8)
    assert index.reserve(prompt(1, 2), 0, 9).end == 2
    assert len(index.reserve(prompt(5, 6), 2, 9).blocks) == 0


def test_as_many_leading_blocks_as_fit_are_given():
    index = new_index(3)
    reservation = store(index, prompt(1, 2, 3, 4, 5))
    assert (reservation.first, reservation.end) == (0, 3)
    assert len(index.match(prompt(1, 2, 3, 4, 5))) == 3


def test_nothing_is_stored_behind_a_block_that_is_gone():
    index = new_index(2)
    store(index, prompt(1, 2))
    store(index, prompt(8, 9))
    assert len(index.reserve(prompt(1, 2, 3), 2, 3).blocks) == 0
    index.check()


def test_a_pool_of_no_blocks_stores_nothing():
    index = new_index(0)
    assert store(index, prompt(1)).end == 0
    assert len(index.match(prompt(1))) == 0


# ---- evicting --------------------------------------------------------------------------------------------------


def test_the_oldest_leaf_leaves_first_and_is_handed_over():
    index = new_index(4)
    old, young = prompt(1, 2), prompt(3, 4)
    blocks = [store(index, keys).blocks.tolist() for keys in (old, young)]
    reservation = store(index, prompt(7))
    (entry,) = reservation.evicted
    assert (entry.key, entry.tokens.tolist(), entry.depth, entry.num_hits) == (old.hashes[1], [2, 2], 1, 0)
    assert [entry.block] == reservation.blocks.tolist() == blocks[0][1:]
    assert (index.num_matched(old), index.num_matched(young)) == (1, 2)


def test_a_use_makes_a_chain_young():
    index = new_index(4)
    store(index, prompt(1, 2))
    store(index, prompt(3, 4))
    index.touch(index.match(prompt(1, 2)))
    store(index, prompt(7))
    assert (index.num_matched(prompt(1, 2)), index.num_matched(prompt(3, 4))) == (2, 1)


def test_a_parent_stays_as_long_as_a_child():
    index = new_index(3)
    store(index, prompt(1, 2))
    store(index, prompt(1, 3))
    reservation = store(index, prompt(7, 8, 9))
    assert [entry.tokens[0] for entry in reservation.evicted] == [2, 3, 1]


def test_pinned_blocks_stay_until_the_last_pin_is_taken_back():
    index = new_index(2)
    store(index, prompt(1, 2))
    blocks = index.match(prompt(1, 2))
    index.pin(blocks)
    index.pin(blocks)
    index.unpin(blocks)
    assert index.num_pinned == 2
    assert len(index.reserve(prompt(7), 0, 1).blocks) == 0
    index.unpin(blocks)
    assert index.num_pinned == 0
    assert len(index.reserve(prompt(7), 0, 1).blocks) == 1


def test_ancestors_are_not_evicted_for_their_children():
    index = new_index(3)
    store(index, prompt(1, 2, 3))
    reservation = index.reserve(prompt(1, 2, 8, 9), 2, 4)  # 3 may go, 1 and 2 may not
    assert [entry.tokens[0] for entry in reservation.evicted] == [3]
    assert reservation.end == 3
    index.commit(reservation)
    index.check()
    assert index.num_matched(prompt(1, 2, 8)) == 3


def test_a_lone_parent_is_not_evicted_for_its_child():
    index = new_index(1)
    store(index, prompt(1))
    assert len(index.reserve(prompt(1, 2), 1, 2).blocks) == 0
    index.check()
    assert len(store(index, prompt(5)).evicted) == 1


# ---- reservations under one another ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_parent_first", [True, False])
def test_abandoned_chains_are_freed_in_any_order(is_parent_first: bool):
    index = new_index(4)
    parent = index.reserve(prompt(1, 2), 0, 2)
    child = index.reserve(prompt(1, 2, 3), 2, 3)
    for reservation in (parent, child) if is_parent_first else (child, parent):
        index.abandon(reservation)
        index.check()
    assert index.num_free == 4


def test_a_reservation_under_an_abandoned_one_is_dropped():
    index = new_index(6)
    parent = index.reserve(prompt(1, 2), 0, 2)
    child = index.reserve(prompt(1, 2, 3), 2, 3)
    grandchild = index.reserve(prompt(1, 2, 3, 4), 3, 4)
    index.abandon(parent)
    anew = index.reserve(prompt(1, 2, 3), 0, 3)
    assert anew.end == 2  # the third block is on its way out
    assert index.commit(anew) == 2
    assert index.commit(child) == 0
    index.check()
    assert index.commit(grandchild) == 0
    index.check()
    assert (index.num_cached, index.num_free) == (2, 4)


def test_a_child_is_not_committed_before_its_parent():
    index = new_index(4)
    parent = index.reserve(prompt(1, 2), 0, 2)
    child = index.reserve(prompt(1, 2, 3), 2, 3)
    with pytest.raises(EngineError, match="commit: the blocks before these are still reserved"):
        index.commit(child)
    assert [index.commit(parent), index.commit(child)] == [2, 1]
    index.check()


# ---- misuse and checks --------------------------------------------------------------------------------------------


def test_misuse_is_named_and_changes_nothing():
    index = new_index(4)
    reservation = store(index, prompt(1))
    for end in (index.commit, index.abandon):
        with pytest.raises(EngineError, match="was committed or abandoned before"):
            end(reservation)
    with pytest.raises(EngineError, match="unpin: a block is not pinned"):
        index.unpin(reservation.blocks)
    free = np.asarray([3], np.int32)
    with pytest.raises(EngineError, match="pin: a block is not cached"):
        index.pin(free)
    with pytest.raises(EngineError, match="touch: a block is not cached"):
        index.touch(free)
    index.check()


def test_check_names_the_broken_rule_with_its_numbers():
    index = new_index(3)
    store(index, prompt(1, 2))
    index._free.append(0)
    with pytest.raises(EngineError, match=r"inconsistent; must hold: free 2 \+ cached 2 \+ reserved 0 = 3 blocks"):
        index.check()
    index._free.pop()
    index._num_pins[1] = -1
    with pytest.raises(EngineError, match=r"pins >= 0, lowest -1"):
        index.check()
