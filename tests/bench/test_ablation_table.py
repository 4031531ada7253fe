"""Tables over seeds: medians, spreads, and ratios within a seed."""

import json
from itertools import product

import pytest

from jprefill.bench.ablation_table import markdown, read_records
from jprefill.cli import main
from jprefill.errors import ConfigError

NAMES = ("requests_per_s", "mean_s", "p99_s", "short_p99_s", "long_mean_s", "hit_rate")


def record(policy, seed, value, workload="post_recommendation", load=0.7):
    return {"policy": policy, "seed": seed, "workload": workload, "load": load} | dict.fromkeys(NAMES, value)


RECORDS = [record("jct", seed, 0.1 * (1 + seed)) for seed in range(3)] + [
    record("fcfs", seed, 0.2 * (1 + seed)) for seed in range(3)
]


def test_medians_with_their_spread_and_ratios_of_runs_of_one_seed():
    rows = markdown(RECORDS).splitlines()
    assert rows[0] == "### post_recommendation, load 0.7, 3 seeds"
    assert rows[4] == (
        "| jct | 0.20 (0.10 to 0.30) | 0.20 (0.10 to 0.30) | 0.20 (0.10 to 0.30) | 20% (10% to 30%) | 1.00x | 1.00x |"
    )
    assert rows[5].endswith("| 40% (20% to 60%) | 2.00x | 2.00x |")


def test_workloads_and_loads_have_tables_of_their_own_and_short_requests_a_column_where_there_are_long_ones():
    records = [record("jct", 0, 1.0, *place) for place in product(("mixed", "short_labels"), (0.5, 0.7))]
    tables = markdown(records).split("\n\n### ")
    assert len(tables) == 4
    assert ["short p99 s" in table for table in tables] == [True, True, False, False]


def test_a_variant_without_its_base_has_no_ratio():
    assert "/ jct" not in markdown(RECORDS[3:])
    assert markdown(RECORDS[:1] + RECORDS[4:]).splitlines()[5].endswith("|  |  |")


def test_files_are_read_back(tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps(RECORDS[:3]))
    (tmp_path / "b.json").write_text(json.dumps(RECORDS[3:]))
    assert main(["bench", "ablate", "--read", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    assert capsys.readouterr().out.strip() == markdown(RECORDS)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"policy": "jct"}]'])
def test_other_files_are_refused_by_name(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="other"):
        read_records([path])
    with pytest.raises(ConfigError, match="missing"):
        read_records([tmp_path / "missing.json"])
