"""Who goes first: each policy, the rules above it, and a wait that has a bound whatever arrives."""

from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jprefill.kvstore.hashing import BlockKeys
from jprefill.kvstore.none import NoStore
from jprefill.scheduler.features import ChunkWalk
from jprefill.scheduler.jct import JctModel
from jprefill.scheduler.policy import SCORES, Rule, Waiting, smallest_first
from jprefill.scheduler.pricing import PriceBook
from jprefill.scheduler.queue import PendingRequest
from jprefill.types import Item, ScoreRequest

WAITING = Waiting(
    waited_s=np.array([9.0, 6.0, 5.0, 1.0]),
    jct_s=np.array([8.0, 1.0, 0.5, 0.4]),
    shared_jct_s=np.array([8.0, 1.0, 0.5, 0.4]),
    saved_s=np.zeros(4),
    arrival_jct_s=np.array([8.0, 1.0, 2.0, 3.0]),
    num_cached_tokens=np.array([0, 10, 90, 50]),
    num_new_tokens=np.array([900, 300, 10, 20]),
)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", [0, 1, 2, 3]),  # waited longest
        ("lpm", [2, 3, 1, 0]),  # 90, 50, 10, 0 cached
        ("hrrn", [2, 3, 1, 0]),  # waited/new: 0.5, 0.05, 0.02, 0.01
        ("srjf", [1, 2, 3, 0]),  # priced at arrival: 1, 2, 3, 8
        ("jct", [2, 3, 1, 0]),  # jct - 0.05 waited: 0.25, 0.35, 0.7, 7.55
    ],
)
def test_each_policy_has_its_order(policy, order):
    assert np.argsort(Rule(policy, 0.05, 1e9).scores(WAITING)).tolist() == order


def test_waiting_makes_up_for_a_long_job_at_the_price_of_fairness():
    assert np.argsort(Rule("jct", 1.0, 1e9).scores(WAITING)).tolist() == [1, 2, 0, 3]  # -5, -4.5, -1, -0.6


def test_what_the_store_saves_now_goes_before_what_it_does_not():
    saving = WAITING._replace(saved_s=np.array([9.0, 0.0, 0.0, 0.0]))
    assert np.argsort(Rule("jct", 0.05, 1e9).scores(saving)).tolist() == [0, 2, 3, 1]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_lazy_order_is_the_sorted_order(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    number = data.draw(st.integers(0, 700))
    spread = data.draw(st.lists(st.integers(1, 900), min_size=3, max_size=3))
    keys = [rng.integers(0, size, number) for size in spread] + [rng.permutation(number)]
    keys[1] = np.where(keys[1] == 0, np.inf, keys[1])
    assert list(smallest_first(np.arange(number), keys)) == np.lexsort(keys[::-1]).tolist()


# ---- the rules above the policy ----------------------------------------------------------------------------


def pending(num_tokens=10, submitted_s=0.0, deadline_s=None, num_items=1, priority=0, group=None):
    item = Item(np.zeros(num_tokens, np.int32), np.array([num_tokens - 1], np.int32), np.zeros((1, 1), np.int32))
    request = ScoreRequest(np.zeros(0, np.int32), (item,) * num_items, deadline_s=deadline_s, priority=priority)
    keys = NoStore().keys(request) if group is None else BlockKeys((group,), np.zeros((1, 16), np.int32))
    return PendingRequest(request, Future(), keys, submitted_s=submitted_s, num_shared_blocks=len(keys))


def make_book(policy="jct", fairness=0.0, max_overtaken_s=100.0):
    return PriceBook(NoStore(), JctModel(), ChunkWalk(64, (64, 1024)), Rule(policy, fairness, max_overtaken_s))


def ordered(book, requests, now_s=1.0):
    return [requests.index(one) for one in book.order(now_s)]


def test_priority_goes_before_score_and_deadline_breaks_ties():
    book = make_book()
    requests = [
        pending(900),
        pending(priority=1),
        pending(deadline_s=8.0, priority=1),
        pending(deadline_s=5.0, priority=1),
        pending(900, priority=-1),
    ]
    for one in requests:
        book.add(one)
    assert ordered(book, requests) == [4, 0, 3, 2, 1]


def test_an_overdue_request_goes_before_everything():
    book = make_book(max_overtaken_s=10.0)
    requests = [pending(900, submitted_s=0.0), pending(900, submitted_s=-1.0), pending(submitted_s=5.0, priority=-5)]
    for one in requests:
        book.add(one)
    assert ordered(book, requests, now_s=8.9) == [2, 0, 1]
    assert ordered(book, requests, now_s=9.5) == [1, 2, 0]
    assert ordered(book, requests, now_s=12.0) == [1, 0, 2]


def test_requests_with_one_prefix_come_together_where_the_first_of_them_stands():
    book = make_book("hrrn")
    requests = [
        pending(submitted_s=float(-i), group=group) for i, group in enumerate([b"a", None, b"b", b"a", b"b", b"a"])
    ]
    for one in requests:
        book.add(one)
    assert ordered(book, requests) == [5, 3, 0, 4, 2, 1]
    book.remove([requests[5], requests[3]])
    assert ordered(book, requests) == [4, 2, 1, 0]
    book.remove([requests[0], requests[2], requests[4]])
    assert ordered(book, requests) == [1]


def test_late_requests_are_named_and_stay_until_they_are_removed():
    book = make_book()
    requests = [pending(deadline_s=deadline_s) for deadline_s in (3.0, None, 2.0)]
    for one in requests:
        book.add(one)
    assert book.late(1.0) == []
    assert book.late(2.5) == [requests[2]]
    assert len(book) == 3
    assert all(one in book for one in requests)


def test_a_low_priority_waits_in_proportion():
    assert [Rule("jct", 0.0, 10.0).due_s(1.0, priority) for priority in (-3, 0, 1, 4)] == [11, 11, 21, 51]


ARRIVALS = st.lists(  # (before which pass, tokens, priority): short and urgent ones are what an adversary sends
    st.tuples(st.integers(0, 40), st.sampled_from([1, 64, 900]), st.integers(-2, 2)), max_size=60
)


@pytest.mark.parametrize("policy", SCORES)
@given(ARRIVALS, st.floats(0, 2), st.sampled_from([0.0, 1.0, 7.0]), st.lists(st.floats(0.01, 4), min_size=1))
@settings(max_examples=80, deadline=None)
def test_nobody_is_overtaken_beyond_the_bound_whatever_arrives(policy, arrivals, fairness, bound_s, pass_s):
    """One request a pass. Once r is overdue, no more passes start before it than the claim in `policy` allows."""
    book, rule = make_book(policy, fairness, bound_s), Rule(policy, fairness, bound_s)
    due_s, allowed, now_s, number = {}, {}, 0.0, 0
    while number <= 40 or len(book):
        for before, num_tokens, priority in arrivals:
            if before == number:
                one = pending(num_tokens, now_s, priority=priority)
                book.add(one)
                due_s[one] = rule.due_s(now_s, priority)
        if len(book):
            for one, due in due_s.items():
                if due <= now_s and one not in allowed:
                    allowed[one] = sum(other <= due for other in due_s.values()) - 1
            chosen = next(book.order(now_s))
            book.remove([chosen])
            del due_s[chosen]
            allowed.pop(chosen, None)
            for one in allowed:
                allowed[one] -= 1
                assert allowed[one] >= 0
        now_s += pass_s[number % len(pass_s)]
        number += 1
    assert not due_s
