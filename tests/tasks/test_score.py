"""Label scoring with a byte tokenizer and an engine that answers from a hash of the context."""

import builtins
import json
import math

import numpy as np
import pytest
from fakes import BOS_ID, ByteTokenizer, FakeEngine, next_token_logprobs

from jprefill.errors import ContextLengthError, InvalidRequestError, LabelError
from jprefill.tasks.score import LabelScores, score_job

TOKENIZER = ByteTokenizer()


def run(*args, tokenizer=TOKENIZER, **options) -> LabelScores:
    job = score_job(tokenizer, *args, **options)
    with FakeEngine(vocab_size=tokenizer.vocab_size) as engine:
        return job.finish([engine.submit(request).result(10) for request in job.requests])


def full_prompts(*args, tokenizer=TOKENIZER, **options) -> list[list[int]]:
    (request,) = score_job(tokenizer, *args, **options).requests
    return [[*request.prefix.tolist(), *item.token_ids.tolist()] for item in request.items]


def refusal(*args, **options) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        score_job(TOKENIZER, *args, **options)
    return caught.value


# ---- prompts


def test_text_is_tokenised_as_one_prompt_with_bos():
    expected = [
        TOKENIZER.encode("Is it hot? sun", add_bos=True),
        TOKENIZER.encode("Is it hot? ice", add_bos=True),
    ]
    assert full_prompts("Is it hot? ", ["sun", "ice"], ["Y"]) == expected


def test_tokens_that_join_query_and_item_are_kept():
    tokenizer = ByteTokenizer(merges=["t? s"])
    prompts = full_prompts("Is it hot? ", ["sun", "ice"], ["Y"], tokenizer=tokenizer)
    assert prompts[0] == tokenizer.encode("Is it hot? sun", add_bos=True)
    assert prompts[0] != prompts[1][: len(prompts[0])]
    (request,) = score_job(tokenizer, "Is it hot? ", ["sun", "ice"], ["Y"]).requests
    assert request.prefix.tolist() == tokenizer.encode("Is it ho", add_bos=True)


def test_item_first_puts_the_query_last():
    assert full_prompts("Q", ["ab"], ["Y"], item_first=True) == [[BOS_ID, *b"abQ"]]


def test_bos_follows_the_tokenizer_unless_the_caller_says():
    silent = ByteTokenizer(adds_bos=False)
    assert full_prompts("Q", ["a"], ["Y"], tokenizer=silent) == [[*b"Qa"]]
    assert full_prompts("Q", ["a"], ["Y"], tokenizer=silent, add_bos=True) == [[BOS_ID, *b"Qa"]]
    assert full_prompts("Q", ["a"], ["Y"], add_bos=False) == [[*b"Qa"]]


@pytest.mark.parametrize("as_kind", [list, tuple, lambda ids: np.array(ids, np.int64)])
def test_token_ids_are_joined_and_never_altered(as_kind):
    query, items = as_kind([70, 71]), [as_kind([72]), as_kind([73, 74])]
    assert full_prompts(query, items, label_ids=[1, 2]) == [[70, 71, 72], [70, 71, 73, 74]]
    assert full_prompts(query, items, label_ids=[1, 2], item_first=True) == [[72, 70, 71], [73, 74, 70, 71]]


def test_an_empty_item_or_an_empty_query_is_a_prompt_still():
    assert full_prompts("Q", [""], ["Y"]) == [[BOS_ID, *b"Q"]]
    assert full_prompts("", ["a"], ["Y"]) == [[BOS_ID, *b"a"]]
    assert full_prompts([7], [[], [8]], label_ids=[1]) == [[7], [7, 8]]


def test_one_item_is_all_suffix_and_many_share_the_prefix():
    (one,) = score_job(TOKENIZER, "Q: ", ["a"], ["Y"]).requests
    assert len(one.prefix) == 0
    (many,) = score_job(TOKENIZER, "Q: ", ["a", "b"], ["Y"], salt="tenant", deadline_s=12.5).requests
    assert many.prefix.tolist() == [BOS_ID, *b"Q: "]
    assert (many.salt, many.deadline_s) == ("tenant", 12.5)
    assert all(item.rows.tolist() == [len(item.token_ids) - 1] for item in many.items)


# ---- answers


def test_probabilities_are_those_of_the_full_prompt():
    scores = run("Q: ", ["a", "b"], ["Y", "N"])
    for text, item in zip(["a", "b"], scores.items, strict=True):
        row = next_token_logprobs([BOS_ID, *b"Q: ", *text.encode()], TOKENIZER.vocab_size)
        logprobs = row[[ord("Y"), ord("N")]]
        assert item.logprobs == pytest.approx(logprobs, abs=1e-6)
        weights = np.exp(logprobs)
        assert item.probabilities == pytest.approx(weights / weights.sum(), abs=1e-6)
        assert item.label_mass == pytest.approx(weights.sum(), abs=1e-6)
        assert item.top_id == row.argmax()
        assert item.is_top_label == (row.argmax() in (ord("Y"), ord("N")))
    assert scores.labels == ("Y", "N")
    assert scores.label_ids == ((89, 78), (89, 78))
    assert scores.usage.num_prompt_tokens == 10
    assert scores.usage.num_cached_tokens == 4


def test_the_top_label_is_seen_when_it_is_one_of_the_labels():
    scores = run([5], [[6]], label_ids=list(range(TOKENIZER.vocab_size)))
    assert scores.items[0].is_top_label
    assert scores.items[0].label_mass == pytest.approx(1.0, abs=1e-6)
    assert scores.items[0].label_mass <= 1.0


def test_temperature_changes_probabilities_only():
    cold, warm = run([5], [[6]], label_ids=[1, 2], temperature=0.5), run([5], [[6]], label_ids=[1, 2])
    assert cold.items[0].logprobs == warm.items[0].logprobs
    assert cold.items[0].label_mass == warm.items[0].label_mass
    ratio = warm.items[0].probabilities[0] / warm.items[0].probabilities[1]
    assert cold.items[0].probabilities[0] / cold.items[0].probabilities[1] == pytest.approx(ratio**2)


def test_each_item_may_have_label_ids_of_its_own():
    scores = run([5], [[6], [7]], label_ids=[[1, 2], [3, 4, 5]])
    assert scores.label_ids == ((1, 2), (3, 4, 5))
    assert [len(item.probabilities) for item in scores.items] == [2, 3]
    assert scores.labels is None
    alone = run([5], [[7]], label_ids=[3, 4, 5])
    assert scores.items[1] == alone.items[0]


def test_records_are_plain_json():
    scores = run("Q: ", ["a", "b"], ["Y", "N"])
    records = json.loads(json.dumps(scores.to_dicts(), allow_nan=False))
    assert records[1]["item"] == 1
    assert records[1]["labels"] == ["Y", "N"]
    assert records[1]["probabilities"] == list(scores.items[1].probabilities)


def test_a_data_frame_has_a_row_per_item_and_columns_per_label():
    pytest.importorskip("pandas")
    frame = run("Q: ", ["a", "b"], ["Y", "N"]).to_pandas()
    assert list(frame["item"]) == [0, 1]
    assert {"probability.Y", "logprob.N", "label_mass", "top_id", "is_top_label"} <= set(frame.columns)


def test_without_pandas_the_error_says_what_to_do(monkeypatch):
    real_import = builtins.__import__

    def no_pandas(name, *args, **kwargs):
        if name == "pandas":
            raise ImportError("not here")
        return real_import(name, *args, **kwargs)

    scores = run([5], [[6]], label_ids=[1])
    monkeypatch.setattr(builtins, "__import__", no_pandas)
    with pytest.raises(ImportError, match="pip install pandas"):
        scores.to_pandas()


# ---- refusals


@pytest.mark.parametrize(
    ("args", "options", "param", "text"),
    [
        (("", ["a", ""], ["Y"]), {}, "items[1]", "query and items[1] are both empty"),
        (([], [[]]), {"label_ids": [1]}, "items[0]", "both empty"),
        (("Q", [], ["Y"]), {}, "items", "items must not be empty"),
        (("Q", "a", ["Y"]), {}, "items", "items must be a list, got str"),
        (("Q", None, ["Y"]), {}, "items", "items must be a list, got NoneType"),
        ((3, ["a"], ["Y"]), {}, "query", "a string or a list of token ids, got int"),
        (("Q", [3], ["Y"]), {}, "items[0]", "a string or a list of token ids, got int"),
        (("Q", ["a", [1]], ["Y"]), {}, "items[1]", "query is text and items[1] is token ids: send one kind"),
        (([1], ["a"]), {"label_ids": [1]}, "items[0]", "query is token ids and items[0] is text"),
        (("Q", ["a"]), {}, "labels", "send labels (texts) or label_ids (token ids), one of the two"),
        (("Q", ["a"], ["Y"], [1]), {}, "label_ids", "one of the two"),
        (("Q", ["a"], []), {}, "labels", "labels must not be empty"),
        (("Q", ["a"], "YN"), {}, "labels", "labels must be a list, got str"),
        (("Q", ["a"], ["Y", ""]), {}, "labels[1]", "labels[1] must not be empty"),
        (("Q", ["a"], ["Y", 3]), {}, "labels[1]", "labels[1] must be a string, got int"),
        (([1], [[2]], ["Y"]), {}, "labels", "send label_ids"),
        (("Q", ["a"]), {"label_ids": []}, "label_ids", "must not be empty"),
        (("Q", ["a"]), {"label_ids": [[1], [2]]}, "label_ids", "label_ids has 2 lists for 1 items"),
        (("Q", ["a"]), {"label_ids": [[]]}, "label_ids[0]", "must not be empty"),
        (("Q\ud800", ["a"], ["Y"]), {}, "query", "query holds a lone surrogate at character 1"),
        (("Q", ["a", "\udfff"], ["Y"]), {}, "items[1]", "lone surrogate"),
        (("Q", ["a"], ["\ud800"]), {}, "labels[0]", "lone surrogate"),
        (("Q", ["a"], ["Y"]), {"temperature": math.nan}, "temperature", "finite"),
        (("Q", ["a", "b"], ["Y"]), {"max_items": 1}, "items", "items has 2 entries: allowed are 1 to 1"),
    ],
)
def test_bad_input_gets_one_clear_error(args, options, param, text):
    error = refusal(*args, **options)
    assert error.param == param
    assert text in error.message


@pytest.mark.parametrize("bad", [-1, TOKENIZER.vocab_size, True, 1.0, math.nan, "1", None, 2**70, [1]])
@pytest.mark.parametrize("field", ["query", "items", "label_ids", "per item"])
def test_every_token_id_is_checked(bad, field):
    args = {"query": [1], "items": [[1], [1]], "label_ids": [1]}
    args |= {"query": {"query": [1, bad]}, "items": {"items": [[1], [2, bad]]}}.get(field, {})
    args |= {"label_ids": {"label_ids": [1, bad]}, "per item": {"label_ids": [[1], [2, bad]]}}.get(field, {})
    error = refusal(args["query"], args["items"], label_ids=args["label_ids"])
    assert error.param is not None
    assert error.param.startswith("label_ids" if field == "per item" else field)


def test_a_float_array_or_a_matrix_is_no_list_of_ids():
    assert refusal(np.array([1.0]), [[1]], label_ids=[1]).param.startswith("query")
    assert refusal(np.array([[1]]), [[1]], label_ids=[1]).param.startswith("query")


def test_a_label_that_is_there_twice_is_refused():
    with pytest.raises(LabelError, match="label_ids holds token 4 twice"):
        score_job(TOKENIZER, [1], [[2]], label_ids=[4, 5, 4])


def test_a_label_of_two_tokens_is_refused():
    with pytest.raises(LabelError) as caught:
        score_job(TOKENIZER, "Q", ["a"], ["Y", "No"])
    assert caught.value.param is not None
    assert caught.value.param.startswith("labels")
    assert "No" in caught.value.message


def test_a_label_that_joins_one_items_end_names_the_item():
    tokenizer = ByteTokenizer(merges=["xY"])
    with pytest.raises(LabelError) as caught:
        score_job(tokenizer, "Q", ["a", "x"], ["Y"])
    assert caught.value.param == "items[1]"


def test_a_long_prompt_is_refused_and_never_cut():
    with pytest.raises(ContextLengthError, match=r"items\[1\] makes a prompt of 7 tokens, the limit is 6"):
        score_job(TOKENIZER, "Q: ", ["a", "bcd"], ["Y"], max_model_len=6)
