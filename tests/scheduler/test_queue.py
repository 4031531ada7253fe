"""Every request leaves the queue once: taken, shed with an error, or dropped with an error."""

import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

from jprefill.errors import DeadlineExceededError, NotReadyError, QueueFullError
from jprefill.kvstore.none import NoStore
from jprefill.scheduler.queue import PendingRequest, WaitingQueue
from jprefill.types import Item, ScoreRequest


def pending(num_tokens=4, deadline_s=None):
    ids = np.zeros(num_tokens, np.int32)
    item = Item(ids, np.zeros(1, np.int32), np.zeros((1, 1), np.int32))
    request = ScoreRequest(np.zeros(0, np.int32), (item,), deadline_s=deadline_s)
    return PendingRequest(request, Future(), NoStore().keys(request))


def queue(max_requests=3, max_tokens=100):
    return WaitingQueue(max_requests, max_tokens)


def test_requests_come_once_in_arrival_order_and_are_taken_once():
    q, sent = queue(), [pending() for _ in range(3)]
    for one in sent:
        q.put(one)
    assert q.wait() == (sent, [])
    assert q.take(sent[:2]) == set(sent[:2])
    assert q.wait() == ([], [])
    assert (q.num_requests, q.num_tokens) == (1, 4)
    assert q.take(sent) == {sent[2]}


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back():
    q = queue()
    for _ in range(3):
        q.put(pending())
    with pytest.raises(QueueFullError, match="3 requests") as refusal:
        q.put(pending(), retry_after_s=7.0)
    assert refusal.value.retry_after_s == 7.0
    assert q.num_requests == 3


def test_tokens_are_bounded_too_but_an_empty_queue_takes_anything():
    q = queue(max_tokens=10)
    q.put(pending(50))
    with pytest.raises(QueueFullError, match="50 tokens are waiting and 1 more"):
        q.put(pending(1))


def test_a_passed_deadline_is_answered_408():
    q = queue()
    late, good = pending(deadline_s=time.monotonic() - 1), pending()
    q.put(late)
    q.put(good)
    q.wait()
    q.shed([late], time.monotonic())
    assert isinstance(late.future.exception(0), DeadlineExceededError)
    assert "the deadline passed 1" in str(late.future.exception(0))
    assert (q.num_shed, q.num_tokens) == (1, 4)


def test_a_caller_that_left_is_skipped():
    q = queue()
    gone, good = pending(), pending()
    q.put(gone)
    q.put(good)
    gone.future.cancel()
    assert q.wait() == ([good], [gone])
    assert (q.num_shed, q.num_tokens) == (1, 4)
    good.future.cancel()
    assert q.poll() == ([], [good])
    assert q.num_shed == 2


def test_wait_blocks_until_there_is_work():
    q = queue()
    threading.Timer(0.05, lambda: q.put(pending())).start()
    assert len(q.wait().came) == 1


def test_a_closed_queue_serves_the_rest_and_refuses_the_new():
    q = queue()
    q.put(pending())
    q.close()
    with pytest.raises(NotReadyError):
        q.put(pending())
    assert len(q.take(q.wait().came)) == 1
    assert q.wait() is None


def test_dropped_requests_are_answered_also_those_put_back_later():
    q, waiting, running = queue(), pending(), pending()
    q.put(running)
    q.take(q.wait().came)
    q.put(waiting)
    q.close()
    q.drop_all(NotReadyError("gone"))
    q.put_back([running])
    assert q.poll() == ([], [waiting])
    for one in (waiting, running):
        assert isinstance(one.future.exception(0), NotReadyError)
    assert (q.num_requests, q.num_tokens) == (0, 0)


def test_what_was_put_back_comes_again():
    q, one = queue(), pending()
    q.put(one)
    q.take(q.wait().came)
    q.put_back([one])
    assert q.wait() == ([one], [])
    q.take([one])
    q.put_back([one])
    assert q.take_all() == [one]
    q.put_back([one])
    assert q.poll() == ([one], [])
