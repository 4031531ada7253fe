"""Block keys: what changes them, what does not, and the chain itself written out."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jprefill.kvstore.hashing import KEY_BYTES, BlockKeys, KeyMaker

SIZE = 4


def ids(*token_ids: int) -> np.ndarray:
    return np.asarray(token_ids, np.int32)


def upto(num_tokens: int) -> np.ndarray:
    return np.arange(1, num_tokens + 1, dtype=np.int32)


def same_blocks(a: BlockKeys, b: BlockKeys) -> list[bool]:
    return [x == y for x, y in zip(a.hashes, b.hashes, strict=True)]


def test_a_key_is_the_hash_of_the_parent_key_and_the_tokens():
    keys = KeyMaker(b"model", SIZE).keys(upto(8))
    root = hashlib.sha256(b"jprefill block keys 1\0" + b"\4\0\0\0" + b"model").digest()
    first = hashlib.sha256(root + b"\1\0\0\0\2\0\0\0\3\0\0\0\4\0\0\0").digest()
    second = hashlib.sha256(first + b"\5\0\0\0\6\0\0\0\7\0\0\0\10\0\0\0").digest()
    assert keys.hashes == (first, second)
    assert {len(key) for key in keys.hashes} == {KEY_BYTES}


def test_a_salt_enters_the_chain_before_the_first_block_that_is_not_shared():
    maker = KeyMaker(b"model", SIZE, upto(5))
    common, salted = maker.keys(upto(12)), maker.keys(upto(12), "tenant")
    salt = hashlib.sha256(b"tenant").digest()
    parent = hashlib.sha256(b"jprefill salt 1\0" + common.hashes[0] + salt).digest()
    assert salted.hashes[1] == hashlib.sha256(parent + upto(12)[4:8].tobytes()).digest()
    assert same_blocks(common, salted) == [True, False, False]
    assert common.num_shared == salted.num_shared == 1


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_only_whole_blocks_have_keys(num_tokens: int, num_blocks: int):
    keys = KeyMaker(b"model", SIZE).keys(upto(num_tokens))
    assert len(keys) == len(keys.hashes) == num_blocks
    assert keys.tokens.shape == (num_blocks, SIZE)
    assert keys.tokens.reshape(-1).tolist() == upto(num_tokens)[: num_blocks * SIZE].tolist()


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(None, 3), (0, 0), (7, 1), (8, 2), (1000, 3)])
def test_a_limit_in_tokens_cuts_the_chain(num_tokens: int | None, num_blocks: int):
    maker = KeyMaker(b"model", SIZE)
    assert maker.keys(upto(12), num_tokens=num_tokens).hashes == maker.keys(upto(12)).hashes[:num_blocks]


def test_keys_do_not_follow_later_changes_of_the_callers_arrays():
    prompt, shared = upto(8), upto(4)
    maker = KeyMaker(b"model", SIZE, shared)
    keys = maker.keys(prompt, "a")
    prompt[:], shared[:] = 0, 0
    assert keys.tokens.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert maker.keys(upto(8), "a").hashes == keys.hashes
    with pytest.raises(ValueError, match="read-only"):
        keys.tokens[0, 0] = 9


def test_a_view_of_a_larger_array_has_the_keys_of_its_copy():
    every_other = upto(16)[::2]
    maker = KeyMaker(b"model", SIZE)
    assert maker.keys(every_other).hashes == maker.keys(every_other.copy()).hashes


@pytest.mark.parametrize(
    "other",
    [KeyMaker(b"other", SIZE), KeyMaker(b"model", 2 * SIZE), KeyMaker(b"", SIZE)],
    ids=["fingerprint", "block size", "no fingerprint"],
)
def test_another_model_or_block_size_has_no_key_in_common(other: KeyMaker):
    keys = KeyMaker(b"model", SIZE).keys(upto(16))
    assert not set(keys.hashes) & set(other.keys(upto(16)).hashes)


@pytest.mark.parametrize("salt", ["", "a", "b", "A", "a ", "é", "e\u0301", "\0", "\ud800"])
def test_each_salt_has_keys_of_its_own(salt: str):
    maker = KeyMaker(b"model", SIZE)
    others = {"", "a", "b", "A", "a ", "é", "e\u0301", "\0", "\ud800"} - {salt}
    own = set(maker.keys(upto(8), salt).hashes)
    assert all(not own & set(maker.keys(upto(8), other).hashes) for other in others)
    assert own == set(maker.keys(upto(8), salt).hashes)


@pytest.mark.parametrize(
    ("prompt", "num_shared"),
    [
        (upto(16), 2),
        (upto(6), 1),
        (upto(3), 0),
        (ids(1, 2, 3, 4, 5, 6, 7, 99, 9, 10, 11, 12), 1),  # leaves the shared prompt within its second block
        (ids(99, 2, 3, 4, 5, 6, 7, 8), 0),
    ],
)
def test_shared_blocks_lie_wholly_inside_the_common_front(prompt: np.ndarray, num_shared: int):
    maker = KeyMaker(b"model", SIZE, upto(10))
    a, b, common = (maker.keys(prompt, salt) for salt in ("a", "b", ""))
    num_blocks = len(prompt) // SIZE
    assert a.num_shared == num_shared
    assert same_blocks(a, b) == [i < num_shared for i in range(num_blocks)]
    assert same_blocks(a, common) == [i < num_shared for i in range(num_blocks)]


def test_without_salt_the_shared_prompt_changes_no_key():
    assert KeyMaker(b"model", SIZE, upto(8)).keys(upto(16)).hashes == KeyMaker(b"model", SIZE).keys(upto(16)).hashes


@settings(deadline=None)
@given(
    prompt=st.lists(st.integers(0, 2**31 - 1), min_size=SIZE, max_size=6 * SIZE),
    place=st.integers(0, 6 * SIZE - 1),
    salt=st.sampled_from(["", "tenant"]),
)
def test_a_changed_token_changes_its_block_and_all_after_it_and_none_before(prompt: list[int], place: int, salt: str):
    place %= len(prompt)
    changed = [*prompt]
    changed[place] ^= 1
    maker = KeyMaker(b"model", SIZE)
    before, after = maker.keys(ids(*prompt), salt), maker.keys(ids(*changed), salt)
    assert same_blocks(before, after) == [i < place // SIZE for i in range(len(prompt) // SIZE)]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), max_size=4 * SIZE), max_size=8))
def test_equal_keys_mean_equal_fronts(prompts: list[list[int]]):
    maker = KeyMaker(b"model", SIZE)
    fronts: dict[bytes, list[int]] = {}
    for prompt in prompts:
        for i, key in enumerate(maker.keys(ids(*prompt)).hashes):
            assert fronts.setdefault(key, prompt[: (i + 1) * SIZE]) == prompt[: (i + 1) * SIZE]
