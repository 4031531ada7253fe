"""The fingerprint changes with everything that KV depends on, and with nothing else."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CONFIG, SETTINGS, make_model

from jprefill.kvstore import fingerprint as module
from jprefill.kvstore.fingerprint import digest_bits, fingerprint
from jprefill.model.llama import flatten


@pytest.fixture(scope="module")
def weights():
    return flatten(make_model())


@pytest.fixture(params=["host", "device"])
def everywhere(request, monkeypatch):
    """Both ways to digest the weights, whatever device the test runs on."""
    if request.param == "device":
        monkeypatch.setattr(module, "_digest_bytes", lambda leaf: np.asarray(digest_bits(leaf)).tobytes())


def test_it_is_32_bytes_and_the_same_for_equal_weights(weights):
    first = fingerprint(CONFIG, weights, SETTINGS)
    copies = {name: jnp.array(weights[name]) for name in reversed(list(weights))}
    assert len(first) == 32
    assert fingerprint(CONFIG, copies, SETTINGS) == first


@pytest.mark.usefixtures("everywhere")
def test_one_changed_bit_of_any_weight_changes_it(weights):
    seen = {fingerprint(CONFIG, weights, SETTINGS)}
    for name in weights:
        leaf = np.array(weights[name])
        leaf.reshape(-1)[-1:].view(np.uint8)[0] ^= 1
        seen.add(fingerprint(CONFIG, weights | {name: jnp.asarray(leaf)}, SETTINGS))
    assert len(seen) == 1 + len(weights)


@pytest.mark.usefixtures("everywhere")
def test_two_exchanged_weights_change_it(weights):
    k, v = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "kv")
    swapped = weights | {k: weights[v], v: weights[k]}
    assert fingerprint(CONFIG, swapped, SETTINGS) != fingerprint(CONFIG, weights, SETTINGS)


@pytest.mark.parametrize(
    "change",
    [
        {"config": replace(CONFIG, rope=replace(CONFIG.rope, theta=5e5))},
        {"config": replace(CONFIG, norm_eps=1e-6)},
        {"settings": replace(SETTINGS, dtype="bfloat16")},
        {"settings": replace(SETTINGS, block_size=32)},
        {"settings": replace(SETTINGS, batch_invariant=True)},
        {"version": 2},
    ],
)
def test_what_kv_depends_on_changes_it(weights, change, monkeypatch):
    before = fingerprint(CONFIG, weights, SETTINGS)
    monkeypatch.setattr(module, "LAYOUT_VERSION", change.get("version", 1))
    after = fingerprint(change.get("config", CONFIG), weights, change.get("settings", SETTINGS))
    assert after != before


@pytest.mark.parametrize(
    "change",
    [{"layout": "full"}, {"chunk_size": 128}, {"kv_host_bytes": 1}, {"keep": "all"}, {"max_queued_requests": 1}],
)
def test_what_kv_does_not_depend_on_leaves_it(weights, change):
    before, after = (fingerprint(CONFIG, weights, each) for each in (SETTINGS, replace(SETTINGS, **change)))
    assert before == after


def test_where_bits_must_be_equal_the_way_to_compute_them_counts(weights):
    exact = replace(SETTINGS, batch_invariant=True)
    changes = [{}, {"layout": "full"}, {"chunk_size": 128}, {"attention": "reference"}]
    assert len({fingerprint(CONFIG, weights, replace(exact, **change)) for change in changes}) == len(changes)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int8, ml_dtypes.float8_e4m3fn])
def test_the_device_digest_is_the_sum_of_mixed_words(dtype):
    raw = np.random.default_rng(0).integers(0, 256, 3 * 5 * np.dtype(dtype).itemsize, np.uint8)
    leaf = raw.view(dtype).reshape(3, 5)
    words = raw.view(f"<u{np.dtype(dtype).itemsize}").tolist()
    expected = [sum(_mixed(word, place, seed) for place, word in enumerate(words)) % 2**32 for seed in module._SEEDS]
    assert np.asarray(digest_bits(jnp.asarray(leaf))).tolist() == expected


def _mixed(word, place, seed):
    """`_mix` in Python integers."""
    word = (word + (place ^ seed) * 0x85EBCA6B) % 2**32
    word = (word ^ word >> 16) * 0xC2B2AE35 % 2**32
    word = (word ^ word >> 13) * seed % 2**32
    return word ^ word >> 16


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 63), st.integers(0, 2**32 - 1)), min_size=1, max_size=6),
    st.sampled_from([0, 1, 0xFFFFFFFF]),
)
def test_the_device_digest_sees_every_change_tried(changes, fill):
    before = np.full(64, fill, np.uint32)
    after = before.copy()
    for place, value in changes:
        after[place] = value
    digests = [np.asarray(digest_bits(jnp.asarray(words))).tolist() for words in (before, after)]
    assert (digests[0] == digests[1]) == np.array_equal(before, after)


def test_a_large_array_counts_places_beyond_one_axis():
    shape = jax.ShapeDtypeStruct((2**20, 2**13), jnp.bfloat16)
    assert jax.eval_shape(digest_bits, shape).shape == (2,)
