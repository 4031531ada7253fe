"""`jprefill bench prefix`: the workload, who answers what and when, and the arithmetic, with fake engines."""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import ByteTokenizer, FakeEngine
from tiny import CONFIG

from jprefill.bench import prefix
from jprefill.config import EngineConfig
from jprefill.errors import ConfigError
from jprefill.types import ScoreResult, Usage

SHAPE = prefix.Shape(num_users=3, num_posts=4, profile_tokens=100, post_tokens=10)


class StoringEngine(FakeEngine):
    """A fake that finds a prefix which it has met with this salt, and takes `delta` too much for a log-probability."""

    def __init__(self, has_store: bool, delta: float = 0.0):
        super().__init__(delay_s=0.002 if has_store else 0.02)
        self.has_store, self.delta = has_store, delta
        self._met: set[tuple[str, bytes]] = set()

    def _answer(self, request: Any, submitted_s: float) -> ScoreResult:
        answer = super()._answer(request, submitted_s)
        key = request.salt, request.prefix.tobytes()
        num_cached = len(request.prefix) if self.has_store and key in self._met else 0
        self._met.add(key)
        items = tuple(replace(item, logprobs=item.logprobs + np.float32(self.delta)) for item in answer.items)
        return replace(answer, items=items, usage=Usage(request.num_prompt_tokens, num_cached))


# ---- the workload


def test_users_take_turns_and_share_nothing_but_their_own_profile():
    requests = prefix.workload(ByteTokenizer(), SHAPE)
    assert len(requests) == 12
    for number, request in enumerate(requests):
        assert len(request.prefix) == 100
        assert request.prefix.tobytes() == requests[number % 3].prefix.tobytes()
        [item] = request.items
        assert (len(item.token_ids), item.rows.tolist(), item.targets.shape) == (10, [9], (1, 2))
    assert len({request.prefix[:16].tobytes() for request in requests}) == 3
    assert len({request.items[0].token_ids.tobytes() for request in requests}) == 12


@pytest.mark.parametrize("name", ["profile_tokens", "post_tokens"])
def test_more_tokens_than_the_prose_has_are_refused_by_the_name_of_the_flag(name: str):
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigError, match=rf"^{flag} 9999999: the prose at hand has"):
        prefix.workload(ByteTokenizer(), replace(SHAPE, **{name: 9_999_999}))


# ---- what is compared


def test_lower_tiers_are_a_side_of_their_own():
    assert list(prefix.side_configs(EngineConfig())) == ["store off", "store"]
    config = EngineConfig(kv_cache_memory_bytes=1000, kv_host_bytes=5, kv_disk_path="kv")
    sides = prefix.side_configs(config)
    assert list(sides) == ["store off", "store", "store + host + disk"]
    assert [side.kv_cache_memory_bytes for side in sides.values()] == [0, 1000, 1000]
    assert [side.kv_host_bytes for side in sides.values()] == [0, 0, 5]
    assert [side.kv_disk_path for side in sides.values()] == [None, None, "kv"]


def test_every_round_is_cold_and_both_sides_answer_the_same_requests():
    off, on = StoringEngine(has_store=False), StoringEngine(has_store=True)
    requests = prefix.workload(ByteTokenizer(), SHAPE)
    with off, on:
        records = prefix.measure({"store off": off, "store": on}, requests, num_off=6, num_rounds=2)
    without, with_store = records
    assert (without.num_requests, with_store.num_requests) == (6, 12)
    assert len(without.seconds) == len(with_store.seconds) == 2
    assert without.cached_share == 0.0
    assert with_store.cached_share == pytest.approx(9 * 100 / (12 * 110))  # 3 of 12 meet their profile first
    assert with_store.max_logprob_delta == 0.0
    assert with_store.ratio == pytest.approx(with_store.requests_per_s / without.requests_per_s)
    asked = [request.prefix.tobytes() + request.items[0].token_ids.tobytes() for request in requests]
    for engine, num_requests in ((off, 6), (on, 12)):
        seen = [request.prefix.tobytes() + request.items[0].token_ids.tobytes() for request in engine.requests]
        assert seen == asked[:1] + 2 * asked[:num_requests]


# ---- the command


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the command with fake engines; `settings` collects theirs."""

    @contextmanager
    def running_engine(_: Any, config: EngineConfig) -> Iterator[FakeEngine]:
        settings.append(config)
        delta = 1e-4 if config.keep == "all" else 0.0
        has_store = config.kv_cache_memory_bytes != 0
        with StoringEngine(has_store, delta if has_store else 0.0) as engine:
            yield engine

    settings: list[EngineConfig] = []
    monkeypatch.setattr(prefix, "load_checkpoint", lambda *_: SimpleNamespace(config=CONFIG))
    monkeypatch.setattr(prefix, "load_tokenizer", lambda _: ByteTokenizer())
    monkeypatch.setattr(prefix, "running_engine", running_engine)
    monkeypatch.setattr(prefix, "_PAUSE_S", 0.0)

    def run_command(*argv: Any) -> int:
        parser = argparse.ArgumentParser()
        prefix.add_arguments(parser)
        small = ["--users", "3", "--posts", "4", "--profile-tokens", "100", "--post-tokens", "10", "--off-posts", "2"]
        return prefix.run(parser.parse_args([*small, *map(str, argv)]))

    run_command.settings = settings  # pyright: ignore[reportFunctionMemberAccess]
    return run_command


def test_the_sides_are_measured_and_written_down(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "new" / "bench.json"
    assert run("--json", out, "--min-ratio", 2, "--min-share", 0.6, "--kv-host-bytes", 1000) == 0
    records = json.loads(out.read_text())
    assert [record["side"] for record in records] == ["store off", "store", "store + host"]
    assert [record["num_requests"] for record in records] == [6, 12, 12]
    assert all(record["num_users"] == 3 and record["num_requests_without_store"] == 6 for record in records)
    assert records[0]["ratio"] is None
    assert records[1]["ratio"] > 2
    output = capsys.readouterr().out
    assert "max|Δ label|" in output
    assert "store + host" in output


def test_full_runs_everything_without_the_store_too(run: Callable[..., int], tmp_path: Path):
    assert run("--full", "--repeat", 1, "--json", tmp_path / "bench.json") == 0
    assert [record["num_requests"] for record in json.loads((tmp_path / "bench.json").read_text())] == [12, 12]


def test_the_pool_holds_as_many_profiles_as_asked_for(run: Any):
    per_block = 2 * CONFIG.num_layers * 16 * CONFIG.num_kv_heads * CONFIG.head_dim * 4
    for argv in ([], ["--pool-profiles", 2], ["--kv-cache-memory-bytes", 12345]):
        run("--repeat", 1, "--dtype", "float32", *argv)
    assert [config.kv_cache_memory_bytes for config in run.settings[1::2]] == [
        3 * 7 * per_block,
        2 * 7 * per_block,
        12345,
    ]


def test_two_sizes_of_the_pool_are_refused(run: Callable[..., int]):
    with pytest.raises(ConfigError, match="--pool-profiles and --kv-cache-memory-bytes: give one"):
        run("--pool-profiles", 2, "--kv-cache-memory-bytes", 1000)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--min-ratio", 1e6], "store: ratio "),
        (["--min-share", 0.99], "store: 68.2% from the store is below 99.0%"),
        (["--keep", "all", "--dtype", "float32"], "store: difference 1.0e-04 is above 5e-05"),
    ],
)
def test_what_is_missed_fails(run: Callable[..., int], argv: list[Any], text: str, capsys: pytest.CaptureFixture[str]):
    assert run("--repeat", 1, *argv) == 1
    assert text in capsys.readouterr().out


def test_a_difference_in_bfloat16_is_only_reported(run: Callable[..., int], capsys: pytest.CaptureFixture[str]):
    assert run("--repeat", 1, "--keep", "all") == 0
    assert "1.0e-04" in capsys.readouterr().out
