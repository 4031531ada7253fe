"""Shorter passes go before the rest of a long one: every answer is the same, once, and nobody is held up for ever."""

import time
from concurrent.futures import CancelledError

import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from tiny import logprobs, make_engine, make_runner, prompt, tokens

from jprefill.errors import DeadlineExceededError
from jprefill.types import ScoreRequest

LONG, SHORT = 1000, 20


@pytest.fixture(scope="module")
def runner():
    runner = make_runner()
    runner.warm_up()
    return runner


@pytest.fixture(scope="module")
def alone(runner):
    """Answers of an engine that runs one request at a time."""
    engine = make_engine(runner, packing=False, preemption=False)
    yield lambda request: logprobs(engine.submit(request).result(60))
    engine.close()


class Boundaries:
    """A runner that calls `at[n]` once, at the n-th layer boundary of a pass that may wait; `at[0]` before any pass."""

    def __init__(self, runner, at):
        self.config, self.buckets, self.vocab_size = runner.config, runner.buckets, runner.vocab_size
        self.passes = []  # tokens of each, in the order in which they end
        self._run, self._at = runner.run, dict(at)

    def run(self, batch, meanwhile=None, between_layers=None):
        number = 0
        self._at.pop(0, lambda: None)()

        def between(share_left):
            nonlocal number
            number += 1
            self._at.pop(number, lambda: None)()
            return between_layers(share_left)

        scores = self._run(batch, meanwhile, between_layers and between)
        self.passes.append(batch.num_tokens)
        return scores


def long_request(seed=0, **changes):
    return ScoreRequest(**fields(prompt(tokens(np.random.default_rng(seed), LONG))), **changes)


def short_request(seed, length=SHORT, **changes):
    return ScoreRequest(**fields(prompt(tokens(np.random.default_rng([1, seed]), length))), **changes)


def fields(request):
    return {"prefix": request.prefix, "items": request.items}


def run_with(runner, at, request, **changes):
    """Submits a long request to an engine whose boundaries do `at(engine, answers)`; waits for all."""
    answers = []
    boundaries = Boundaries(runner, {number: (lambda act=act: act(engine, answers)) for number, act in at.items()})
    engine = make_engine(boundaries, **changes)
    future = engine.submit(request)
    return engine, boundaries, future, answers


LAYER_S = 0.3  # of a layer that is long against what a pass of its own costs


def come(*requests, layer_s=LAYER_S):
    """They come while a layer runs that takes so long."""

    def act(engine, answers):
        answers.extend(engine.submit(request) for request in requests)
        time.sleep(layer_s)

    return act


def test_a_short_request_overtakes_a_long_one_and_both_are_exact(runner, alone):
    shorts = [short_request(seed) for seed in range(3)]
    engine, boundaries, future, answers = run_with(runner, {1: come(shorts[0]), 2: come(*shorts[1:])}, long_request())
    np.testing.assert_array_equal(logprobs(future.result(60)), alone(long_request()))
    for short, answer in zip(shorts, answers, strict=True):
        np.testing.assert_allclose(logprobs(answer.result(60)), alone(short), atol=5e-5)
    assert boundaries.passes == [SHORT, 2 * SHORT, LONG]
    stats = engine.stats()
    assert (stats.num_finished, stats.num_failed, stats.num_running) == (4, 0, 0)
    engine.close()


def test_who_has_just_come_lets_a_layer_pass_and_goes_first_though_nobody_else_comes(runner):
    at = {1: come(short_request(0), layer_s=0.0), 2: come(layer_s=LAYER_S)}
    engine, boundaries, future, answers = run_with(runner, at, long_request())
    assert future.result(60)
    assert answers[0].result(60)
    assert boundaries.passes == [SHORT, LONG]
    engine.close()


@pytest.mark.parametrize("changes", [{"policy": "fcfs"}, {"policy": "hrrn"}, {"preemption": False}])
def test_nobody_overtakes_where_it_is_switched_off(runner, changes):
    short = come(short_request(0))
    engine, boundaries, future, answers = run_with(runner, {0: short, 1: short}, long_request(), **changes)
    assert future.result(60)
    assert all(answer.result(60) for answer in answers)
    assert boundaries.passes[0] == LONG
    engine.close()


def test_what_is_not_much_shorter_waits(runner):
    engine, boundaries, future, answers = run_with(runner, {1: come(short_request(0, 700))}, long_request())
    assert future.result(60)
    assert answers[0].result(60)
    assert boundaries.passes == [LONG, 700]
    engine.close()


def test_a_burst_of_short_work_goes_first_and_all_are_answered(runner, alone):
    shorts = [short_request(seed, 60) for seed in range(40)]
    at = {1: come(*shorts[:20]), 2: come(*shorts[20:])}
    engine, boundaries, future, answers = run_with(runner, at, long_request())
    np.testing.assert_array_equal(logprobs(future.result(60)), alone(long_request()))
    for short, answer in zip(shorts, answers, strict=True):
        np.testing.assert_allclose(logprobs(answer.result(60)), alone(short), atol=5e-5)
    assert boundaries.passes[0] < LONG
    assert engine.stats().num_finished == 41
    engine.close()


def test_a_pass_whose_callers_left_stops_between_layers(runner):
    def leave(engine, answers):
        assert future.cancel()

    engine, _, future, _ = run_with(runner, {1: leave}, long_request())
    with pytest.raises(CancelledError):
        future.result(60)
    assert engine.submit(short_request(1)).result(60)
    assert engine.stats().num_shed == 1
    engine.close()


def test_a_pass_whose_deadline_passes_stops_with_408(runner):
    request = long_request(deadline_s=time.monotonic() + 0.3)
    engine, _, future, _ = run_with(runner, {2: lambda *_: time.sleep(0.5)}, request)
    with pytest.raises(DeadlineExceededError, match="while the request ran"):
        future.result(60)
    assert engine.submit(short_request(1)).result(60)
    assert (engine.stats().num_shed, engine.stats().num_running) == (1, 0)
    engine.close()


def test_one_caller_of_many_leaves_and_the_pass_goes_on(runner, alone):
    """The cancelled request rides on: its mates keep their answers."""
    mates = [short_request(seed, 300) for seed in range(3)]
    engine, _, future, _ = run_with(runner, {}, short_request(5))
    assert future.result(60)
    futures = [engine.submit(mate) for mate in mates]
    futures[1].cancel()
    for number in (0, 2):
        np.testing.assert_allclose(logprobs(futures[number].result(60)), alone(mates[number]), atol=5e-5)
    engine.close()


def test_a_failure_of_the_pass_that_went_first_is_answered_and_the_long_one_too(runner, alone):
    class Failing(Boundaries):
        def run(self, batch, meanwhile=None, between_layers=None):
            if batch.num_tokens == SHORT and not self.passes:
                self.passes.append("failed")
                raise JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
            return super().run(batch, meanwhile, between_layers)

    answers = []
    short = short_request(2)
    failing = Failing(runner, {1: lambda: answers.append(engine.submit(short))})
    engine = make_engine(failing)
    future = engine.submit(long_request())
    np.testing.assert_array_equal(logprobs(future.result(60)), alone(long_request()))
    np.testing.assert_allclose(logprobs(answers[0].result(60)), alone(short), atol=5e-5)
    assert engine.stats().num_failed == 0
    engine.close()
