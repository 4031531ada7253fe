"""Log-likelihoods against sums over the fake model, by lm-evaluation-harness's convention."""

import math

import numpy as np
import pytest
from fakes import BOS_ID, EOS_ID, ByteTokenizer, FakeEngine, next_token_logprobs

from jprefill.errors import ContextLengthError, EngineError, InvalidRequestError
from jprefill.tasks.loglikelihood import Loglikelihoods, loglikelihood_job
from jprefill.types import ItemScores, ScoreResult, Usage

TOKENIZER = ByteTokenizer()


def run(*args, tokenizer=TOKENIZER, **options) -> Loglikelihoods:
    job = loglikelihood_job(tokenizer, *args, **options)
    with FakeEngine(vocab_size=tokenizer.vocab_size) as engine:
        return job.finish([engine.submit(request).result(10) for request in job.requests])


def tokens(*args, tokenizer=TOKENIZER, **options) -> list[tuple[list[int], list[int]]]:
    """Context ids and continuation ids of every item."""
    (request,) = loglikelihood_job(tokenizer, *args, **options).requests
    pairs = []
    for item in request.items:
        context = [*request.prefix.tolist(), int(item.token_ids[0])]
        assert item.token_ids[1:].tolist() == item.targets[:-1, 0].tolist()
        assert item.rows.tolist() == list(range(len(item.token_ids)))
        pairs.append((context, item.targets[:, 0].tolist()))
    return pairs


def lm_eval_pair(tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """The harness's rule, written the long way."""
    num_spaces = len(context) - len(context.rstrip())
    if num_spaces:
        continuation = context[-num_spaces:] + continuation
        context = context[:-num_spaces]
    whole = tokenizer.encode(context + continuation, add_bos=tokenizer.adds_bos)
    context_ids = tokenizer.encode(context, add_bos=tokenizer.adds_bos)
    return context_ids, whole[len(context_ids) :]


@pytest.mark.parametrize(
    ("context", "continuations"),
    [
        ("The sky is", [" blue", " green"]),
        ("The sky is ", ["blue", "green"]),
        ("The sky is \n", ["blue"]),
        ("abc", ["def", "dx"]),
    ],
)
@pytest.mark.parametrize("merges", [(), (" blue", "s ", " gr", "cd", "cde")])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_text_is_split_as_the_harness_splits_it(context, continuations, merges, adds_bos):
    tokenizer = ByteTokenizer(merges=merges, adds_bos=adds_bos)
    expected = [lm_eval_pair(tokenizer, context, text) for text in continuations]
    assert tokens(context, continuations, tokenizer=tokenizer) == expected


def test_the_value_is_the_sum_over_the_continuation():
    result = run("ab", ["cd", "xyz"])
    for text, item in zip([b"cd", b"xyz"], result.items, strict=True):
        ids, expected = [BOS_ID, *b"ab"], []
        for token_id in text:
            expected.append(next_token_logprobs(ids, TOKENIZER.vocab_size)[token_id])
            ids.append(token_id)
        assert item.token_logprobs == pytest.approx(expected, abs=1e-5)
        assert item.logprob == pytest.approx(sum(expected), abs=1e-5)
        assert item.num_tokens == len(text)
        assert not item.is_greedy
    assert result.usage.num_cached_tokens == 2


def test_greedy_means_every_token_is_the_first_choice():
    ids = [65, 66]
    first = int(next_token_logprobs(ids, TOKENIZER.vocab_size).argmax())
    second = int(next_token_logprobs([*ids, first], TOKENIZER.vocab_size).argmax())
    result = run(ids, [[first, second], [first, (second + 1) % 256], [first]])
    assert [item.is_greedy for item in result.items] == [True, False, True]


def test_token_ids_stay_as_they_are():
    assert tokens([BOS_ID, 1], [[2, 3], [4]]) == [([BOS_ID, 1], [2, 3]), ([BOS_ID, 1], [4])]


@pytest.mark.parametrize("context", ["", "  "])
def test_an_empty_context_becomes_bos(context):
    assert tokens(context, ["ab"]) == [([BOS_ID], [*context.encode(), *b"ab"])]


def test_without_bos_an_empty_context_becomes_eos():
    assert tokens("", ["ab"], tokenizer=ByteTokenizer(has_bos=False)) == [([EOS_ID], [*b"ab"])]


def test_a_continuation_that_spells_bos_does_not_get_two():
    assert tokens("", ["<s>ab"]) == [([BOS_ID], [*b"ab"])]


def test_without_bos_and_eos_an_empty_context_is_refused():
    with pytest.raises(InvalidRequestError, match="neither BOS nor EOS"):
        loglikelihood_job(ByteTokenizer(has_bos=False, has_eos=False), "", ["ab"])


@pytest.mark.parametrize(
    ("args", "param", "text"),
    [
        (("a", []), "continuations", "must not be empty"),
        (("a", "b"), "continuations", "must be a list, got str"),
        (("a", ["b", ""]), "continuations[1]", "must not be empty"),
        (("a", [[1]]), "continuations[0]", "context is text and continuations[0] is token ids"),
        (([], [[1]]), "context", "context has no token"),
        (([1], [[2], []]), "continuations[1]", "must not be empty"),
        ((None, ["b"]), "context", "a string or a list of token ids"),
        (("a\ud800", ["b"]), "context", "lone surrogate"),
        (("a", ["\ud800"]), "continuations[0]", "lone surrogate"),
    ],
)
def test_bad_input_gets_one_clear_error(args, param, text):
    with pytest.raises(InvalidRequestError) as caught:
        loglikelihood_job(TOKENIZER, *args)
    assert caught.value.param == param
    assert text in caught.value.message


@pytest.mark.parametrize("bad", [-1, TOKENIZER.vocab_size, True, math.nan, "1"])
def test_every_token_id_is_checked(bad):
    for args in (([1, bad], [[1]]), ([1], [[1], [bad]])):
        with pytest.raises(InvalidRequestError):
            loglikelihood_job(TOKENIZER, *args)


def test_a_continuation_that_adds_no_token_is_refused():
    with pytest.raises(InvalidRequestError, match=r"continuations\[0\] adds no token"):
        loglikelihood_job(ByteTokenizer(merges=["abc"]), "ab", ["c"])


def test_the_limit_counts_the_tokens_that_are_read():
    loglikelihood_job(TOKENIZER, "abc", ["de"], max_model_len=5)
    with pytest.raises(ContextLengthError, match="prompt of 5 tokens, the limit is 4"):
        loglikelihood_job(TOKENIZER, "abc", ["de"], max_model_len=4)


def test_a_nan_is_an_error_and_not_an_answer():
    job = loglikelihood_job(TOKENIZER, [1], [[2]])
    scores = ItemScores(np.full((1, 1), np.nan, np.float32), np.zeros(1, np.int32), np.zeros(1, np.float32))
    with pytest.raises(EngineError, match="no finite"):
        job.finish([ScoreResult((scores,), Usage(1))])


def test_records_have_one_entry_per_continuation():
    records = run("ab", ["c", "d"]).to_dicts()
    assert [record["item"] for record in records] == [0, 1]
    assert set(records[0]) == {"item", "logprob", "is_greedy", "num_tokens", "token_logprobs"}
