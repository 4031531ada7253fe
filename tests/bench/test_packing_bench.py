"""`jprefill bench packing`: the same prompts one at a time and together."""

import json
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
from fakes import ByteTokenizer

from jprefill.bench import packing
from jprefill.cli import main
from jprefill.types import Item, ScoreRequest


def request(length):
    return ScoreRequest(
        np.zeros(0, np.int32),
        (Item(np.zeros(length, np.int32), np.array([length - 1], np.int32), np.zeros((1, 1), np.int32)),),
    )


class Counting:
    """Answers when asked for the answer, and knows how many waited then; each answer is a pass over all of them."""

    def __init__(self):
        self.num_waiting, self.seen, self.num_batches = 0, [], 0

    def submit(self, request):
        self.num_waiting += 1
        future = Future()

        def result():
            if self.num_waiting:
                self.seen.append(self.num_waiting)
                self.num_waiting, self.num_batches = 0, self.num_batches + 1

        future.result = result
        return future

    def stats(self):
        return SimpleNamespace(num_batches=self.num_batches)


def test_both_ways_take_turns_and_the_first_round_does_not_count():
    engine = Counting()
    record = packing.measure(engine, [request(30)] * 3, num_rounds=2)
    assert engine.seen == [1, 1, 1, 3] * 3 + [3]
    assert (record.length, record.num_prompts, record.num_passes) == (30, 3, 1)
    assert record.lowest <= record.ratio <= record.highest


def test_command(monkeypatch, tmp_path, capsys):
    settings, out = [], tmp_path / "packing.json"

    @contextmanager
    def running_engine(checkpoint, config):
        settings.append(config)
        yield Counting()

    for name, fake in {
        "running_engine": running_engine,
        "load_checkpoint": lambda *_: None,
        "load_tokenizer": lambda _: ByteTokenizer(),
    }.items():
        monkeypatch.setattr(packing, name, fake)
    assert main(["bench", "packing", "--lengths", "32,2000", "--repeat", "1", "--json", str(out)]) == 0
    assert (settings[0].kv_cache_memory_bytes, settings[0].max_model_len) == (0, 2048)
    records = json.loads(out.read_text())
    assert [(one["length"], one["num_prompts"], one["num_passes"]) for one in records] == [(32, 64, 1), (2000, 4, 1)]
    assert "ratio" in capsys.readouterr().out
