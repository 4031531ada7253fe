"""The search for the longest input, against a linear scan."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jprefill.planner.search import longest_input


def scan(measure, budget, step, at_most):
    return max((n for n in range(0, at_most + 1, step) if n == 0 or measure(n) <= budget), default=0)


@given(
    fixed=st.integers(0, 10**6),
    slope=st.integers(1, 10**4),
    budget=st.integers(0, 10**8),
    step=st.sampled_from([1, 16, 1024]),
    probe=st.integers(0, 3000),
)
def test_a_line_is_solved_exactly_in_few_measurements(fixed, slope, budget, step, probe):
    lengths = []

    def measure(length):
        lengths.append(length)
        return fixed + slope * length

    longest = longest_input(measure, budget, step=step, at_most=2000 * step, probe=probe * step)
    assert longest == scan(lambda n: fixed + slope * n, budget, step, 2000 * step)
    assert len(lengths) <= 5


@pytest.mark.parametrize("jump", [-3_000_000, 3_000_000])
def test_a_compiler_that_changes_its_mind_halfway_is_followed(jump):
    def measure(length):
        return 5_000_000 + 12_000 * length + (jump if length > 20_000 else 0)

    longest = longest_input(measure, 400_000_000, step=256, at_most=2**24, probe=8192)
    assert measure(longest) <= 400_000_000 < measure(longest + 256)


def test_what_is_reported_was_measured():
    measured = {}

    def measure(length):
        measured[length] = 100 + 7 * length
        return measured[length]

    assert measured[longest_input(measure, 100_000, step=64, at_most=2**20, probe=8192)] <= 100_000
