"""Plans and packed vectors, by hand and under random requests."""

from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jprefill.kvstore.none import NoStore
from jprefill.scheduler.packer import pack, unpack
from jprefill.scheduler.planning import Room, plan_batch
from jprefill.scheduler.queue import PendingRequest
from jprefill.types import BatchScores, Item, ScoreRequest


def request(prefix_len, *item_lens, num_targets=2):
    def ids(length):
        return np.arange(length, dtype=np.int32)

    return ScoreRequest(
        ids(prefix_len),
        tuple(
            Item(ids(n) + 100, np.array([n - 1], np.int32), np.arange(num_targets, dtype=np.int32)[None])
            for n in item_lens
        ),
    )


STORE = NoStore()


def pending(*args, **kwargs):
    one = request(*args, **kwargs)
    return PendingRequest(one, Future(), STORE.keys(one))


def plan(waiting, max_tokens):
    return plan_batch(waiting, Room(max_tokens, max_tokens), STORE)


def test_the_picture_in_the_docstring():
    batch = pack(plan([pending(2, 2, 1), pending(0, 1)], 8), bucket=8)
    assert batch.num_tokens == 6
    assert batch.token_ids.tolist() == [0, 1, 100, 101, 100, 100, 0, 0]
    assert batch.positions.tolist() == [0, 1, 2, 3, 2, 0, 0, 0]
    assert batch.prefix_lo.tolist() == [0, 0, 0, 0, 0, 5, 0, 0]
    assert batch.prefix_hi.tolist() == [0, 0, 2, 2, 2, 5, 0, 0]
    assert batch.self_lo.tolist() == [0, 0, 2, 2, 4, 5, 0, 0]
    assert batch.self_pos.tolist() == [0, 1, 2, 3, 4, 5, -1, -1]
    assert batch.read_rows.tolist() == [3, 4, 5]
    assert batch.pair_rows.tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.pair_ids.tolist() == [0, 1, 0, 1, 0, 1]


def test_requests_ride_together_while_they_fit():
    waiting = [pending(10, 5, 5), pending(0, 20), pending(0, 1)]
    assert [p.num_tokens for p in plan(waiting, 40)] == [20, 20]
    assert [p.num_tokens for p in plan(waiting, 41)] == [20, 20, 1]


def test_a_request_too_large_for_one_batch_is_cut_at_its_items():
    one = pending(10, 5, 5, 5)
    [piece] = plan([one, pending(0, 1)], 20)
    assert (piece.first_item, piece.end_item, piece.num_tokens) == (0, 2, 20)
    one.next_item = 2
    pieces = plan([one, pending(0, 1)], 20)
    assert [(p.first_item, p.end_item) for p in pieces] == [(2, 3), (0, 1)]


def test_a_later_request_is_never_cut():
    pieces = plan([pending(0, 10), pending(5, 5, 5)], 20)
    assert len(pieces) == 1


def test_a_request_that_must_run_alone_does():
    alone = pending(0, 3)
    alone.must_run_alone = True
    assert len(plan([alone, pending(0, 3)], 100)) == 1
    assert len(plan([pending(0, 3), alone], 100)) == 1


lengths = st.lists(st.integers(1, 12), min_size=1, max_size=4)
requests = st.lists(st.tuples(st.integers(0, 20), lengths, st.integers(1, 3)), min_size=1, max_size=6)


@given(requests)
def test_every_row_sees_its_own_prompt_and_nothing_else(shapes):
    """Follow each row's ranges back to token ids: they must spell its prompt up to itself."""
    waiting = [pending(p, *items, num_targets=m) for p, items, m in shapes]
    pieces = plan(waiting, 64)
    batch = pack(pieces, bucket=64)
    row = 0
    for piece in pieces:
        prefix = piece.pending.request.prefix
        if piece.is_one_segment:
            runs = [(prefix[:0], np.concatenate([prefix, piece.items[0].token_ids]))]
        else:
            runs = [(prefix[:0], prefix), *((prefix, item.token_ids) for item in piece.items)]
        for front, tokens in runs:
            for t in range(len(tokens)):
                seen = [*range(batch.prefix_lo[row], batch.prefix_hi[row])]
                seen += range(batch.self_lo[row], batch.self_pos[row] + 1)
                assert batch.token_ids[seen].tolist() == [*front, *tokens[: t + 1]]
                assert batch.positions[seen].tolist() == list(range(len(front) + t + 1))
                row += 1
    assert row == batch.num_tokens
    assert (batch.self_pos[row:] == -1).all()


@given(requests)
def test_unpack_undoes_pack(shapes):
    pieces = plan([pending(p, *items, num_targets=m) for p, items, m in shapes], 64)
    batch = pack(pieces, bucket=64)
    marks = np.arange(len(batch.pair_ids), dtype=np.float32)
    rows = np.arange(len(batch.read_rows), dtype=np.int32)
    cut = unpack(pieces, BatchScores(marks, rows, rows.astype(np.float32)))
    assert np.concatenate([i.logprobs.reshape(-1) for items in cut for i in items]).tolist() == marks.tolist()
    assert [i.top_ids.tolist() for items in cut for i in items] == [[r] for r in rows.tolist()]
    for piece, items in zip(pieces, cut, strict=True):
        assert [i.logprobs.shape for i in items] == [item.targets.shape for item in piece.items]


@given(requests, st.integers(32, 80))
def test_repeated_plans_serve_every_item_once_and_in_order(shapes, max_tokens):
    waiting = [pending(p, *items) for p, items, _ in shapes]
    served = []
    for _ in range(100):
        if not waiting:
            break
        pieces = plan(waiting, max_tokens)
        assert pieces
        assert sum(p.num_tokens for p in pieces) <= max_tokens
        for piece in pieces:
            assert piece.first_item == piece.pending.next_item
            piece.pending.next_item = piece.end_item
            served.append(piece.pending)
        waiting = [p for p in waiting if p.num_items_left]
    assert not waiting
    firsts = list(dict.fromkeys(served))
    assert len(firsts) == len(shapes)


def test_an_item_that_never_fits_is_a_bug_of_admission():
    with pytest.raises(ValueError, match="broadcast"):
        pack(plan([pending(0, 30)], 64), bucket=16)
