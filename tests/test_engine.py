"""The spine under load, cancellation, deadlines and failures: every request gets exactly one answer."""

import threading
import time
from concurrent.futures import CancelledError, wait

import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from tiny import CONFIG, SETTINGS, label_item, logprobs, make_engine, make_runner, prompt, tokens

from jprefill.config import EngineConfig
from jprefill.engine import Engine
from jprefill.errors import (
    ConfigError,
    ContextLengthError,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    NotReadyError,
    QueueFullError,
)
from jprefill.model.compiles import CompileCounter
from jprefill.types import BatchScores, ScoreRequest


@pytest.fixture(scope="module")
def runner():
    runner = make_runner()
    runner.warm_up()
    return runner


@pytest.fixture
def engine(runner):
    engine = make_engine(runner)
    yield engine
    engine.close()
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_waiting_tokens, stats.num_running) == (0, 0, 0)


class FaultyRunner:
    """A runner whose `run` can be held, broken or poisoned, around a real one or none."""

    def __init__(self, runner, *, poison=None, explode=None):
        self.config, self.buckets, self.vocab_size = runner.config, runner.buckets, runner.vocab_size
        self.batches = []
        self.may_run = threading.Event()
        self.may_run.set()
        self.started = threading.Event()
        self._poison, self._explode = poison, explode or (lambda batch: None)
        self._run = runner.run

    def run(self, batch, meanwhile=None, between_layers=None):
        self.batches.append(batch)
        self.started.set()
        assert self.may_run.wait(30)
        self._explode(batch)
        scores = self._run(batch, meanwhile, between_layers)
        if self._poison is not None and self._poison in batch.token_ids:
            row = int(np.flatnonzero(batch.token_ids == self._poison)[-1])
            bad = batch.read_rows[batch.pair_rows] == row
            scores = BatchScores(np.where(bad, np.nan, scores.pair_logprobs), scores.top_ids, scores.top_logprobs)
        return scores


def faulty_engine(runner, **kwargs):
    faulty = FaultyRunner(runner, **kwargs)
    return faulty, make_engine(faulty)


def test_many_threads_many_requests_one_answer_each(engine):
    rng = np.random.default_rng(0)
    alone = {length: logprobs(engine.submit(prompt(tokens(np.random.default_rng(length), length))).result(60))
             for length in (1, 20, 64, 200)}  # fmt: skip
    answers = []

    def ask(length):
        answers.append((length, engine.submit(prompt(tokens(np.random.default_rng(length), length))).result(60)))

    threads = [threading.Thread(target=ask, args=(int(length),)) for length in rng.choice([1, 20, 64, 200], 40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 40
    for length, result in answers:
        np.testing.assert_allclose(logprobs(result), alone[length], atol=5e-5)
        assert result.timings.queue_s >= 0
        assert result.timings.device_s > 0
    stats = engine.stats()
    assert stats.num_finished == 44
    assert stats.num_batches < 44  # some rode together


def test_the_shared_prefix_is_computed_once_and_counted(engine):
    rng = np.random.default_rng(1)
    request = ScoreRequest(tokens(rng, 100), tuple(label_item(tokens(rng, 10)) for _ in range(5)))
    usage = engine.submit(request).result(60).usage
    assert (usage.num_prompt_tokens, usage.num_cached_tokens) == (550, 400)
    assert engine.stats().num_computed_tokens == 150


def test_a_request_larger_than_any_batch_is_served_in_order(engine):
    rng = np.random.default_rng(2)
    items = [tokens(rng, 90) for _ in range(30)]
    prefix = tokens(rng, 200)
    result = engine.submit(ScoreRequest(prefix, tuple(map(label_item, items)))).result(120)
    assert engine.stats().num_batches == 4  # (1024 - 200) // 90 = 9 items a batch
    assert result.usage.num_cached_tokens == 200 * (30 - 4)
    for index in (0, 8, 9, 29):
        alone = engine.submit(prompt(np.concatenate([prefix, items[index]]))).result(60)
        np.testing.assert_allclose(result.items[index].logprobs, alone.items[0].logprobs, atol=5e-5)


def test_bad_requests_are_refused_before_the_device(runner):
    faulty, engine = faulty_engine(runner)
    good = tokens(np.random.default_rng(3), 10)
    for bad, error in (
        (ScoreRequest(good, ()), InvalidRequestError),
        (prompt(np.array([300], np.int32)), InvalidRequestError),
        (prompt(good, ids=(-1,)), InvalidRequestError),
        (prompt(tokens(np.random.default_rng(4), 1025)), ContextLengthError),
    ):
        with pytest.raises(error):
            engine.submit(bad)
    assert faulty.batches == []
    assert engine.submit(prompt(good)).result(60)
    engine.close()


def test_the_longest_prompt_fits(engine):
    assert engine.submit(prompt(tokens(np.random.default_rng(5), 1024))).result(60)


def test_a_cancelled_request_never_reaches_the_device(runner):
    faulty, engine = faulty_engine(runner)
    faulty.may_run.clear()
    first = engine.submit(prompt(np.array([1, 1], np.int32)))
    assert faulty.started.wait(10)
    gone = engine.submit(prompt(np.array([2, 2], np.int32)))
    stays = engine.submit(prompt(np.array([3, 3], np.int32)))
    assert gone.cancel()
    faulty.may_run.set()
    wait([first, stays], 60)
    with pytest.raises(CancelledError):
        gone.result()
    assert all(2 not in batch.token_ids for batch in faulty.batches)
    assert engine.stats().num_shed == 1
    engine.close()


def test_an_expired_request_is_shed_with_408(runner):
    faulty, engine = faulty_engine(runner)
    faulty.may_run.clear()
    first = engine.submit(prompt(np.array([1], np.int32)))
    assert faulty.started.wait(10)
    request = prompt(np.array([2], np.int32))
    late = engine.submit(ScoreRequest(request.prefix, request.items, deadline_s=time.monotonic() + 0.01))
    time.sleep(0.05)
    faulty.may_run.set()
    assert first.result(60)
    with pytest.raises(DeadlineExceededError):
        late.result(60)
    engine.close()


def test_back_pressure_names_a_time_to_come_back(runner):
    faulty = FaultyRunner(runner)
    engine = make_engine(faulty, max_queued_requests=2)
    faulty.may_run.clear()
    futures = [engine.submit(prompt(np.array([1], np.int32)))]
    assert faulty.started.wait(10)
    futures += [engine.submit(prompt(np.array([1], np.int32))) for _ in range(2)]
    with pytest.raises(QueueFullError) as refusal:
        engine.submit(prompt(np.array([1], np.int32)))
    assert refusal.value.retry_after_s >= 1
    faulty.may_run.set()
    assert all(future.result(60) for future in futures)
    engine.close()


def test_a_poisoned_request_fails_alone_and_its_mates_are_exact(runner):
    rng = np.random.default_rng(6)
    good = [tokens(rng, 30, 250) for _ in range(3)]
    clean = make_engine(runner)
    expected = [logprobs(clean.submit(prompt(ids)).result(60)) for ids in good]
    clean.close()
    faulty, engine = faulty_engine(runner, poison=299)
    faulty.may_run.clear()
    first = engine.submit(prompt(np.array([1], np.int32)))
    assert faulty.started.wait(10)
    futures = [engine.submit(prompt(ids)) for ids in good]
    poisoned = engine.submit(prompt(np.array([7, 299], np.int32)))
    faulty.may_run.set()
    assert first.result(60)
    for future, exact in zip(futures, expected, strict=True):
        np.testing.assert_allclose(logprobs(future.result(60)), exact, atol=5e-5)
    with pytest.raises(EngineError, match="not finite"):
        poisoned.result(60)
    assert engine.stats().num_failed == 1
    engine.close()


def device_failure_above(num_requests):
    def explode(batch):
        if len(batch.read_rows) > num_requests:
            raise JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    return explode


@pytest.mark.parametrize(("limit", "survives"), [(1, True), (0, False)])
def test_a_device_failure_is_retried_alone_and_the_engine_lives(runner, limit, survives):
    faulty, engine = faulty_engine(runner, explode=device_failure_above(limit))
    faulty.may_run.clear()
    blocker = engine.submit(prompt(np.array([1], np.int32)))
    assert faulty.started.wait(10)
    futures = [engine.submit(prompt(np.array([i], np.int32))) for i in range(4)]
    faulty.may_run.set()
    for future in [blocker, *futures]:
        if survives:
            assert future.result(60)
        else:
            with pytest.raises(EngineError, match="JaxRuntimeError"):
                future.result(60)
    assert engine.is_alive
    engine.close()


def test_a_bug_in_the_loop_is_an_answer_not_a_hang(runner):
    def explode(batch):
        raise ZeroDivisionError

    _, engine = faulty_engine(runner, explode=explode)
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        engine.submit(prompt(np.array([1], np.int32))).result(60)
    assert engine.is_alive
    engine.close()


def test_close_drains_what_was_accepted(runner):
    _, engine = faulty_engine(runner)
    futures = [engine.submit(prompt(np.array([i], np.int32))) for i in range(8)]
    engine.close(timeout_s=60.0)
    assert all(future.result(0) for future in futures)
    with pytest.raises(NotReadyError):
        engine.submit(prompt(np.array([1], np.int32)))
    engine.close()  # twice is fine


def test_close_at_once_answers_the_waiting_with_503(runner):
    faulty, engine = faulty_engine(runner)
    faulty.may_run.clear()
    running = engine.submit(prompt(np.array([1], np.int32)))
    assert faulty.started.wait(10)
    waiting = engine.submit(prompt(np.array([2], np.int32)))
    threading.Timer(0.2, faulty.may_run.set).start()
    engine.close()
    assert running.result(0)
    with pytest.raises(NotReadyError):
        waiting.result(0)


def test_two_hundred_lengths_compile_nothing(engine):
    counter = CompileCounter()
    rng = np.random.default_rng(7)
    futures = [engine.submit(prompt(tokens(rng, length))) for length in range(1, 201)]
    assert len([future.result(120) for future in futures]) == 200
    counter.close()
    assert counter.count == 0
    assert engine.stats().num_compiles_after_start == 0


class TinyCheckpoint:
    name, config, weights = "tiny", CONFIG, {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 2048}, "max_model_len=2048: the model was made for 1024"),
        ({"buckets": (128,)}, "the last at least 1024"),
        ({"buckets": (100, 1024)}, "chunk_size=64 .at least 16. or a multiple of it"),
        ({"max_model_len": 0}, "at least 1"),
        ({"chunk_size": 100}, "power of two"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_compiling(changes, message):
    values = {field: getattr(SETTINGS, field) for field in ("dtype", "chunk_size", "compilation_cache")}
    with pytest.raises(ConfigError, match=message):
        Engine.from_checkpoint(TinyCheckpoint(), EngineConfig(**(values | changes)))
