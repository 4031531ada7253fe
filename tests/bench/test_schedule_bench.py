"""`jprefill bench schedule`: the numbers it gives, on a small store."""

import argparse
import json
from pathlib import Path

import pytest

from jprefill.bench import schedule


def test_it_prints_and_writes_what_a_decision_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    parser = argparse.ArgumentParser()
    schedule.add_arguments(parser)
    path = tmp_path / "new" / "schedule.json"
    argv = ["--waiting", "60", "--blocks", "500", "--changed", "1,3", "--policy", "hrrn", "--json", str(path)]
    assert schedule.run(parser.parse_args(argv)) == 0
    records = json.loads(path.read_text(encoding="utf-8"))
    assert [record["num_changed"] for record in records] == [0, 1, 3]
    assert all(record["decision_ms"] > 0 and record["plan_ms"] > 0 and record["num_taken"] > 0 for record in records)
    assert records[0]["num_repriced"] == 0
    assert "decision ms" in capsys.readouterr().out


def test_who_is_repriced_follows_what_changed():
    few, many = (schedule.measure(200, 1000, (changed,), "jct")[0]["num_repriced"] for changed in (0, 5))
    assert few == 0
    assert many > 0
