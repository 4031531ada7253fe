"""One pass through the executables, against the plain NNX forward pass and against itself in other clothes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, UNTIED, label_item, make_model, make_runner, prompt, tokens, whole_piece

from jprefill.model.compiles import CompileCounter
from jprefill.scheduler.packer import pack, unpack
from jprefill.types import Item, ScoreRequest

BOUND = 5e-5  # nats, float32: DESIGN.md 4


@pytest.fixture(scope="module")
def runner():
    """Buckets below, at and above one chunk of 64."""
    return make_runner(buckets=(32, 256, 1024))


def score(runner, requests, bucket=None):
    """All requests in one pass."""
    pieces = [whole_piece(request) for request in requests]
    num_tokens = sum(piece.num_tokens for piece in pieces)
    bucket = bucket or next(b for b in runner.buckets if b >= num_tokens)
    return unpack(pieces, runner.run(pack(pieces, bucket)))


def all_logprobs(items):
    return np.concatenate([item.logprobs.reshape(-1) for item in items])


def exact(model, token_ids):
    """Log-probabilities of every position, from the module."""
    return np.asarray(jax.nn.log_softmax(model(jnp.asarray(token_ids)), axis=-1))


@pytest.mark.parametrize("layout", ["stream", "hybrid", "full"])
@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied-biased-llama3"])
def test_every_layout_gives_the_modules_numbers(config, layout):
    runner, model = make_runner(config, buckets=(256,), layout=layout), make_model(config)
    rng = np.random.default_rng(0)
    for length in (1, 63, 64, 65, 200, 256):
        token_ids = tokens(rng, length)
        [[item]] = score(runner, [prompt(token_ids)])
        last = exact(model, token_ids)[-1]
        np.testing.assert_allclose(item.logprobs[0], last[[5, 17, 250]], atol=BOUND)
        assert item.top_ids[0] == last.argmax()
        assert item.top_logprobs[0] == pytest.approx(last.max(), abs=BOUND)


def test_all_items_score_as_if_alone(runner):
    rng = np.random.default_rng(1)
    prefix = tokens(rng, 150)
    items = [tokens(rng, length) for length in (1, 40, 64, 3)]
    [together] = score(runner, [ScoreRequest(prefix, tuple(map(label_item, items)))])
    for item, token_ids in zip(together, items, strict=True):
        [[alone]] = score(runner, [prompt(np.concatenate([prefix, token_ids]))])
        np.testing.assert_allclose(item.logprobs, alone.logprobs, atol=BOUND)


def test_strangers_in_the_same_pass_change_nothing(runner):
    rng = np.random.default_rng(2)
    requests = [prompt(tokens(rng, length)) for length in (17, 130, 64, 1, 300)]
    shared = ScoreRequest(tokens(rng, 90), tuple(label_item(tokens(rng, n)) for n in (5, 70)))
    packed = score(runner, [*requests, shared])
    for request, items in zip([*requests, shared], packed, strict=True):
        [alone] = score(runner, [request])
        np.testing.assert_allclose(all_logprobs(items), all_logprobs(alone), atol=BOUND)


@pytest.mark.parametrize("chunk_size", [16, 32, 128, 256])
def test_chunk_size_and_bucket_change_nothing(runner, chunk_size):
    other = make_runner(chunk_size=chunk_size, buckets=(256, 512))
    token_ids = tokens(np.random.default_rng(3), 230)
    other_buckets = ((runner, 256), (runner, 1024), (other, 256), (other, 512))
    answers = [score(some, [prompt(token_ids)], bucket)[0][0].logprobs for some, bucket in other_buckets]
    for answer in answers[1:]:
        np.testing.assert_allclose(answer, answers[0], atol=BOUND)


def test_a_prompt_below_one_chunk_is_the_same_in_its_small_bucket(runner):
    for length in (1, 17, 32):
        token_ids = tokens(np.random.default_rng(length), length)
        small, large = (score(runner, [prompt(token_ids)], bucket)[0][0].logprobs for bucket in (32, 256))
        np.testing.assert_allclose(small, large, atol=BOUND)


def test_continuations_of_any_length_are_read_in_calls_of_bounded_size(runner):
    """More rows than the largest head call holds."""
    token_ids = tokens(np.random.default_rng(4), 400)
    rows = np.arange(399, dtype=np.int32)
    request = ScoreRequest(np.zeros(0, np.int32), (Item(token_ids, rows, token_ids[1:, None]),))
    [[item]] = score(runner, [request])
    expected = exact(make_model(), token_ids)
    np.testing.assert_allclose(item.logprobs[:, 0], expected[rows, token_ids[1:]], atol=BOUND)
    np.testing.assert_array_equal(item.top_ids, expected[:-1].argmax(-1))


def test_a_row_may_ask_for_more_ids_than_one_head_call_holds(runner):
    token_ids = tokens(np.random.default_rng(5), 20)
    ids = np.tile(np.arange(300, dtype=np.int32), 20)[None]
    item = Item(token_ids, np.array([19], np.int32), ids)
    [[answer]] = score(runner, [ScoreRequest(np.zeros(0, np.int32), (item,))])
    np.testing.assert_allclose(answer.logprobs, exact(make_model(), token_ids)[19][ids], atol=BOUND)
    assert np.exp(answer.logprobs[0, :300]).sum() == pytest.approx(1, abs=1e-5)


def test_bfloat16_follows_float32():
    token_ids = tokens(np.random.default_rng(6), 200)
    wide = score(make_runner(buckets=(256,)), [prompt(token_ids)])[0][0]
    weights = {name: leaf.astype(jnp.bfloat16) for name, leaf in _weights().items()}
    narrow = score(_runner_of(weights, "bfloat16"), [prompt(token_ids)])[0][0]
    np.testing.assert_allclose(narrow.logprobs, wide.logprobs, atol=0.1)


def test_a_pass_after_warm_up_compiles_nothing(runner):
    runner.warm_up()
    counter = CompileCounter()
    rng = np.random.default_rng(7)
    for length in range(1, 900, 41):
        score(runner, [prompt(tokens(rng, length), ids=tuple(range(length % 40 + 1)))])
    counter.close()
    assert counter.count == 0


def _weights():
    from jprefill.model.llama import flatten

    return flatten(make_model())


def _runner_of(weights, dtype):
    from dataclasses import replace

    from tiny import SETTINGS

    from jprefill.model.runner import Runner

    return Runner(CONFIG, weights, replace(SETTINGS, dtype=dtype), (256,))
