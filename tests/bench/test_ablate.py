"""`jprefill bench ablate`: the same requests at the same times for every variant."""

import argparse
import json
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fakes import ByteTokenizer
from tiny import CONFIG, SETTINGS, make_model, prompt

from jprefill.bench import ablate
from jprefill.bench.workloads import make_workload
from jprefill.config import EngineConfig
from jprefill.model.llama import flatten
from jprefill.types import ScoreResult, Usage

PROSE = np.random.default_rng(0).integers(0, 300, 3000).astype(np.int32)


@pytest.fixture(scope="module")
def bench():
    checkpoint = SimpleNamespace(name="tiny", config=CONFIG, weights=flatten(make_model()), fingerprint="tiny")
    return ablate.Bench(checkpoint, PROSE, (5, 7))


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    ablate.add_arguments(parser)
    return parser.parse_args(argv)


def test_every_variant_answers_every_request(bench):
    workload = make_workload("post_recommendation", 0, scale=60.0, num_users=3, num_posts=4)
    args = arguments("--variants", "jct,fcfs,no store,no packing,hybrid", "--loads", "2,inf")
    records = list(bench.measure(workload, SETTINGS, args))
    assert [(r.policy, np.isinf(r.qps)) for r in records] == [
        (variant, is_burst) for is_burst in (False, True) for variant in args.variants
    ]
    assert all(r.mean_s > 0 and r.p99_s >= r.p50_s and r.num_batches > 0 for r in records)
    by_variant = {r.policy: r for r in records}
    assert by_variant["no store"].hit_rate == 0
    assert by_variant["no packing"].num_batches == 12


def test_short_and_long_requests_are_told_apart(bench):
    workload = make_workload("mixed", 0, scale=10.0, num_requests=20)
    [record] = bench.measure(workload, SETTINGS, arguments("--variants", "jct", "--loads", "inf"))
    assert record.long_mean_s > 0
    assert record.short_p99_s > 0


def test_a_latency_starts_when_the_request_was_due():
    class Slow:
        """Answers at once."""

        def submit(self, request):
            future = Future()
            future.set_result(ScoreResult((), Usage(len(request.items[0].token_ids))))
            return future

    requests = [prompt(np.array([number], np.int32)) for number in (1, 2)]
    latencies_s, answers, elapsed_s = ablate.drive(Slow(), requests, [-5.0, 0.01])
    assert latencies_s[0] > 5
    assert len(answers) == 2
    assert elapsed_s > 0


def test_records_are_written_and_names_are_checked(monkeypatch, tmp_path: Path, capsys):
    record = ablate.Record("jct", "mixed", 0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 3, 0, 0.7)
    monkeypatch.setattr(ablate, "load_checkpoint", lambda *_: SimpleNamespace())
    monkeypatch.setattr(ablate, "load_tokenizer", lambda _: ByteTokenizer())
    monkeypatch.setattr(ablate.Bench, "measure", lambda *_: iter([record]))
    path = tmp_path / "new" / "records.json"
    assert ablate.run(arguments("--workloads", "mixed", "--seeds", "2", "--json", str(path))) == 0
    records = json.loads(path.read_text(encoding="utf-8"))
    assert len(records) == 2
    assert {"policy", "workload", "seed", "qps", "mean_s", "p99_s", "hit_rate", "command"} <= set(records[0])
    assert "from store" in capsys.readouterr().out
    for bad in (["--variants", "magic"], ["--workloads", "x"], ["--loads", "0"]):
        with pytest.raises(SystemExit):
            arguments(*bad)


def test_the_base_is_the_default():
    assert ablate.VARIANTS[ablate.BASE] == {}
    assert EngineConfig().policy == "jct"
