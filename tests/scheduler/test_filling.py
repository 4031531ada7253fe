"""Who may join a pass: up to the budget anybody, beyond it whom the padding pays for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jprefill.scheduler.features import ChunkWalk
from jprefill.scheduler.filling import Filling

WALK = ChunkWalk(256, (128, 512, 2048))


def filled(length, num_waiting, budget=256):
    """How many prompts of one length ride together."""
    filling, inside = Filling(budget, 2048, num_waiting, WALK.num_rows), 1
    while inside < num_waiting and filling.may_join(length, inside * length, inside):
        inside += 1
    return inside


@pytest.mark.parametrize(
    ("length", "num_waiting", "inside"),
    [
        (64, 20, 4),  # the budget
        (256, 20, 1),  # nothing is padding
        (257, 20, 7),  # 14 chunks apart, 8 together
        (257, 2, 2),  # nobody waits longer than the other is spared
        (384, 20, 2),  # 4 chunks apart, 3 together
        (300, 20, 3),
        (2000, 20, 1),
    ],
)
def test_equal_prompts(length, num_waiting, inside):
    assert filled(length, num_waiting) == inside


def test_padding_is_free():
    filling = Filling(256, 2048, 2, WALK.num_rows)
    assert filling.may_join(200, 300, 1)
    assert not filling.may_join(213, 300, 1)


def test_without_a_budget_nobody_joins_and_nobody_beyond_the_most():
    assert not Filling(0, 2048, 9, WALK.num_rows).may_join(1, 300, 1)
    assert not Filling(256, 400, 9, WALK.num_rows).may_join(101, 300, 1)


@given(st.integers(1, 2048), st.integers(1, 2048), st.integers(1, 9), st.integers(0, 99))
def test_beyond_the_budget_those_inside_lose_no_more_than_the_others_gain(first, new, inside, behind):
    filling = Filling(1, 4096, inside + behind, WALK.num_rows)
    if filling.may_join(new, first, inside):
        apart, together = WALK.num_rows(first) + WALK.num_rows(new), WALK.num_rows(first + new)
        assert inside * (together - WALK.num_rows(first)) <= behind * (apart - together)


@given(st.integers(0, 6000))
def test_rows_of_one_are_rows(num_tokens):
    assert WALK.num_rows(num_tokens) == WALK.rows(np.array([num_tokens]))[0]
