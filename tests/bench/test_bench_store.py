"""`jprefill bench store`: the numbers it gives, on a small pool."""

import argparse
import json
from pathlib import Path

import pytest

from jprefill.bench import store
from jprefill.config import Eviction


def test_it_prints_and_writes_what_the_store_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    parser = argparse.ArgumentParser()
    store.add_arguments(parser)
    path = tmp_path / "new" / "store.json"
    assert store.run(parser.parse_args(["--tokens", "400", "--blocks", "200", "--json", str(path)])) == 0
    record = json.loads(path.read_text(encoding="utf-8"))
    assert (record["num_tokens"], record["num_blocks"], record["block_size"]) == (400, 200, 16)
    costs = ("keys_ns_per_token", "match_ms", "num_matched_us", "index_bytes_per_block", "eviction_us")
    assert all(record[name] > 0 for name in costs)
    printed = capsys.readouterr().out
    assert all(name in printed for name in record)


@pytest.mark.parametrize("eviction", ["saved_time", "lru"])
def test_a_prompt_shorter_than_a_block_is_measured_too(eviction: Eviction):
    assert store.measure(num_tokens=3, num_blocks=5, eviction=eviction)["eviction"] == eviction
