"""`jprefill bench jct`: the cases, the fit and the report, with an engine that takes no time at all."""

import argparse
import json
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from fakes import FakeEngine

from jprefill.bench import jct
from jprefill.bench.jct import Case
from jprefill.errors import ConfigError, EngineError
from jprefill.scheduler.features import ChunkWalk
from jprefill.types import Timings, Usage

TRUE = (1e-3, 0.1, 1e-7)
WALK = ChunkWalk(256, (128, 512, 2048, 4096))


class TimedEngine:
    """Answers at once, and says that it took what its model says. Holds what was marked."""

    vocab_size, walk = 300, WALK

    def __init__(self, noise=0.0, holds=True):
        self.requests, self._stored, self._holds = [], np.zeros(0, np.int32), holds
        self._rng, self._noise = np.random.default_rng(0), noise

    def submit(self, request):
        self.requests.append(request)
        token_ids = request.items[0].token_ids
        num_compared = min(len(token_ids), len(self._stored))
        equal = token_ids[:num_compared] == self._stored[:num_compared]
        num_cached = num_compared if equal.all() else int(equal.argmin())
        num_cached = min(num_cached, len(token_ids) - 1) // 16 * 16
        if self._holds and request.num_marked_tokens:
            self._stored = token_ids[: request.num_marked_tokens]
        features = jct.case_features(Case(num_cached, len(token_ids) - num_cached, False), WALK)
        exact_s = TRUE[0] + TRUE[1] * features.num_chunks + TRUE[2] * features.attention_area
        seconds = exact_s * float(np.exp(self._noise * self._rng.standard_normal()))
        result = SimpleNamespace(usage=Usage(len(token_ids), num_cached), timings=Timings(device_s=seconds))
        return SimpleNamespace(result=lambda: result)


def report(monkeypatch, *flags, **kwargs):
    @contextmanager
    def running_engine(checkpoint, config):
        yield TimedEngine(**kwargs)

    monkeypatch.setattr(jct, "load_checkpoint", lambda *_: None)
    monkeypatch.setattr(jct, "running_engine", running_engine)
    parser = argparse.ArgumentParser()
    jct.add_arguments(parser)
    return jct.run(parser.parse_args(["--chunk-size", "256", *flags]))


def test_a_model_of_that_form_is_found_and_foretells_unseen_lengths(monkeypatch, capsys, tmp_path):
    path = tmp_path / "new" / "jct.json"
    assert report(monkeypatch, "--check", "--repeat", "2", "--json", str(path), noise=0.02) == 0
    record = json.loads(path.read_text())
    assert record["coefficients"][1:3] == pytest.approx(TRUE[1:], rel=0.1)
    assert record["quality"]["unseen"]["pearson"] > 0.99
    assert record["quality"]["unseen"]["mean_error"] < 0.05
    assert {len(one["seconds"]) for one in record["records"]} == {2}
    printed = capsys.readouterr().out
    assert "unseen (15 cases): Pearson 0.99" in printed or "unseen (15 cases): Pearson 1.00" in printed
    assert "2,048" in printed


def test_noise_beyond_the_limits_fails_the_check_and_only_the_check(monkeypatch):
    flags = ("--lengths", "64,128,256", "--hits", "64", "--repeat", "1")
    assert report(monkeypatch, *flags, noise=2.0) == 0
    assert report(monkeypatch, *flags, "--check", noise=2.0) == 1


def test_a_store_that_holds_nothing_is_an_error(monkeypatch):
    with pytest.raises(EngineError, match=r"0 tokens came from the store, not \d+: is there a store"):
        report(monkeypatch, "--repeat", "1", holds=False)


def test_unseen_cases_lie_between_those_that_are_fitted():
    cases = list(jct.make_cases((64, 256, 1024), (512, 2048), 16))
    assert {c.num_new for c in cases if not c.is_unseen} == {64, 256, 1024}
    assert {c.num_cached for c in cases if not c.is_unseen} == {0, 512, 2048}
    assert {c.num_new for c in cases if c.is_unseen} == {128, 512}
    assert {c.num_cached for c in cases if c.is_unseen} == {0, 256, 1024}


@pytest.mark.parametrize(
    ("lengths", "hits", "message"),
    [
        ((64, 128), (64,), "--lengths 64,128: three different ones are needed for a fit"),
        ((64, 128, 256), (64, 100), "--hits 100: must be a multiple of block_size=16"),
    ],
)
def test_lengths_that_cannot_be_used_are_refused(lengths, hits, message):
    with pytest.raises(ConfigError) as error:
        list(jct.make_cases(lengths, hits, 16))
    assert error.value.message == message


def test_the_clock_of_the_cpu_is_another_clock():
    cases, engine = list(jct.make_cases((16, 32, 64), (16,), 16)), TimedEngine()
    wall = jct.measure(engine, 300, cases, 1)
    cpu = jct.measure(TimedEngine(), 300, cases, 1, "cpu")
    assert min(map(min, wall)) >= 1e-3  # what the engine says
    assert max(map(max, cpu)) < 1.0
    assert len(engine.requests) == 1 + 2 * len(cases)


def test_equal_predictions_share_their_rank():
    assert jct._ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [2.5, 0.0, 2.5, 1.0]


def test_the_picture_is_written(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "jct.png"
    report(monkeypatch, "--repeat", "1", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_any_scorer_can_be_measured():
    with FakeEngine() as engine:
        seconds = jct.measure(engine, engine.vocab_size, [Case(0, 16, False)], 2)
    assert [len(times) for times in seconds] == [2]
