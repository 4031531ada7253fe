"""The shared prefix: longest, never a whole prompt, and prefix + suffix is the prompt again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jprefill.tasks.sharing import common_prefix_length, split_prefix


def prompts(*lists: list[int]) -> list[np.ndarray]:
    return [np.array(ids, np.int32) for ids in lists]


@pytest.mark.parametrize(
    ("lists", "length"),
    [
        ([[1, 2, 3], [1, 2, 4]], 2),
        ([[1, 2, 3], [1, 2, 3]], 2),  # equal prompts keep one token each
        ([[1, 2], [1, 2, 3, 4]], 1),  # one prompt starts another
        ([[1], [1]], 0),
        ([[1, 2], [3, 2]], 0),
        ([[1, 2, 3], [1, 2, 4], [1, 9, 3]], 1),
    ],
)
def test_length_is_the_longest_that_leaves_every_prompt_a_token(lists, length):
    assert common_prefix_length(prompts(*lists)) == length


def test_a_single_prompt_shares_nothing():
    prefix, suffixes = split_prefix(prompts([1, 2, 3]))
    assert prefix.tolist() == []
    assert suffixes[0].tolist() == [1, 2, 3]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=5))
def test_prefix_and_suffix_make_the_prompt_again(lists):
    prefix, suffixes = split_prefix(prompts(*lists))
    assert [prefix.tolist() + suffix.tolist() for suffix in suffixes] == lists
    assert all(len(suffix) for suffix in suffixes)
