"""Keys seen lately: bounded, oldest out, a chain fades from its end."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jprefill.kvstore.ghosts import Ghosts
from jprefill.kvstore.hashing import BlockKeys, KeyMaker

MAKER = KeyMaker(b"model", 2)


def prompt(*token_ids: int) -> BlockKeys:
    """One block of two equal tokens per number."""
    return MAKER.keys(np.repeat(np.asarray(token_ids, np.int32), 2))


def test_only_the_leading_blocks_that_were_added_are_seen():
    ghosts = Ghosts(100)
    assert ghosts.seen_before(prompt(1, 2, 3)) == 0
    ghosts.add(prompt(1, 2, 3))
    assert ghosts.seen_before(prompt(1, 2, 3)) == 3
    assert ghosts.seen_before(prompt(1, 2, 9)) == 2
    assert ghosts.seen_before(prompt(1, 2, 3, 4)) == 3
    assert ghosts.seen_before(prompt(9, 2, 3)) == 0
    assert ghosts.seen_before(prompt()) == 0


def test_the_oldest_prompt_leaves_first_and_from_its_end():
    ghosts = Ghosts(5)
    ghosts.add(prompt(1, 2, 3))
    ghosts.add(prompt(7, 8, 9))
    assert len(ghosts) == 5
    assert ghosts.seen_before(prompt(1, 2, 3)) == 2
    assert ghosts.seen_before(prompt(7, 8, 9)) == 3


def test_a_prompt_seen_again_is_young_again():
    ghosts = Ghosts(4)
    ghosts.add(prompt(1, 2))
    ghosts.add(prompt(3, 4))
    ghosts.add(prompt(1, 2))
    ghosts.add(prompt(5, 6))
    assert [ghosts.seen_before(prompt(*pair)) for pair in ((1, 2), (3, 4), (5, 6))] == [2, 0, 2]


def test_of_a_prompt_longer_than_the_set_the_front_is_kept():
    ghosts = Ghosts(3)
    ghosts.add(prompt(*range(50)))
    assert len(ghosts) == 3
    assert ghosts.seen_before(prompt(*range(50))) == 3


def test_a_set_of_no_keys_sees_nothing():
    ghosts = Ghosts(0)
    ghosts.add(prompt(1, 2))
    assert len(ghosts) == ghosts.seen_before(prompt(1, 2)) == 0


@settings(deadline=None)
@given(
    max_keys=st.integers(0, 12),
    prompts=st.lists(st.lists(st.integers(0, 1), max_size=5), max_size=25),
)
def test_never_too_many_and_bisection_finds_what_a_walk_finds(max_keys: int, prompts: list[list[int]]):
    ghosts = Ghosts(max_keys)
    for token_ids in prompts:
        ghosts.add(prompt(*token_ids))
        assert len(ghosts) <= max_keys
        assert ghosts.seen_before(prompt(*token_ids)) == min(len(token_ids), max_keys)
        for other in prompts:
            keys = prompt(*other)
            seen = [
                ghosts.seen_before(BlockKeys(keys.hashes[i : i + 1], keys.tokens[i : i + 1])) for i in range(len(keys))
            ]
            assert ghosts.seen_before(keys) == (seen.index(0) if 0 in seen else len(keys))
