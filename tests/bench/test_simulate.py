"""`jprefill simulate`: virtual time obeys the laws of queues, and nobody is lost."""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jprefill.bench.simulate import command, replica
from jprefill.bench.simulate.device import GPUS, crossover_tokens, device_model, layer_params, measured_model
from jprefill.bench.simulate.fleet import Fleet, simulate
from jprefill.bench.simulate.prompts import PromptMaker
from jprefill.bench.simulate.report import cold_s, jain, record
from jprefill.bench.simulate.routing import PrefixRouter, static_route
from jprefill.bench.simulate.search import largest_rate
from jprefill.bench.simulate.setting import run_at, workload_of
from jprefill.bench.workloads import NOBODY, Arrival, Part, Workload, make_workload
from jprefill.config import EngineConfig
from jprefill.errors import ConfigError
from jprefill.kvstore import build
from jprefill.planner.models import find_model
from jprefill.scheduler.features import ChunkWalk, Features
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


@settings(max_examples=20, deadline=None)
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


def waits_s(gaps_s, service_s):
    """Of a queue with one server and equal jobs, by Lindley's recursion."""
    waits, wait_s = [], 0.0
    for gap_s in gaps_s:
        wait_s = max(0.0, wait_s + service_s - gap_s)
        waits.append(wait_s)
    return np.array(waits)


def test_waiting_times_are_those_of_an_m_d_1_queue():
    """Mean wait = load * service / (2 * (1 - load)); Pollaczek and Khinchine."""
    fleet = make_fleet(0, policy="fcfs", packing=False)
    service_s = float(cold_s(fleet, np.array([64]))[0])
    load = workload(*(single(0.0, 64, i) for i in range(400))).at_rate(0.7 / service_s, 1)
    gaps_s = np.diff([arrival.at_s for arrival in load.arrivals])
    expected = np.concatenate([[0.0], waits_s(gaps_s, service_s)])
    np.testing.assert_allclose(simulate(fleet, load).latency_s - service_s, expected, atol=1e-9)
    many = waits_s(np.random.default_rng(0).exponential(service_s / 0.7, 400_000), service_s)
    assert many.mean() == pytest.approx(0.7 * service_s / (2 * 0.3), rel=0.03)


def test_a_short_request_goes_before_the_rest_of_a_long_one():
    load = workload(single(0.0, 4000), single(0.05, 60, 1))
    alone_s = cold_s(make_fleet(), np.array([4000, 60]))
    held = simulate(make_fleet(preemption=False), load).latency_s
    gone = simulate(make_fleet(), load).latency_s
    assert gone[1] < alone_s[0] / 4 + alone_s[1] < held[1]  # at the first of four layers, not after the last
    assert gone[0] == pytest.approx(alone_s.sum())
    assert held[0] == pytest.approx(alone_s[0])


def test_completion_times_beat_arrival_order_on_mixed_lengths():
    load = make_workload("mixed", 0, num_requests=160, scale=2.0).at_rate(4.0, 0)
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


def test_keys_that_were_forgotten_come_again():
    whole, small = PromptMaker(16), PromptMaker(16, max_keys=10)
    prompts = [(Part(number, 100), Part(7, 30)) for number in range(5)]
    for prompt in (*prompts, *prompts):
        assert small.keys(prompt).hashes == whole.keys(prompt).hashes
        assert small._num_keys == sum(1 + len(chain.hashes) for chain in small._chains.values())
        assert small._num_keys <= 10
    assert len(whole._chains) == 10


def test_users_stay_where_they_are():
    arrivals = make_workload("post_recommendation", 0, num_requests=100).arrivals
    route = static_route("user", arrivals, 5, 0)
    for user in range(20):
        assert len({number for number, one in zip(route, arrivals, strict=True) if one.user == user}) <= 1
    assert static_route("prefix", arrivals, 5, 0) is None


@pytest.mark.parametrize("routing", ["user", "random"])
def test_requests_of_nobody_go_everywhere_though_all_begin_alike(routing):
    arrivals = [Arrival(0.0, NOBODY, (Part(0, 512), Part(number, 512))) for number in range(1, 401)]
    counts = np.bincount(static_route(routing, arrivals, 4, 0), minlength=4)
    assert counts.min() > 60


def loaded(*num_tokens):
    return [SimpleNamespace(num_waiting_tokens=number) for number in num_tokens]


def test_prefixes_stay_until_their_replica_has_too_much_to_do():
    router, one = PrefixRouter(slack_tokens=100), single(0.0, 10, source=3)
    assert router(one, loaded(50, 0)) == 1
    assert router(one, loaded(0, 90)) == 1
    assert router(one, loaded(0, 101)) == 0
    assert router(one, loaded(90, 0)) == 0


def test_a_front_that_all_prompts_share_says_nothing_and_the_longest_known_one_decides():
    router = PrefixRouter(slack_tokens=100)
    shared, a, b, c = Part(0, 10), Part(1, 40), Part(2, 40), Part(3, 30)

    def route(loads, *parts):
        return router(Arrival(0.0, NOBODY, parts), loaded(*loads))

    assert route((0, 5), shared, a) == 0
    assert route((5, 0), shared, b) == 1
    assert route((9, 5, 0), shared, c) == 2  # of this prompt a quarter is known, from both
    assert route((9, 9, 0), shared, a, c) == 0
    assert route((9, 9, 0), shared, b, c) == 1


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


def test_the_roofline_is_replaced_by_what_was_measured(tmp_path: Path):
    path = tmp_path / "jct.json"
    TIMES.save(path, "a device")
    assert measured_model(path).coefficients == TIMES.coefficients
    for text in ("", "[]", "{}", '{"coefficients": [1, 2]}', '{"coefficients": [1, 2, 3, -4]}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match="needs 'coefficients', four numbers"):
            measured_model(path)
    with pytest.raises(ConfigError, match="No such file"):
        measured_model(tmp_path / "nowhere.json")


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.3-70b", "qwen3-8b"])
def test_the_store_has_the_settings_of_the_engine(name):
    model = find_model(name)
    assert crossover_tokens(model) == pytest.approx(build._crossover_tokens(model), rel=1e-3)  # norms and biases
    assert (replica._GHOSTS_PER_BLOCK, replica._MIN_GHOSTS) == (build.GHOSTS_PER_BLOCK, build.MIN_GHOSTS)


def test_a_scheduler_that_starts_from_a_guess_learns():
    believed, maker, request = JctModel(), PromptMaker(16), Features(32.0, 2.1e6)
    one = replica.Replica(EngineConfig(), TIMES, believed, WALK, 4, 0, 16_384)
    assert believed.predict(request) > 2 * TIMES.predict(request)
    for number in range(60):
        one.arrive(maker.pending(single(100.0 * number, 64 + 60 * (number % 30), number)), 100.0 * number)
        while one.next_s < math.inf:
            one.wake(one.next_s)
    assert believed.predict(request) == pytest.approx(TIMES.predict(request), rel=0.15)


def test_jains_index():
    assert jain(np.array([2.0, 2.0])) == 1.0
    assert jain(np.array([1.0, 0.0])) == 0.5


# ---- the command -------------------------------------------------------------------------------------------


def arguments(*argv):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(argv)


SMALL = ("--scale", "50", "--requests", "20", "--pool-tokens", "2000", "--chunk-size", "64", "--model", "smollm2-135m")


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
    assert command.run(arguments(*SMALL, *argv)) == 0
    records = json.loads(path.read_text(encoding="utf-8"))
    assert len(records) == 8
    keys = {"policy", "workload", "seed", "qps", "mean_s", "p99_s", "hit_rate", "fairness", "longest_s", "command"}
    assert all(keys <= set(one) for one in records)
    assert {one["policy"] for one in records} == {"jct", "fcfs:all"}
    assert "p99 s (spread)" in capsys.readouterr().out
    assert plot.stat().st_size > 1000


def test_throughput_at_equal_p99_is_written_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "records.json"
    argv = ["--policies", "fcfs", "--rates", "5,inf", "--equal-p99", "0.5", "--json", str(path)]
    args = arguments(*SMALL, *argv)
    assert command.run(args) == 0
    five, burst, equal = json.loads(path.read_text(encoding="utf-8"))
    assert (five["qps"], burst["qps"]) == (5, None)
    assert (five["equal_p99_ratio"], equal["equal_p99_load"]) == (None, 0.5)
    assert equal["equal_p99_ratio"] >= 1  # the reference keeps to its own p99
    reference = run_at(args, args.reference, workload_of(args, 0), 0.5 * burst["requests_per_s"])
    assert equal["p99_s"] <= reference.p99_s
    assert equal["requests_per_s"] == pytest.approx(equal["equal_p99_ratio"] * reference.requests_per_s)
    assert "x  (" in capsys.readouterr().out


def test_the_largest_rate_is_found_from_both_sides():
    fleet, load = make_fleet(), workload(single(0.0, 100))
    one = record("jct", fleet, load, 1.0, simulate(fleet, load))

    def run(limit_qps):
        return lambda qps: replace(one, qps=qps, p99_s=0.0 if qps <= limit_qps else 2.0)

    for limit in (0.3, 1.0, 5.7):
        found = largest_rate(run(limit), 1.0, 1.0)
        assert found is not None
        assert found.qps is not None
        assert limit * 0.96 <= found.qps <= limit
    assert largest_rate(run(math.inf), 1.0, 1.0).qps == 64  # nobody looks further
    assert largest_rate(run(0.0), 1.0, 1.0) is None


def test_a_trace_runs_at_its_own_times(capsys: pytest.CaptureFixture[str]):
    path = Path(__file__).parent / "data" / "conversation_trace.jsonl"
    argv = ["--workload", f"trace:{path}", "--recorded", "--copies", "2", "--replicas", "3", "--routing", "prefix"]
    assert command.run(arguments(*argv, "--policies", "jct", "--block-size", "128")) == 0
    assert "trace:conversation_trace" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (("--policies", "sjf"), "allowed are jct, srjf, hrrn, lpm, fcfs, with :prefix, :all, :none or nothing"),
        (("--policies", "jct:some"), "'jct:some': allowed are"),
        (("--gpu", "tpu"), "invalid choice: 'tpu'"),
        (("--loads", "0.5,none"), "'none': must be a number"),
        (("--rates", "0"), "'0': must be above 0"),
        (("--rates", "1", "--loads", "1"), "not allowed with argument --rates"),
        (("--scale", "0"), "'0': must be above 0"),
        (("--efficiency", "inf"), "'inf': must be above 0"),
        (("--noise", "-1"), "'-1': must be at least 0"),
        (("--pool-tokens", "-16"), "'-16': must be a whole number, at least 0"),
        (("--jct", "file", "--coefficients", "1,2,3"), "not allowed with argument --jct"),
    ],
)
def test_flags_are_checked(bad, text, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        arguments(*bad)
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (("--coefficients", "1,2"), "--coefficients: 2 numbers; needed are seconds per pass, chunk and key"),
        (("--coefficients", "1,2,-3"), "--coefficients: expected"),
        (("--jct", "nowhere.json"), "--jct nowhere.json: No such file"),
        (("--recorded",), "--recorded: workload post_recommendation has no times of its own"),
        (("--rate-scale", "2"), "--rate-scale: only with --recorded"),
        (("--workload", "other"), "workload 'other': must be one of"),
        (("--block-size", "7"), "block_size=7: must be a power of two"),
        (("--model", "nothing"), "model='nothing': no such path; known names are"),
    ],
)
def test_settings_are_checked(bad, text):
    with pytest.raises(ConfigError) as caught:
        command.run(arguments(*SMALL, *bad))
    assert text in caught.value.message


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
