"""Workloads: the sizes that they promise, the same for one seed, and tokens that are equal where sources are."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fakes import ByteTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from jprefill.bench.prose import prose
from jprefill.bench.workloads import (
    NOBODY,
    WORKLOADS,
    Arrival,
    Part,
    Workload,
    credit_verification,
    make_workload,
    mixed,
    post_recommendation,
    short_labels,
    token_ids,
    trace,
)
from jprefill.errors import ConfigError

TRACE = Path(__file__).parent / "data" / "conversation_trace.jsonl"
PROSE = np.asarray(ByteTokenizer().encode(prose(), add_bos=False), np.int32)
SEEDS = st.integers(0, 2**32)
NAMES = [*WORKLOADS, f"trace:{TRACE}"]
ANY = Workload("any", 0, ())


# ---- what is asked


def test_posts_of_all_users_come_in_random_order_behind_the_profile_of_their_user():
    arrivals = post_recommendation(3).arrivals
    assert len(arrivals) == 1000
    profiles = {arrival.user: arrival.prompt[0] for arrival in arrivals}
    assert sorted(profiles) == list(range(20))
    assert len({profile.source for profile in profiles.values()}) == 20
    assert all(11_000 <= profile.num_tokens <= 17_000 for profile in profiles.values())
    assert all(arrival.prompt[0] == profiles[arrival.user] for arrival in arrivals)
    assert all(arrival.prompt[1].num_tokens == 150 for arrival in arrivals)
    assert len({arrival.prompt[1].source for arrival in arrivals}) == 1000
    assert len({arrival.user for arrival in arrivals[:20]}) < 20  # neither in turns
    assert len({arrival.user for arrival in arrivals[:50]}) > 10  # nor user by user


def test_the_sizes_of_the_paper():
    workload = post_recommendation()
    assert 13e6 < workload.num_tokens < 15.5e6
    once = {part for arrival in workload.arrivals for part in arrival.prompt}
    assert 0.4e6 < sum(part.num_tokens for part in once) < 0.46e6
    histories = credit_verification().arrivals
    assert [arrival.user for arrival in histories] == list(range(60))
    lengths = [arrival.num_tokens for arrival in histories]
    assert min(lengths) >= 40_000
    assert max(lengths) <= 60_000
    assert max(lengths) - min(lengths) > 15_000


def test_short_labels_share_their_instruction():
    arrivals = short_labels().arrivals
    assert {arrival.prompt[0] for arrival in arrivals} == {Part(0, 64)}
    assert len({arrival.prompt[1].source for arrival in arrivals}) == len(arrivals) == 1000
    lengths = np.array([arrival.num_tokens for arrival in arrivals])
    assert 256 <= lengths.min() < 270
    assert 1950 < lengths.max() <= 2048
    assert np.median(lengths) == pytest.approx(math.sqrt(256 * 2048), rel=0.15)


def test_mixed_has_just_its_share_of_long_prompts():
    lengths = [arrival.num_tokens for arrival in mixed(num_requests=200).arrivals]
    assert lengths.count(8000) == 10
    assert all(128 <= length <= 512 for length in lengths if length != 8000)
    assert lengths[:10] != [8000] * 10


def test_sizes_are_parameters():
    arrivals = post_recommendation(num_users=2, num_posts=3, min_profile_tokens=5, max_profile_tokens=9).arrivals
    assert sorted(arrival.user for arrival in arrivals) == [0, 0, 0, 1, 1, 1]
    assert all(arrival.num_tokens == 159 for arrival in arrivals)


@pytest.mark.parametrize("name", NAMES)
def test_so_many_requests_as_are_asked_for(name: str):
    assert len(make_workload(name, num_requests=7).arrivals) == 7
    if name.startswith(("post", "trace")):  # those have a size of their own
        with pytest.raises(ConfigError, match=r"has (1000|50) requests, not 1001"):
            make_workload(name, num_requests=1001)
    else:
        assert make_workload("mixed", num_requests=1001).num_tokens > 8000 * 50


# ---- the same for one seed


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20)
@given(seed=SEEDS)
def test_one_seed_one_workload_in_ascending_order(name: str, seed: int):
    workload = make_workload(name, seed, scale=10.0)
    assert workload == make_workload(name, seed, scale=10.0)
    assert workload.seed == seed
    times_s = [arrival.at_s for arrival in workload.arrivals]
    assert times_s == sorted(times_s)
    assert all(part.num_tokens >= 1 for arrival in workload.arrivals for part in arrival.prompt)


@pytest.mark.parametrize("name", WORKLOADS)
def test_another_seed_makes_another_workload(name: str):
    assert make_workload(name, 1).arrivals != make_workload(name, 2).arrivals


@pytest.mark.parametrize("name", NAMES)
def test_scale_divides_all_token_counts_and_leaves_the_rest(name: str):
    whole, small = make_workload(name, 5).arrivals, make_workload(name, 5, scale=8.0).arrivals
    assert len(whole) == len(small)
    for large, little in zip(whole, small, strict=True):
        assert (large.at_s, large.user) == (little.at_s, little.user)
        assert [part.source for part in large.prompt] == [part.source for part in little.prompt]
        for part, scaled in zip(large.prompt, little.prompt, strict=True):
            assert abs(part.num_tokens / 8 - scaled.num_tokens) <= 1


# ---- arrival times


@given(seed=SEEDS, qps=st.floats(1e-3, 1e6))
def test_a_rate_changes_nothing_but_the_times(seed: int, qps: float):
    workload = mixed(num_requests=30)
    timed = workload.at_rate(qps, seed)
    assert timed == workload.at_rate(qps, seed)
    assert (timed.name, timed.seed) == ("mixed", seed)
    assert [(one.user, one.prompt) for one in timed.arrivals] == [(one.user, one.prompt) for one in workload.arrivals]
    times_s = [arrival.at_s for arrival in timed.arrivals]
    assert times_s == sorted(times_s)
    assert times_s[0] > 0
    doubled = [arrival.at_s for arrival in workload.at_rate(2 * qps, seed).arrivals]
    assert doubled == pytest.approx([at_s / 2 for at_s in times_s])


def test_gaps_are_exponential():
    times_s = [arrival.at_s for arrival in mixed(num_requests=4000).at_rate(5.0, 1).arrivals]
    gaps_s = np.diff([0.0, *times_s])
    assert gaps_s.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps_s.std() == pytest.approx(0.2, rel=0.1)


def test_an_infinite_rate_is_a_burst():
    assert {arrival.at_s for arrival in mixed(num_requests=5).at_rate(math.inf, 0).arrivals} == {0.0}


@pytest.mark.parametrize("qps", [0.0, -1.0, math.nan])
def test_a_rate_that_is_none_is_refused(qps: float):
    with pytest.raises(ValueError, match="must be above 0"):
        mixed(num_requests=5).at_rate(qps, 0)


def test_first_keeps_the_order():
    workload = mixed(num_requests=9)
    assert workload.first(4).arrivals == workload.arrivals[:4]
    assert workload.first(100) == workload


# ---- traces


def test_a_trace_is_read_as_it_was_recorded():
    workload = trace(TRACE)
    assert workload.name == "trace:conversation_trace"
    records = [json.loads(line) for line in TRACE.read_text().splitlines()]
    assert [arrival.num_tokens for arrival in workload.arrivals] == [record["input_length"] for record in records]
    for arrival, record in zip(workload.arrivals, records, strict=True):
        assert arrival.at_s == pytest.approx(record["timestamp"] / 1000)
        assert arrival.user == NOBODY
        assert [part.source for part in arrival.prompt] == record["hash_ids"]
        assert all(part.num_tokens == 512 for part in arrival.prompt[:-1])


def test_a_trace_can_be_cut_and_run_faster():
    whole, cut = trace(TRACE), make_workload(f"trace:{TRACE}", num_requests=40, time_scale=0.5)
    assert len(cut.arrivals) == 40
    assert [arrival.at_s for arrival in cut.arrivals] == [arrival.at_s / 2 for arrival in whole.arrivals[:40]]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("no json", "line 2: JSONDecodeError"),
        ('{"timestamp": 0, "hash_ids": [1]}', "line 2: KeyError('input_length')"),
        ("[]", "line 2: TypeError"),
        ('{"timestamp": 0, "input_length": 513, "hash_ids": [1]}', "line 2: 1 hash_ids do not make an input_length of"),
        ('{"timestamp": 0, "input_length": 0, "hash_ids": []}', "line 2: 0 hash_ids do not make"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, text: str, wanted: str):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 512, "hash_ids": [1]}\n' + text + "\n")
    with pytest.raises(ConfigError) as caught:
        trace(path)
    assert wanted in caught.value.message


def test_a_missing_trace_and_an_unknown_workload_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere: No such file"):
        make_workload(f"trace:{tmp_path}/nowhere")
    with pytest.raises(ConfigError, match=r"workload 'no': must be one of post_recommendation, .*, or trace:FILE"):
        make_workload("no")


# ---- tokens


@given(
    sources=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=6, unique=True),
    num_tokens=st.integers(16, 40),
    salt=st.integers(0, 2**64),
)
def test_no_two_sources_share_a_block_and_equal_sources_are_equal(sources: list[int], num_tokens: int, salt: int):
    heads = {_ids(source, num_tokens, salt)[:16] for source in sources}
    assert len(heads) == len(sources)
    for source in sources:
        ids = _ids(source, num_tokens, salt)
        assert ids == _ids(source, num_tokens, salt)
        assert ids[: num_tokens // 2] == _ids(source, num_tokens // 2, salt)


def _ids(source: int, num_tokens: int, salt: int = 0, workload: Workload = ANY) -> tuple[int, ...]:
    return tuple(token_ids(workload, Arrival(0.0, NOBODY, (Part(source, num_tokens),)), PROSE, salt).tolist())


def test_a_salt_a_seed_and_a_name_make_other_tokens():
    others = [_ids(7, 16), _ids(7, 16, 1), _ids(7, 16, 0, Workload("any", 1, ())), _ids(7, 16, 0, Workload("b", 0, ()))]
    assert len(set(others)) == 4


def test_parts_follow_each_other_and_a_stream_never_ends():
    arrival = Arrival(0.0, 0, (Part(1, 20), Part(2, len(PROSE) + 50), Part(1, 5)))
    ids = token_ids(ANY, arrival, PROSE)
    assert ids.dtype == np.int32
    assert tuple(ids.tolist()) == _ids(1, 20) + _ids(2, len(PROSE) + 50) + _ids(1, 5)


def test_the_tokens_are_english():
    text = ByteTokenizer().decode(_ids(5, 400))
    assert " the " in text
    assert text[20:] in prose()


@pytest.mark.parametrize("source", [-1, 2**32])
def test_a_source_beyond_32_bits_is_refused(source: int):
    with pytest.raises(ValueError, match=f"source {source}: must be 0 to"):
        _ids(source, 5)


def test_prose_of_one_token_is_refused():
    with pytest.raises(ValueError, match="two different tokens"):
        token_ids(ANY, Arrival(0.0, 0, (Part(0, 3),)), np.zeros(10, np.int32))


def test_workloads_load_without_jax():
    code = "import sys, jprefill.bench.workloads as w; w.mixed(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
