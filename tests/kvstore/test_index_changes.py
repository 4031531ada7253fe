"""What the index says has changed since it was asked last."""

import numpy as np

from jprefill.kvstore.eviction import make_order
from jprefill.kvstore.hashing import KeyMaker
from jprefill.kvstore.index import BlockIndex


def make_index(num_blocks):
    index = BlockIndex(num_blocks, 8, make_order("lru", num_blocks))
    assert index.changes() is None  # whoever asks first knows nothing
    return index


def make_keys(seed, num_blocks):
    token_ids = np.random.default_rng(seed).integers(0, 99, 8 * num_blocks).astype(np.int32)
    return KeyMaker(b"", 8).keys(token_ids)


def test_commits_and_evictions_are_told_once():
    index, first, second = make_index(4), make_keys(1, 3), make_keys(2, 3)
    room = index.reserve(first, 0, 3)
    assert index.changes() == {}  # reserved is not cached
    index.commit(room)
    assert index.changes() == dict.fromkeys(first.hashes, True)
    index.commit(index.reserve(second, 0, 3))
    assert index.changes() == dict.fromkeys(first.hashes[1:], False) | dict.fromkeys(second.hashes, True)
    assert index.changes() == {}


def test_what_was_abandoned_never_changed():
    index = make_index(4)
    index.abandon(index.reserve(make_keys(1, 3), 0, 3))
    assert index.changes() == {}


def test_after_a_clear_or_more_changes_than_blocks_anything_may_have_changed():
    index = make_index(1)
    index.clear()
    assert index.changes() is None
    for seed in range(4):
        index.commit(index.reserve(make_keys(seed, 1), 0, 1))
    assert index.changes() is None
    assert index.changes() == {}
