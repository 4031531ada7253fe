"""The index after any order of operations: nothing is ever lost, doubled or mistaken."""

from itertools import takewhile

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from jprefill.config import Eviction
from jprefill.errors import EngineError
from jprefill.kvstore.eviction import make_order
from jprefill.kvstore.hashing import BlockKeys, KeyMaker
from jprefill.kvstore.index import BlockIndex, Reservation

BLOCK_SIZE = 2
MAKER = KeyMaker(b"model", BLOCK_SIZE)
Pins = tuple[np.ndarray, tuple[bytes, ...]]


class IndexMachine(RuleBasedStateMachine):
    """Random operations on few blocks, beside dictionaries of what should be there and a pool that holds it."""

    reservations = Bundle("reservations")
    pins = Bundle("pins")
    prompts = st.builds(
        lambda token_ids, salt: MAKER.keys(np.repeat(np.asarray(token_ids, np.int32), BLOCK_SIZE), salt),
        st.lists(st.integers(0, 1), min_size=1, max_size=5),
        st.sampled_from(["", "a"]),
    )

    @initialize(num_blocks=st.integers(1, 9), eviction=st.sampled_from(["lru", "saved_time"]))
    def start(self, num_blocks: int, eviction: Eviction):
        self.index = BlockIndex(num_blocks, BLOCK_SIZE, make_order(eviction, num_blocks))
        self.admits_all = eviction == "lru"
        self.cached: dict[bytes, bytes | None] = {}  # key -> its parent's key
        self.reserved: dict[bytes, bytes | None] = {}
        self.pinned: list[bytes] = []
        self.pool: dict[int, bytes] = {}  # block -> the key that its KV was computed for

    def front(self, keys: BlockKeys) -> tuple[bytes, ...]:
        """The stored chain, the naive way."""
        return tuple(takewhile(self.cached.__contains__, keys.hashes))

    @rule(keys=prompts)
    def look(self, keys: BlockKeys):
        found = self.index.match(keys).tolist()
        assert tuple(self.pool[block] for block in found) == self.front(keys)
        assert self.index.num_matched(keys) == len(found)

    @rule(keys=prompts, target=pins)
    def pin(self, keys: BlockKeys) -> Pins:
        found = self.index.match(keys)
        self.index.touch(found)
        self.index.pin(found)
        self.pinned += self.front(keys)
        return found, self.front(keys)

    @rule(pins=consumes(pins))
    def unpin(self, pins: Pins):
        found, hashes = pins
        assert tuple(self.pool[block] for block in found.tolist()) == hashes
        self.index.unpin(found)
        for key in hashes:
            self.pinned.remove(key)

    @rule(
        keys=prompts,
        first=st.integers(0, 3),
        num_seen=st.integers(0, 5),
        is_restore=st.booleans(),
        target=reservations,
    )
    def reserve(self, keys: BlockKeys, first: int, num_seen: int, is_restore: bool) -> Reservation:
        taken = self.index.reserve(keys, first, len(keys), num_seen=num_seen, is_restore=is_restore)
        for entry in taken.evicted:
            assert entry.key not in self.pinned
            del self.cached[entry.key]
            assert entry.key not in self.cached.values(), "a parent was evicted before its child"
            assert entry.key not in keys.hashes[: taken.first], "an ancestor was evicted for its child"
            assert self.pool.pop(entry.block) == entry.key
        assert not {*self.pool} & {*taken.blocks.tolist()}
        assert not {*taken.hashes} & {*self.cached, *self.reserved}
        self.reserved |= chain(taken)
        if (is_restore or self.admits_all) and taken.blocks.size:
            self.had_no_room_left(taken)
        return taken

    def had_no_room_left(self, taken: Reservation):
        """A cut reservation means that nothing is free and that no block may leave."""
        if taken.end == len(taken.keys) or taken.keys.hashes[taken.end] in self.reserved:
            return
        assert self.index.num_free == 0
        parents = {*self.cached.values(), *self.reserved.values()}
        leaves = self.cached.keys() - parents - {*self.pinned}
        assert not leaves or len(self.reserved) < self.index.num_reserved, "a leaf could have left"

    @rule(taken=consumes(reservations))
    def commit(self, taken: Reservation):
        parent = next(iter(chain(taken).values()), None)
        try:
            count = self.index.commit(taken)
        except EngineError:
            assert parent in self.reserved
            self.index.abandon(taken)
            count = 0
        if count:
            assert parent is None or parent in self.cached
            self.pool |= dict(zip(taken.blocks.tolist(), taken.hashes, strict=True))
            self.cached |= chain(taken)
        self.forget(taken)

    @rule(taken=consumes(reservations))
    def abandon(self, taken: Reservation):
        self.index.abandon(taken)
        self.forget(taken)

    def forget(self, taken: Reservation):
        for key in taken.hashes:
            del self.reserved[key]

    @invariant()
    def is_consistent(self):
        if not hasattr(self, "index"):
            return
        self.index.check()
        assert {entry.block: entry.key for entry in self.index.entries()} == self.pool
        assert {*self.pool.values()} == self.cached.keys()
        assert self.index.num_cached == len(self.cached)
        assert self.index.num_pinned == len({*self.pinned})
        assert self.index.num_free + self.index.num_cached + self.index.num_reserved == self.index.num_blocks


def chain(taken: Reservation) -> dict[bytes, bytes | None]:
    """The parent's key of each reserved key."""
    parent = taken.keys.hashes[taken.first - 1] if taken.first and taken.hashes else None
    return dict(zip(taken.hashes, (parent, *taken.hashes), strict=False))


IndexMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestIndexMachine = IndexMachine.TestCase
