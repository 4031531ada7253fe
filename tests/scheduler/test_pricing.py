"""The price book: prices follow the store by what changed, and cost what the work costs."""

from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvblocks import NoPool

from jprefill.kvstore.eviction import make_order
from jprefill.kvstore.hashing import KeyMaker
from jprefill.kvstore.index import BlockIndex
from jprefill.kvstore.keep import KeepPolicy
from jprefill.kvstore.none import NoStore
from jprefill.kvstore.store import PrefixStore
from jprefill.scheduler.features import ChunkWalk, Features
from jprefill.scheduler.jct import JctModel
from jprefill.scheduler.planning import Room, plan_batch
from jprefill.scheduler.policy import Rule
from jprefill.scheduler.pricing import PriceBook, PriceSource
from jprefill.scheduler.queue import PendingRequest
from jprefill.types import Item, ScoreRequest

BLOCK = 8
MAKER = KeyMaker(b"", BLOCK)
WALK = ChunkWalk(64, (32, 256, 1024))


class IndexSource:
    """A store that is an index with dictionaries below it; counts how often it is asked."""

    block_size = BLOCK

    def __init__(self, num_blocks):
        self.index = BlockIndex(num_blocks, BLOCK, make_order("lru", num_blocks))
        self.lower = set()
        self.num_asked = 0

    def num_on_device(self, keys, limit):
        self.num_asked += 1
        return self.index.num_matched(keys, limit)

    def num_cached(self, keys, limit):
        found = self.index.num_matched(keys, limit)
        while found < limit and keys.hashes[found] in self.lower:
            found += 1
        return found

    def changes(self):
        return self.index.changes()

    def store(self, keys):
        self.index.commit(self.index.reserve(keys, 0, len(keys)))


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 9, length).astype(np.int32)


def item(token_ids):
    return Item(token_ids, np.array([len(token_ids) - 1], np.int32), np.zeros((1, 1), np.int32))


def pending(prefix, *items, **changes):
    request = ScoreRequest(prefix, tuple(map(item, items)))
    token_ids = np.concatenate([prefix, items[0]]) if len(items) == 1 else prefix
    return PendingRequest(request, Future(), MAKER.keys(token_ids), **changes)


def make_book(store, policy="jct", **kwargs):
    book = PriceBook(store, JctModel(), WALK, Rule(policy, 0.0, 1e9), **kwargs)
    book.reprice()
    return book


def test_stores_are_price_sources():
    assert isinstance(NoStore(), PriceSource)
    assert isinstance(IndexSource(1), PriceSource)


# ---- what work is made of ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "rows"),
    [(1, 32), (32, 32), (33, 64), (64, 64), (65, 128), (256, 256), (1024, 1024), (1025, 1056), (2100, 2112), (0, 0)],
)
def test_rows_are_walked_in_whole_chunks_or_one_short_bucket(num_tokens, rows):
    assert WALK.rows(np.array([num_tokens])).tolist() == [rows]


def test_a_single_prompt_costs_its_uncached_rows_and_the_keys_they_see():
    store, one = IndexSource(64), pending(text(0, 40), text(1, 88))  # 128 tokens
    book = make_book(store)
    book.add(one)
    book.reprice()
    assert (book.features(one).num_chunks, book.features(one).attention_area) == (2.0, 128 * 129 / 2)
    store.store(one.keys.head(8))  # 64 tokens
    book.reprice()
    assert (book.features(one).num_chunks, book.features(one).attention_area) == (1.0, 64 * (64 + 65 / 2))


def test_items_see_the_prefix_and_themselves_and_those_that_are_done_are_free():
    one = pending(text(0, 32), text(1, 16), text(2, 8), text(3, 8))
    book = make_book(IndexSource(8))
    book.add(one)
    book.reprice()
    area = 32 * 33 / 2 + 32 * 32 + 16 * 17 / 2 + 2 * (8 * 9 / 2)
    assert (book.features(one).num_chunks, book.features(one).attention_area) == (1.0, area)
    book.remove([one])
    one.next_item = 2
    book.add(one)
    book.reprice()
    area = (32 * 33 / 2 + 8 * 32 + 8 * 9 / 2) * 64 / 40  # 24 rows of padding
    assert (book.features(one).num_chunks, book.features(one).attention_area) == (1.0, area)


@pytest.mark.parametrize("num_items", [1, 3])
@pytest.mark.parametrize("num_stored", [0, 2])
def test_a_pass_of_one_request_costs_what_the_request_was_priced_at(num_items, num_stored):
    index = BlockIndex(64, BLOCK, make_order("lru", 64))
    store = PrefixStore(NoPool(BLOCK), index, KeepPolicy("none", 1), b"")
    request = ScoreRequest(text(0, 40), tuple(item(text(seed, 24)) for seed in range(1, num_items + 1)))
    one = PendingRequest(request, Future(), store.keys(request))
    if num_stored:
        index.commit(index.reserve(one.keys, 0, num_stored))
    book = make_book(store)
    book.add(one)
    book.reprice()
    [piece] = plan_batch([one], Room(1024, 1024), store)
    assert WALK.of_pass([piece]) == book.features(one)


def test_a_request_that_must_run_alone_is_priced_without_the_store():
    store, one = IndexSource(64), pending(text(0, 40), text(1, 88), must_run_alone=True)
    store.store(one.keys)
    book = make_book(store)
    book.add(one)
    book.reprice()
    assert book.features(one).num_chunks == 2.0


# ---- what changed ------------------------------------------------------------------------------------------


def test_only_requests_whose_prefix_changed_are_looked_at():
    store = IndexSource(64)
    book = make_book(store)
    profiles = [text(seed, 64) for seed in range(50)]
    requests = [pending(profiles[i % 50], text(100 + i, 20)) for i in range(500)]
    for one in requests:
        book.add(one)
    assert book.reprice() == 500
    asked = store.num_asked
    assert book.reprice() == 0
    store.store(MAKER.keys(profiles[7]))
    assert book.reprice() == 10
    store.store(MAKER.keys(profiles[9]).head(1))
    assert book.reprice() == 10
    assert store.num_asked == asked  # the changes say it all


def test_after_a_failure_everything_is_looked_at():
    store, one = IndexSource(64), pending(text(0, 40), text(1, 88))
    book = make_book(store)
    store.store(one.keys)
    book.add(one)
    book.reprice()
    store.index.clear()
    assert book.reprice() == 1
    assert book.features(one).num_chunks == 2.0


OPERATIONS = ["add"] * 4 + ["remove"] * 3 + ["store"] * 8 + ["reprice"] * 4 + ["clear"]


@given(st.integers(0, 2**32), st.integers(4, 20))
@settings(max_examples=60, deadline=None)
def test_prices_by_increments_are_the_prices(seed, num_blocks):
    """Prompts over two tokens, so that their chains branch; a small pool, so that blocks come and go."""
    rng, store = np.random.default_rng(seed), IndexSource(num_blocks)
    book, waiting = make_book(store), []
    for name in rng.choice(OPERATIONS, 80):
        prompt = np.repeat(rng.integers(0, 2, 6), BLOCK).astype(np.int32)
        if name == "add":
            waiting.append(pending(prompt, text(0, 5), num_shared_blocks=int(rng.integers(0, 7))))
            book.add(waiting[-1])
        elif name == "remove" and waiting:
            book.remove([waiting.pop(rng.integers(len(waiting)))])
        elif name == "store":
            store.store(MAKER.keys(prompt))
        elif name == "clear":
            store.index.clear()
        elif name == "reprice":
            book.reprice()
            check(book, store, waiting)
    book.reprice()
    check(book, store, waiting)
    assert sorted(map(id, book.order(0.0))) == sorted(map(id, waiting))
    book.remove(waiting)
    assert not book._watched
    assert len(book) == 0


def check(book, store, waiting):
    fresh = make_book(store)
    for one in waiting:
        fresh.add(one)
    fresh.reprice()
    assert [book.features(one) for one in waiting] == [fresh.features(one) for one in waiting]
    assert shared_prices(book) == pytest.approx(shared_prices(fresh))


def shared_prices(book):
    every = slice(0, len(book))
    prices = book._shared_jct_s(book._jct_s(every), every)
    return {id(entry.pending): price for entry, price in zip(book._entries, prices, strict=True)}


def test_the_order_follows_the_store():
    store = IndexSource(64)
    book = make_book(store)
    short, long = pending(text(0, 64), text(1, 30)), pending(text(2, 256), text(3, 20))
    for one in (long, short):
        book.add(one)
    assert list(book.order(0.0)) == [short, long]
    store.store(long.keys)
    assert list(book.order(0.0)) == [long, short]


def test_a_prefix_that_several_wait_for_costs_each_its_share():
    store, shared = IndexSource(64), text(0, 256)
    book = make_book(store)
    alone = pending(text(1, 128), text(2, 20))
    together = [pending(shared, text(seed, 20), num_shared_blocks=32) for seed in range(3, 6)]
    for one in (alone, together[0]):
        book.add(one)
    assert list(book.order(0.0)) == [alone, together[0]]
    for one in together[1:]:
        book.add(one)
    assert list(book.order(0.0)) == [*together, alone]
    book.remove(together[:2])
    assert list(book.order(0.0)) == [alone, together[2]]


def test_the_share_is_of_the_prefix_alone_and_of_nothing_once_it_is_cached():
    store, shared = IndexSource(64), text(0, 256)
    book = make_book(store)
    together = [pending(shared, text(seed, 20), num_shared_blocks=32) for seed in range(4)]
    for one in together:
        book.add(one)
    book.reprice()
    every = slice(0, 4)
    own_s = book.model.predict(Features(0.5, 20 * (256 + 21 / 2) * 32 / 20))
    whole_s = book._jct_s(every)
    assert book._shared_jct_s(whole_s, every) == pytest.approx(own_s + (whole_s - own_s) / 4)
    store.store(together[0].keys.head(32))
    book.reprice()
    assert book._shared_jct_s(book._jct_s(every), every) == pytest.approx(book._jct_s(every))


def test_what_is_saved_is_what_it_would_take_longer_without_the_store():
    store, one = IndexSource(64), pending(text(0, 256), text(1, 20))
    book, every = make_book(store), slice(0, 1)
    book.add(one)
    book.reprice()
    whole_s = book._jct_s(every)
    assert book._saved_s(whole_s, every) == [0.0]
    store.store(one.keys.head(32))
    book.reprice()
    jct_s = book._jct_s(every)
    assert 0 < jct_s < whole_s
    assert book._saved_s(jct_s, every) == pytest.approx(whole_s - jct_s)


def test_priced_once_means_priced_once():
    store = IndexSource(64)
    book = make_book(store, "srjf")
    short, long = pending(text(0, 64), text(1, 30)), pending(text(2, 256), text(3, 20))
    for one in (long, short):
        book.add(one)
    assert list(book.order(0.0)) == [short, long]
    store.store(long.keys)
    assert list(book.order(0.0)) == [short, long]


def test_prices_follow_the_model_as_it_learns():
    book = make_book(IndexSource(8))
    one = pending(text(0, 64), text(1, 30))
    book.add(one)
    list(book.order(0.0))
    before = book.total_jct_s
    for _ in range(100):
        book.model.observe(book.features(one), 3 * before)
    list(book.order(0.0))
    assert book.total_jct_s == pytest.approx(3 * before, rel=0.05)


# ---- lower tiers -------------------------------------------------------------------------------------------


def test_what_lies_below_is_cached_and_costs_its_bytes():
    store, one = IndexSource(64), pending(text(0, 40), text(1, 88))
    store.store(one.keys.head(2))
    store.lower |= set(one.keys.hashes[2:8])
    book = make_book(store, block_bytes=1000, num_refreshed=1)
    book.add(one)
    book.reprice()
    assert (book.features(one).num_chunks, book.features(one).restore_bytes) == (1.0, 6000)


def test_evicted_blocks_are_thought_to_lie_below_until_they_are_looked_up():
    store, one = IndexSource(4), pending(text(0, 40), text(1, 88))
    store.store(one.keys.head(4))
    book = make_book(store, block_bytes=1000, num_refreshed=1)
    book.add(one)
    list(book.order(0.0))
    store.store(MAKER.keys(text(5, 32)))
    book.reprice()
    assert book.features(one).restore_bytes == 4000
    list(book.order(0.0))  # looks one request up again
    assert book.features(one).restore_bytes == 0


def test_in_turns_every_request_is_looked_up_again():
    store = IndexSource(4)
    book = make_book(store, block_bytes=1, num_refreshed=2)
    requests = [pending(text(seed, 40), text(seed, 20)) for seed in range(5)]
    for one in requests:
        book.add(one)
    list(book.order(0.0))
    for one in requests:
        store.lower |= set(one.keys.hashes)
    for _ in range(3):
        list(book.order(0.0))
    assert all(book.features(one).restore_bytes for one in requests)
