"""Who rides in the next pass: budgets, suspended passes, and what is learnt."""

import math
from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvblocks import NoPool

from jprefill.config import EngineConfig
from jprefill.kvstore.eviction import make_order
from jprefill.kvstore.index import BlockIndex
from jprefill.kvstore.keep import KeepPolicy
from jprefill.kvstore.none import NoStore
from jprefill.kvstore.store import PrefixStore
from jprefill.scheduler.features import ChunkWalk, Features
from jprefill.scheduler.jct import JctModel, Sample
from jprefill.scheduler.planning import Room
from jprefill.scheduler.preemption import MAX_DELAY, MAX_SHARE, RunningPass
from jprefill.scheduler.queue import PendingRequest
from jprefill.scheduler.scheduler import Scheduler
from jprefill.types import Item, ScoreRequest

WALK = ChunkWalk(64, (256, 1024))
BLOCK = 16


def make_store():
    return PrefixStore(NoPool(BLOCK), BlockIndex(64, BLOCK, make_order("lru", 64)), KeepPolicy("prefix", 999), b"")


def model(per_pass_s=0.01, per_chunk_s=0.01):
    """Of times that are known."""
    one = JctModel()
    shapes = [(1.0, 0.0), (2.0, 0.0), (8.0, 0.0), (16.0, 0.0)]
    one.fit([Sample(Features(chunks, area), per_pass_s + per_chunk_s * chunks) for chunks, area in shapes])
    return one


def make_scheduler(store=None, jct=None, **changes):
    return Scheduler(EngineConfig(**changes), store or NoStore(), jct or model(), WALK, Room(1024, 1024))


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 99, length).astype(np.int32)


def pending(num_tokens, *, prefix=None, store=None, submitted_s=0.0, **changes):
    item = Item(text(num_tokens, num_tokens), np.array([num_tokens - 1], np.int32), np.zeros((1, 1), np.int32))
    request = ScoreRequest(np.zeros(0, np.int32) if prefix is None else prefix, (item,), **changes)
    return PendingRequest(request, Future(), (store or NoStore()).keys(request), submitted_s=submitted_s)


def sizes(pieces):
    return [piece.num_tokens for piece in pieces]


def test_the_budget_is_the_knee_of_tokens_a_second():
    assert make_scheduler(jct=model(0.01, 0.01)).budget == 1024  # 19 chunks, but a pass holds 16
    assert make_scheduler(jct=model(0.001, 0.01)).budget == 2 * 64  # 1.9 chunks
    assert make_scheduler(jct=model(0.0001, 0.01)).budget == 64
    assert make_scheduler(jct=model(0.01, 0.01), max_batch_tokens=300).budget == 300


def test_short_requests_ride_up_to_the_budget_and_a_long_one_alone():
    scheduler = make_scheduler(jct=model(0.001, 0.01))
    scheduler.arrive([pending(length) for length in (40, 900, 41, 42, 43)])
    assert sizes(scheduler.plan(1.0)) == [40, 41, 42]
    assert sizes(scheduler.plan(1.0)) == [43]
    assert sizes(scheduler.plan(1.0)) == [900]
    assert scheduler.plan(1.0) == []


def test_without_packing_each_runs_alone():
    scheduler = make_scheduler(packing=False)
    scheduler.arrive([pending(length) for length in (40, 41)])
    assert sizes(scheduler.plan(1.0)) == [40]


def test_who_left_is_not_planned_and_strangers_are_passed_over():
    scheduler = make_scheduler()
    waiting = [pending(40), pending(41)]
    scheduler.arrive(waiting)
    scheduler.leave([waiting[0], pending(42)])
    assert sizes(scheduler.plan(1.0)) == [41]
    assert len(scheduler) == 0


# ---- before the rest of a pass that runs -------------------------------------------------------------------


def long_pass(scheduler, length=1000, **changes):
    scheduler.arrive([pending(length, **changes)])
    pieces = scheduler.plan(0.0)
    return RunningPass(pieces, scheduler.predict_s(pieces), 0.0)


def test_a_pass_goes_first_only_if_it_is_short_against_what_is_left():
    scheduler = make_scheduler(jct=model(0.0001, 0.01))
    passing = long_pass(scheduler)  # 16 chunks, 0.16 s
    scheduler.arrive([pending(200)])  # 4 chunks, 0.04 s
    assert scheduler.plan_before(passing, 0.4, 1.0) == []
    assert sizes(scheduler.plan_before(passing, 0.6, 1.0)) == [200]


def test_who_goes_first_has_waited_as_long_as_all_others_will_for_it():
    scheduler = make_scheduler(jct=model(0.002, 0.01))
    passing = long_pass(scheduler)  # 16 chunks of 64
    scheduler.arrive([pending(100, submitted_s=1.0)])  # 28 rows of padding: 4.4 ms, and 2 ms of any pass
    assert scheduler.plan_before(passing, 0.9, 1.006) == []
    assert passing.look_again_s == pytest.approx(1.0 + 0.002 + 0.01 * 28 / 64, abs=1e-3)
    assert sizes(scheduler.plan_before(passing, 0.9, passing.look_again_s)) == [100]
    assert passing.look_again_s == math.inf


def test_time_spent_before_the_pass_began_does_not_count():
    scheduler = make_scheduler(jct=model(0.002, 0.01))
    scheduler.arrive([pending(1000, submitted_s=0.0)])
    pieces = scheduler.plan(10.0)
    passing = RunningPass(pieces, scheduler.predict_s(pieces), 10.0)
    scheduler.arrive([pending(100, submitted_s=0.0)])
    assert scheduler.plan_before(passing, 0.9, 10.001) == []
    assert sizes(scheduler.plan_before(passing, 0.9, 10.1)) == [100]


def test_the_more_ride_the_shorter_is_what_goes_first():
    scheduler = make_scheduler(jct=model(0.01, 0.01))
    scheduler.arrive([pending(250) for _ in range(4)])
    pieces = scheduler.plan(0.0)
    assert sizes(pieces) == [250] * 4
    scheduler.arrive([pending(200), pending(150)])  # 0.05 s and 0.04 s
    assert sizes(scheduler.plan_before(RunningPass(pieces, 0.17, 0.0), 0.99, 10.0)) == [150]
    assert sizes(scheduler.plan_before(RunningPass(pieces, 0.17, 0.0), 0.99, 10.0)) == []
    assert sizes(scheduler.plan_before(RunningPass(pieces[:1], 0.17, 0.0), 0.99, 10.0)) == [200]


def test_an_overdue_request_that_is_long_does_not_stand_in_the_way_of_short_ones():
    scheduler = make_scheduler(jct=model(0.0001, 0.01), max_overtaken_s=5.0)
    passing = long_pass(scheduler)
    scheduler.arrive([pending(900, submitted_s=0.0), pending(60, submitted_s=9.0)])
    assert sizes(scheduler.plan_before(passing, 0.9, 10.0)) == [60]
    assert sizes(scheduler.plan(10.0)) == [900]


def test_those_that_go_first_hold_a_pass_up_for_its_own_time_at_most():
    scheduler = make_scheduler(jct=model(0.0001, 0.01))
    passing = long_pass(scheduler)
    for delayed_s, is_possible in ((0.0, True), (0.11, True), (MAX_DELAY * passing.predicted_s, False)):
        passing.delayed_s = delayed_s
        scheduler.arrive([pending(200)])
        assert bool(scheduler.plan_before(passing, 0.9, 1.0)) == is_possible


@given(st.floats(0.001, 10), st.lists(st.floats(0, 1), max_size=50))
def test_delays_are_bounded_whatever_comes(predicted_s, shares):
    passing = RunningPass((), predicted_s, 0.0)
    for share_left in sorted(shares, reverse=True):
        allowance_s = passing.allowance_s(share_left)
        assert allowance_s <= MAX_SHARE * share_left * predicted_s
        passing.delayed_s += max(0.0, allowance_s)  # the adversary takes all of it
    assert passing.delayed_s <= MAX_DELAY * predicted_s * (1 + 1e-9)


def test_who_needs_blocks_of_the_suspended_pass_waits_for_it():
    store = make_store()
    scheduler = make_scheduler(store, jct=model(0.0001, 0.01))
    prefix = text(7, 640)
    scheduler.arrive([pending(20, prefix=prefix, store=store, num_marked_tokens=640)])
    pieces = scheduler.plan(0.0)
    passing = RunningPass(pieces, 100.0, 0.0)
    mate = pending(30, prefix=prefix, store=store)
    other = pending(200, store=store)
    scheduler.arrive([mate, other])
    assert sizes(scheduler.plan_before(passing, 1.0, 1.0)) == [200]
    store.release(pieces[0].lease, is_good=True)
    assert sizes(scheduler.plan(2.0)) == [30]


@pytest.mark.parametrize(("policy", "can_wait"), [("jct", True), ("srjf", True), ("fcfs", False), ("hrrn", False)])
def test_only_policies_of_time_suspend(policy, can_wait):
    scheduler = make_scheduler(policy=policy)
    assert scheduler.can_wait(RunningPass((), 10.0, 0.0)) == can_wait
    assert not scheduler.can_wait(RunningPass((), 0.001, 0.0))


# ---- learning ----------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.floats(0.2, 3.0))
def test_prices_follow_what_passes_took(factor):
    scheduler = make_scheduler()
    for length in (64, 1000, 300) * 20:
        scheduler.arrive([pending(length)])
        pieces = scheduler.plan(0.0)
        scheduler.learn(pieces, factor * model().predict(WALK.of_pass(pieces)))
    assert scheduler.predict_s(pieces) == pytest.approx(factor * model().predict(WALK.of_pass(pieces)), rel=0.1)
