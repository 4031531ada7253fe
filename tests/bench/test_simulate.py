"""`jprefill simulate`: virtual time obeys the laws of queues, and nobody is lost."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jprefill.bench.simulate import command
from jprefill.bench.simulate.device import GPUS, device_model, layer_params
from jprefill.bench.simulate.fleet import Fleet, simulate
from jprefill.bench.simulate.prompts import PromptMaker
from jprefill.bench.simulate.report import cold_s, jain, record
from jprefill.bench.simulate.routing import PrefixRouter, static_route
from jprefill.bench.simulate.setting import workload_of
from jprefill.bench.workloads import Arrival, Part, Workload, make_workload
from jprefill.config import EngineConfig
from jprefill.errors import ConfigError
from jprefill.planner.models import find_model
from jprefill.scheduler.features import ChunkWalk
from jprefill.scheduler.jct import JctModel

WALK = ChunkWalk(64, (64, 256, 4096))
TIMES = JctModel.of(0.001, 0.01, 1e-9)
POLICIES = ("jct", "srjf", "hrrn", "lpm", "fcfs")


def make_fleet(num_blocks=64, num_replicas=1, routing="user", noise=0.0, **changes):
    return Fleet(
        EngineConfig(**changes),
        TIMES,
        WALK,
        num_layers=4,
        num_blocks=num_blocks,
        crossover_tokens=16_384,
        num_replicas=num_replicas,
        routing=routing,
        noise=noise,
    )


def workload(*arrivals):
    return Workload("test", 0, tuple(arrivals))


def single(at_s, num_tokens, source=0, user=0):
    return Arrival(at_s, user, (Part(source, num_tokens),))


shapes = st.lists(  # (when, user, tokens of the profile, tokens of the post)
    st.tuples(st.floats(0, 2), st.integers(0, 3), st.sampled_from([10, 64, 200, 1500]), st.integers(1, 80)),
    min_size=1,
    max_size=25,
)


@settings(max_examples=30, deadline=None)
@given(
    shapes,
    st.sampled_from(POLICIES),
    st.integers(1, 3),
    st.sampled_from(["user", "random", "prefix"]),
    st.sampled_from([0, 8, 200]),
    st.booleans(),
    st.booleans(),
)
def test_every_request_is_answered_once_and_time_is_spent_once(
    shapes, policy, num_replicas, routing, num_blocks, packing, preemption
):
    arrivals = [
        Arrival(at_s, user, (Part(user, profile), Part(1000 + number, post)))
        for number, (at_s, user, profile, post) in enumerate(sorted(shapes))
    ]
    load = workload(*arrivals)
    fleet = make_fleet(num_blocks, num_replicas, routing, 0.1, policy=policy, packing=packing, preemption=preemption)
    outcome = simulate(fleet, load)
    assert (outcome.latency_s > 0).all()
    assert outcome.busy_s <= num_replicas * outcome.end_s + 1e-6
    assert outcome.num_passes <= len(load.arrivals)
    lengths = np.array([arrival.num_tokens for arrival in load.arrivals])
    assert (outcome.cached_tokens < lengths).all()
    again = simulate(fleet, load)
    np.testing.assert_array_equal(outcome.latency_s, again.latency_s)


def test_a_request_alone_takes_what_is_predicted():
    outcome = simulate(make_fleet(), workload(single(0.0, 100), single(50.0, 700, 1)))
    np.testing.assert_allclose(outcome.latency_s, cold_s(make_fleet(), np.array([100, 700])))


def test_what_was_computed_is_found():
    profile = Part(7, 640)
    load = workload(*(Arrival(10.0 * i, 0, (profile, Part(100 + i, 30))) for i in range(3)))
    outcome = simulate(make_fleet(), load)
    assert outcome.cached_tokens.tolist() == [0, 640, 640]
    assert outcome.latency_s[1] < outcome.latency_s[0] / 4
    assert simulate(make_fleet(num_blocks=0), load).cached_tokens.tolist() == [0, 0, 0]


def test_waiting_times_are_those_of_an_m_d_1_queue():
    """Mean wait = load * service / (2 * (1 - load)); Pollaczek and Khinchine."""
    fleet = make_fleet(0, policy="fcfs", packing=False)
    service_s = float(cold_s(fleet, np.array([64]))[0])
    load = workload(*(single(0.0, 64, i) for i in range(6_000))).at_rate(0.7 / service_s, 1)
    wait_s = simulate(fleet, load).latency_s.mean() - service_s
    assert wait_s == pytest.approx(0.7 * service_s / (2 * 0.3), rel=0.1)


def test_a_short_request_goes_before_the_rest_of_a_long_one():
    load = workload(single(0.0, 4000), single(0.05, 60, 1))
    alone_s = cold_s(make_fleet(), np.array([4000, 60]))
    held = simulate(make_fleet(preemption=False), load).latency_s
    gone = simulate(make_fleet(), load).latency_s
    assert gone[1] < alone_s[0] / 4 + alone_s[1] < held[1]  # at the first of four layers, not after the last
    assert gone[0] == pytest.approx(alone_s.sum())
    assert held[0] == pytest.approx(alone_s[0])


def test_completion_times_beat_arrival_order_on_mixed_lengths():
    load = make_workload("mixed", 0, num_requests=300, scale=2.0).at_rate(4.0, 0)
    means = {policy: simulate(make_fleet(policy=policy), load).latency_s.mean() for policy in ("jct", "fcfs")}
    assert means["jct"] < 0.8 * means["fcfs"]


def test_processes_make_no_difference():
    load = make_workload("post_recommendation", 0, num_requests=60, scale=20.0).at_rate(20.0, 0)
    fleet = make_fleet(num_replicas=4)
    one, two = (simulate(fleet, load, num_processes=n) for n in (1, 2))
    np.testing.assert_array_equal(one.latency_s, two.latency_s)
    assert (one.busy_s, one.num_passes) == (pytest.approx(two.busy_s), two.num_passes)


# ---- parts -------------------------------------------------------------------------------------------------


def test_blocks_are_equal_if_all_before_them_is():
    maker = PromptMaker(16)
    a, b, c = Part(1, 40), Part(2, 40), Part(3, 8)
    plain, longer, other = maker.keys((a, b)).hashes, maker.keys((a, b, c)).hashes, maker.keys((a, c, b)).hashes
    assert (len(plain), len(longer), len(other)) == (5, 5, 5)
    assert plain == longer
    assert [x == y for x, y in zip(plain, other, strict=True)] == [True, True, False, False, False]
    assert maker.keys((b,)).hashes[0] != plain[0]
    assert len(set(plain)) == 5


def test_users_stay_where_they_are_and_prefixes_spill_over():
    arrivals = make_workload("post_recommendation", 0, num_requests=100).arrivals
    route = static_route("user", arrivals, 5, 0)
    for user in range(20):
        assert len({number for number, one in zip(route, arrivals, strict=True) if one.user == user}) <= 1
    assert static_route("prefix", arrivals, 5, 0) is None
    router, one = PrefixRouter(slack_tokens=100), single(0.0, 10, source=3)
    assert router._choose(one, [50, 0]) == 1
    assert router._choose(one, [0, 90]) == 1
    assert router._choose(one, [0, 101]) == 0
    assert router._choose(one, [90, 0]) == 0


def test_the_roofline_has_arithmetic_and_bandwidth():
    model = find_model("llama-3.1-8b")
    assert layer_params(model) * model.num_layers == pytest.approx(6.98e9, rel=0.01)
    _, chunk_s, key_s, _ = device_model("h100", model, "bf16", 2048).coefficients
    assert chunk_s == pytest.approx(2 * 6.98e9 * 2048 / (0.6 * 989e12), rel=0.01)
    assert key_s == pytest.approx(4 * 4096 * 32 / (0.6 * 989e12))
    _, tiny_chunk_s, _, _ = device_model("l4", model, "bf16", 16).coefficients
    assert tiny_chunk_s == pytest.approx(2 * 6.98e9 / 300e9, rel=0.01)  # all weights are read once
    with pytest.raises(ConfigError, match="GPUs are l4, "):
        device_model("tpu", model, "bf16", 2048)
    assert set(GPUS) == {"l4", "a100-40", "a100-80", "h100", "h200"}


def test_jains_index():
    assert jain(np.array([2.0, 2.0])) == 1.0
    assert jain(np.array([1.0, 0.0])) == 0.5


# ---- the command -------------------------------------------------------------------------------------------


def arguments(*argv):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(argv)


SMALL = ("--scale", "50", "--requests", "40", "--pool-tokens", "2000", "--chunk-size", "64", "--model", "smollm2-135m")


def test_records_are_written_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, plot = tmp_path / "new" / "records.json", tmp_path / "plot.png"
    argv = [
        "--policies",
        "jct,fcfs:all",
        "--loads",
        "0.5,inf",
        "--seeds",
        "2",
        "--json",
        str(path),
        "--plot",
        str(plot),
    ]
    assert command.run(arguments(*SMALL, *argv, "--equal-p99", "0.5")) == 0
    records = json.loads(path.read_text(encoding="utf-8"))
    assert len(records) == 8
    keys = {"policy", "workload", "seed", "qps", "mean_s", "p99_s", "hit_rate", "fairness", "command"}
    assert all(keys <= set(one) for one in records)
    assert {one["policy"] for one in records} == {"jct", "fcfs:all"}
    printed = capsys.readouterr().out
    assert "p99 s (spread)" in printed
    assert "x  (" in printed
    assert plot.stat().st_size > 1000


def test_a_trace_runs_at_its_own_times(capsys: pytest.CaptureFixture[str]):
    path = Path(__file__).parent / "data" / "conversation_trace.jsonl"
    argv = ["--workload", f"trace:{path}", "--recorded", "--copies", "2", "--replicas", "3", "--routing", "prefix"]
    assert command.run(arguments(*argv, "--policies", "jct", "--block-size", "128")) == 0
    assert "trace:conversation_trace" in capsys.readouterr().out


@pytest.mark.parametrize("bad", [("--policies", "sjf"), ("--policies", "jct:some"), ("--gpu", "tpu")])
def test_flags_are_checked(bad):
    with pytest.raises(SystemExit):
        arguments(*bad)


def test_coefficients_are_three():
    with pytest.raises(ConfigError, match="2 numbers"):
        command.run(arguments(*SMALL, "--coefficients", "1,2"))


def test_copies_have_texts_of_their_own():
    args = arguments("--copies", "3", "--requests", "4", "--workload", "short_labels")
    load = workload_of(args, 0)
    assert len(load.arrivals) == 12
    assert len({arrival.prompt for arrival in load.arrivals}) == 12


def test_a_record_sums_up(capsys):
    fleet = make_fleet()
    load = replace(workload(single(0.0, 100), single(50.0, 100)), name="two")
    one = record("jct", fleet, load, np.inf, simulate(fleet, load))
    assert (one.qps, one.workload, one.fairness) == (None, "two", pytest.approx(1.0))
    assert one.longest_s == pytest.approx(one.p99_s, rel=0.02)
