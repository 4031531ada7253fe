"""Plans over a real store whose pool holds token ids where a device holds KV: nobody may ever see a wrong token."""

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jprefill.kvstore.eviction import make_order
from jprefill.kvstore.index import BlockIndex
from jprefill.kvstore.keep import KeepPolicy
from jprefill.kvstore.store import PrefixStore
from jprefill.scheduler.filling import Filling
from jprefill.scheduler.packer import pack
from jprefill.scheduler.planning import Room, plan_batch
from jprefill.scheduler.queue import PendingRequest
from jprefill.types import Item, ScoreRequest

BLOCK = 8


class TokenPool:
    """A pool whose KV is (token id, position): enough to see what a row would attend to."""

    block_size, block_bytes = BLOCK, 1

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self.reset()

    def reset(self):
        self.content = np.full((self.num_blocks, BLOCK, 2), -7)

    def read(self, block_ids):
        raise AssertionError("no lower tier here")

    write = read


def make_store(num_blocks=64, keep="prefix", eviction="saved_time"):
    pool = TokenPool(num_blocks)
    index = BlockIndex(num_blocks, BLOCK, make_order(eviction, num_blocks))
    return PrefixStore(pool, index, KeepPolicy(keep, 10_000), b""), pool, index


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 50, length).astype(np.int32)


def item(token_ids, row=-1):
    return Item(token_ids, np.array([len(token_ids) + row if row < 0 else row], np.int32), np.zeros((1, 1), np.int32))


def request(prefix, *items, **changes):
    return ScoreRequest(prefix, tuple(map(item, items)), **changes)


def pending(store, one):
    waiting = PendingRequest(one, Future(), store.keys(one))
    waiting.num_shared_blocks = store.arrive(one, waiting.keys)
    return waiting


def run(pool, batch, num_kv_rows):
    """What `Runner.run` does with blocks, and what each token row sees: (token, position) pairs."""
    kv = np.full((num_kv_rows, 2), -1)
    for block, row in zip(batch.loads.blocks, batch.loads.rows, strict=True):
        kv[row : row + BLOCK] = pool.content[block]
    for row in range(batch.num_tokens):
        kv[batch.self_pos[row]] = batch.token_ids[row], batch.positions[row]
    for block, row in zip(batch.keeps.blocks, batch.keeps.rows, strict=True):
        pool.content[block] = kv[row : row + BLOCK]
    return [
        np.concatenate([kv[lo:hi], kv[start : pos + 1]])
        for lo, hi, start, pos in zip(batch.prefix_lo, batch.prefix_hi, batch.self_lo, batch.self_pos, strict=True)
    ]


def step(store, pool, waiting, room, *, is_good=True):
    """One pass; checks that what is read saw exactly its own prompt. Returns the pieces."""
    pieces = plan_batch(waiting, room, store)
    num_tokens = sum(piece.num_tokens for piece in pieces)
    assert num_tokens <= room.num_tokens
    batch = pack(pieces, max(room.num_tokens, 1))
    assert batch.num_tokens == num_tokens
    assert batch.self_pos.max() < room.num_kv_rows
    assert (np.diff(batch.self_pos[: batch.num_tokens]) > 0).all()
    seen = run(pool, batch, room.num_kv_rows)
    reads = iter(batch.read_rows.tolist())
    for piece in pieces:
        for one in piece.items:
            prompt = np.concatenate([piece.pending.request.prefix, one.token_ids])
            end = len(piece.pending.request.prefix) + int(one.rows[0]) + 1
            expected = np.stack([prompt[:end], np.arange(end)], 1)
            np.testing.assert_array_equal(seen[next(reads)], expected)
        starts = [piece.num_cached] if piece.num_cached else []
        assert all(start % room.grid == 0 for start in starts)
    if room.grid > 1:
        begins = batch.self_lo[: batch.num_tokens]
        assert not (begins % room.grid).any()
        assert not (batch.prefix_lo[: batch.num_tokens] % room.grid).any()
    for piece in pieces:
        store.release(piece.lease, is_good=is_good)
        piece.pending.next_item = piece.end_item
    return pieces


def test_a_profile_is_computed_once_and_the_suffix_is_not_kept():
    store, pool, index = make_store()
    profile, room = text(0, 40), Room(512, 512)
    [first] = step(store, pool, [pending(store, request(profile, text(1, 12)))], room)
    assert (first.num_cached, first.num_tokens, index.num_cached) == (0, 52, 5)
    [second] = step(store, pool, [pending(store, request(profile, text(2, 12)))], room)
    assert (second.num_cached, second.num_tokens, index.num_cached) == (40, 12, 5)
    assert (second.num_saved_tokens, second.num_kept_tokens) == (40, 0)


def test_a_full_hit_still_computes_the_row_that_is_read():
    store, pool, _ = make_store(keep="all")
    same = request(text(0, 0), text(0, 48))
    step(store, pool, [pending(store, same)], Room(512, 512))
    [again] = step(store, pool, [pending(store, same)], Room(512, 512))
    assert (again.num_cached, again.num_tokens) == (40, 8)


def test_rows_inside_the_item_bound_what_may_come_from_the_store():
    store, pool, _ = make_store(keep="all")
    early = ScoreRequest(text(0, 8), (item(text(1, 32), row=3),))
    step(store, pool, [pending(store, early)], Room(512, 512))
    [again] = step(store, pool, [pending(store, early)], Room(512, 512))
    assert again.num_cached == 8


def test_equal_cold_prefixes_are_computed_once_in_the_same_pass():
    store, pool, index = make_store(num_blocks=128)
    profile, room = text(0, 160), Room(1024, 1024)
    waiting = [pending(store, request(profile, text(i, 10))) for i in range(1, 5)]
    other = pending(store, request(text(9, 0), text(9, 30)))
    pieces = step(store, pool, [*waiting, other], room)
    assert [(piece.num_tokens, piece.num_cached) for piece in pieces] == [(170, 0), *[(10, 160)] * 3, (30, 0)]
    assert index.num_cached == 20
    [later] = step(store, pool, [pending(store, request(profile, text(5, 10)))], room)
    assert (later.num_tokens, later.host) == (10, None)


def test_rows_are_shared_where_nothing_can_be_kept():
    store, pool, index = make_store(num_blocks=2)
    profile = text(0, 160)
    pieces = step(store, pool, [pending(store, request(profile, text(i, 10))) for i in range(3)], Room(1024, 1024))
    assert [piece.num_tokens for piece in pieces] == [170, 10, 10]
    assert index.num_cached == 2


def test_what_follows_cached_blocks_is_shared_too():
    store, pool, _ = make_store(num_blocks=128)
    profile, room = text(0, 240), Room(1024, 1024)
    step(store, pool, [pending(store, request(profile[:80], text(1, 10)))], room)
    pieces = step(store, pool, [pending(store, request(profile, text(i, 10))) for i in range(2, 5)], room)
    assert [(piece.num_tokens, piece.num_cached) for piece in pieces] == [(170, 80), (10, 240), (10, 240)]


def test_several_items_share_the_rows_of_another_only_if_their_prefix_is_whole_blocks():
    room = Room(1024, 1024)
    for length, num_pieces in ((160, 2), (165, 1)):
        store, pool, _ = make_store(num_blocks=128)
        waiting = [pending(store, request(text(0, length), text(i, 10), text(i + 9, 10))) for i in range(1, 3)]
        pieces = step(store, pool, waiting, room)
        assert len(pieces) == num_pieces  # the other one waits for the blocks
        assert pieces[0].num_tokens == length + 20
        assert sum(piece.num_tokens for piece in pieces[1:]) == 20 * (num_pieces - 1)


def test_a_salt_separates_rows_too():
    store, pool, _ = make_store(num_blocks=128)
    profile = text(0, 160)
    waiting = [pending(store, request(profile, text(i, 10), salt=salt)) for i, salt in enumerate("ab")]
    pieces = step(store, pool, waiting, Room(1024, 1024))
    assert [piece.num_tokens for piece in pieces] == [170, 170]


def test_who_shares_the_first_prefix_may_double_the_pass():
    store, _, _ = make_store(num_blocks=128)
    waiting = [pending(store, request(text(0, 160), text(i, 20))) for i in range(1, 20)]
    pieces = plan_batch(waiting, Room(1024, 1024), store, filling=Filling(64, 1024))
    assert [piece.num_tokens for piece in pieces] == [180] + 9 * [20]
    for piece in pieces:
        store.release(piece.lease, is_good=True)
    assert len(plan_batch(waiting[10:], Room(1024, 1024), store, filling=Filling(64, 1024))) == 3
    assert len(plan_batch(waiting[13:], Room(1024, 1024), store, filling=Filling(0, 1024))) == 1


def test_a_prefix_that_many_share_is_loaded_once():
    store, pool, _ = make_store(num_blocks=128)
    profile = text(0, 160)
    step(store, pool, [pending(store, request(profile, text(1, 10)))], Room(1024, 1024))
    waiting = [pending(store, request(profile, text(i, 10))) for i in range(2, 12)]
    pieces = plan_batch(waiting, Room(1024, 280), store)
    assert len(pieces) == 10
    assert len(pack(pieces, 1024).loads.blocks) == 20
    for piece in pieces:
        store.release(piece.lease, is_good=True)


def test_others_join_up_to_the_budget_and_the_first_comes_in_any_case():
    store, _, _ = make_store()
    waiting = [pending(store, request(text(0, 0), text(i, 20))) for i in range(6)]
    for budget, num_pieces in ((0, 1), (39, 1), (40, 2), (60, 3), (None, 6)):
        filling = None if budget is None else Filling(budget, 512)
        pieces = plan_batch(waiting, Room(512, 512), store, filling=filling)
        assert [piece.pending for piece in pieces] == waiting[:num_pieces]


def test_single_use_prompts_are_never_kept_but_what_comes_twice_is():
    store, pool, index = make_store()
    room, prompt = Room(512, 512), text(0, 64)
    step(store, pool, [pending(store, request(prompt[:0], prompt))], room)
    assert index.num_cached == 0
    step(store, pool, [pending(store, request(prompt[:0], np.concatenate([prompt[:40], text(1, 9)])))], room)
    assert index.num_cached == 5  # its first 40 tokens were seen before
    [third] = step(store, pool, [pending(store, request(prompt[:0], np.concatenate([prompt[:40], text(2, 9)])))], room)
    assert third.num_cached == 40


def test_marked_tokens_are_kept_at_first_sight():
    store, pool, index = make_store()
    step(store, pool, [pending(store, request(text(0, 0), text(0, 64), num_marked_tokens=33))], Room(512, 512))
    assert index.num_cached == 4


@pytest.mark.parametrize(("keep", "num_kept"), [("none", 0), ("prefix", 2), ("all", 8)])
def test_what_is_kept_follows_the_setting(keep, num_kept):
    store, pool, index = make_store(keep=keep)
    step(store, pool, [pending(store, request(text(0, 16), text(1, 48)))], Room(512, 512))
    assert index.num_cached == num_kept


def test_salts_separate_and_uses_store_opts_out():
    store, pool, index = make_store()
    profile, room = text(0, 40), Room(512, 512)
    step(store, pool, [pending(store, request(profile, text(1, 9), salt="a"))], room)
    [other] = step(store, pool, [pending(store, request(profile, text(1, 9), salt="b"))], room)
    assert other.num_cached == 0
    [same] = step(store, pool, [pending(store, request(profile, text(1, 9), salt="a"))], room)
    assert same.num_cached == 40
    num_cached = index.num_cached
    [private] = step(store, pool, [pending(store, request(profile, text(1, 9), salt="a", uses_store=False))], room)
    assert (private.num_cached, index.num_cached) == (0, num_cached)


def test_a_shared_prompt_is_common_to_all_salts_but_not_reported():
    store, pool, _ = make_store()
    store.set_shared_tokens(text(0, 24))
    prompt, room = np.concatenate([text(0, 24), text(1, 24)]), Room(512, 512)
    step(store, pool, [pending(store, request(prompt, text(2, 9), salt="a"))], room)
    [other] = step(store, pool, [pending(store, request(prompt, text(2, 9), salt="b"))], room)
    assert (other.num_cached, other.num_saved_tokens) == (24, 0)


def test_what_a_failed_pass_kept_is_never_found():
    store, pool, index = make_store()
    one = request(text(0, 40), text(1, 9))
    step(store, pool, [pending(store, one)], Room(512, 512), is_good=False)
    assert index.num_cached == index.num_reserved == index.num_pinned == 0
    [again] = step(store, pool, [pending(store, one)], Room(512, 512))
    assert again.num_cached == 0


families = st.tuples(st.integers(0, 2), st.integers(0, 140), st.lists(st.integers(1, 30), min_size=1, max_size=4))
rounds = st.lists(st.lists(families, min_size=1, max_size=5), min_size=1, max_size=6)


@settings(max_examples=120, deadline=None)
@given(
    rounds,
    st.sampled_from([1, 16, 32]),
    st.sampled_from([3, 20, 200]),
    st.sampled_from(["prefix", "all", "none"]),
    st.sampled_from(["saved_time", "lru"]),
    st.integers(0, 3),
)
def test_every_read_row_sees_its_prompt_whatever_the_store_holds(rounds, grid, num_blocks, keep, eviction, bad_round):
    """Random requests of three families with common beginnings, over a pool that is small, fitting or large."""
    store, pool, index = make_store(num_blocks, keep, eviction)
    room = Room(288, 416, grid)
    stems = [text(100 + family, 140) for family in range(3)]
    for number, shapes in enumerate(rounds):
        waiting = [
            pending(store, request(stems[family][:length], *(text(7 * number + i + n, n) for i, n in enumerate(items))))
            for family, length, items in shapes
        ]
        while waiting:
            pieces = step(store, pool, waiting, room, is_good=number != bad_round)
            assert pieces
            waiting = [one for one in waiting if one.num_items_left]
            index.check()
        assert index.num_pinned == index.num_reserved == 0
        if keep == "none":
            assert index.num_cached == 0


def test_requests_that_run_alone_leave_the_store_alone():
    store, pool, index = make_store()
    one = request(text(0, 40), text(1, 9))
    step(store, pool, [pending(store, one)], Room(512, 512))
    retry = pending(store, replace(one))
    retry.must_run_alone = True
    [piece] = step(store, pool, [retry], Room(512, 512))
    assert (piece.num_cached, index.num_cached) == (0, 5)
