"""Metrics of the prefix store, and the line about traffic."""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fakes import FakeEngine

from jprefill.server.limits import Limits
from jprefill.server.traffic import log_traffic, traffic_line
from jprefill.types import EngineStats, TierStats

DEVICE = TierStats(num_blocks=3, num_bytes=300, max_bytes=400, num_hits=5, num_misses=2, num_insertions=4)
DISK = TierStats(num_restores=7, restore_s=0.25, num_evictions=1, num_errors=1, is_on=False, max_bytes=9)
BEFORE = EngineStats(num_finished=2, num_prompt_tokens=1000, num_cached_tokens=100)
AFTER = EngineStats(
    num_finished=5,
    num_prompt_tokens=5000,
    num_cached_tokens=2100,
    num_running=2,
    num_waiting=7,
    tiers={"device": DEVICE},
)
LINE = (
    "Avg prompt throughput: 400.0 tokens/s, Running: 2 reqs, Waiting: 7 reqs, "
    "KV cache usage: 75.0%, Prefix cache hit rate: 50.0%"
)
SERIES = {
    "blocks": 3,
    "bytes": 300,
    "max_bytes": 400,
    "tier_on": 1,
    "hits_total": 5,
    "misses_total": 2,
    "insertions_total": 4,
    "evictions_total": 0,
    "restores_total": 0,
    "restore_seconds_total": 0,
    "errors_total": 0,
}


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_series_of_every_tier_exist_from_the_start(client: Any, tier: str) -> None:
    lines = client.get("/metrics").text.splitlines()
    assert {f'jprefill_kv_{name}{{tier="{tier}"}} 0.0' for name in SERIES} <= set(lines)
    assert {"jprefill_kept_tokens_total 0.0", "jprefill_cached_tokens_total 0.0"} <= set(lines)


def test_every_count_of_a_tier_is_shown(serve: Any, scorer_of: Any) -> None:
    engine = FakeEngine()
    engine.tiers = {"device": DEVICE, "disk": DISK}
    engine.num_kept_tokens = 12
    lines = serve(scorer_of(engine)).get("/metrics").text.splitlines()
    assert {f'jprefill_kv_{name}{{tier="device"}} {float(value)}' for name, value in SERIES.items()} <= set(lines)
    for line in (
        'jprefill_kv_restores_total{tier="disk"} 7.0',
        'jprefill_kv_restore_seconds_total{tier="disk"} 0.25',
        'jprefill_kv_evictions_total{tier="disk"} 1.0',
        'jprefill_kv_errors_total{tier="disk"} 1.0',
        'jprefill_kv_tier_on{tier="disk"} 0.0',
        'jprefill_kv_blocks{tier="host"} 0.0',
        "jprefill_kept_tokens_total 12.0",
    ):
        assert line in lines


def test_the_line_says_what_happened_in_between() -> None:
    assert traffic_line(BEFORE, AFTER, 10.0) == LINE


def test_no_traffic_no_line() -> None:
    assert traffic_line(AFTER, replace(AFTER, num_running=0, num_waiting=0), 10.0) is None
    assert traffic_line(EngineStats(), EngineStats(), 10.0) is None


@pytest.mark.parametrize("busy", [{"num_running": 1}, {"num_waiting": 1}, {"num_finished": 1}, {"num_failed": 1}])
def test_any_traffic_makes_a_line_and_nothing_is_divided_by_zero(busy: dict[str, int]) -> None:
    line = traffic_line(EngineStats(), EngineStats(**busy, tiers={"device": TierStats()}), 0.0)
    assert line is not None
    assert "KV cache usage: 0.0%, Prefix cache hit rate: 0.0%" in line


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    logger = logging.getLogger("jprefill")
    was_propagating, logger.propagate = logger.propagate, True
    caplog.set_level(logging.INFO, "jprefill")
    yield lambda: [r.getMessage() for r in caplog.records if r.name == "jprefill.server" and r.levelname == "INFO"]
    logger.propagate = was_propagating


def test_lines_come_at_each_interval_with_traffic(monkeypatch: pytest.MonkeyPatch, lines: Any) -> None:
    looks = iter([None, BEFORE, BEFORE, AFTER])
    clock = iter([0.0, 10.0, 20.0, 30.0])
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("jprefill.server.traffic.sleep", sleep)
    monkeypatch.setattr("jprefill.server.traffic.monotonic", lambda: next(clock))

    async def run() -> None:
        with pytest.raises(RuntimeError):  # the looks are used up
            await log_traffic(lambda: next(looks), 10.0)

    asyncio.run(run())
    assert slept == [10.0] * 4
    assert len(lines()) == 2
    assert lines()[0].startswith("Avg prompt throughput: 100.0 tokens/s, Running: 0 reqs")
    assert lines()[1] == LINE


def test_the_server_writes_the_line_and_stops_when_it_stops(serve: Any, scoring: Any, lines: Any) -> None:
    client = serve(limits=Limits(log_interval_s=0.01))
    client.post("/v1/score", json=scoring)
    client.wait_until(lambda: any(line.startswith("Avg prompt throughput") for line in lines()))


def test_a_quiet_server_writes_no_line(serve: Any, lines: Any) -> None:
    client = serve(limits=Limits(log_interval_s=0.001))
    client.wait_until(lambda: client.get("/health").status_code == 200)
    assert not any(line.startswith("Avg") for line in lines())
