"""Classification with an engine that answers from a hash of the tokens that are read."""

import json

import numpy as np
import pytest
from fakes import BOS_ID, EOS_ID, ByteTokenizer, FakeEngine, next_token_logprobs

from jprefill.errors import ContextLengthError, InvalidRequestError, UnsupportedFeatureError
from jprefill.scorer import Scorer
from jprefill.tasks.classify import classify_job, read_classes
from jprefill.types import ClassHead, ItemScores

HEAD = ClassHead(("spam", "ham", "other"), is_exclusive=True)
TOKENIZER = ByteTokenizer()


def classify(texts, head=HEAD, **options):
    with FakeEngine(class_head=head) as engine:
        return Scorer(engine, TOKENIZER).classify(texts, **options)


def prompts(texts, head=HEAD, **options):
    (request,) = classify_job(TOKENIZER, head, texts, **options).requests
    return [[*request.prefix.tolist(), *item.token_ids.tolist()] for item in request.items]


def scores(*logits):
    """What the class head says: log-softmax over the logits and a zero."""
    row = np.array([*logits, 0.0], np.float32)
    row -= np.log(np.exp(row.astype(np.float64)).sum()).astype(np.float32)
    return ItemScores(row[None], np.array([row.argmax()], np.int32), row.max(keepdims=True))


def test_probabilities_are_a_softmax_over_the_classes():
    result = classify(["Buy now!", "Buy bread."])
    assert result.class_names == HEAD.names
    for text, item in zip(("Buy now!", "Buy bread."), result.items, strict=True):
        row = next_token_logprobs(TOKENIZER.encode(text, add_bos=True), 264)
        np.testing.assert_allclose(item.logits, row[:3] - row[3], atol=1e-5)
        weights = np.exp(row[:3])
        np.testing.assert_allclose(item.probabilities, weights / weights.sum(), atol=1e-5)
        assert item.top_class == HEAD.names[int(row[:3].argmax())]


def test_a_request_reads_every_class_and_the_zero_logit_at_the_last_token():
    (request,) = classify_job(TOKENIZER, HEAD, ["spam A", "spam BC"]).requests
    assert request.head == "classes"
    assert request.prefix.tolist() == TOKENIZER.encode("spam ", add_bos=True)
    assert [item.rows.tolist() for item in request.items] == [[0], [1]]
    assert [item.targets.tolist() for item in request.items] == [[[0, 1, 2, 3]]] * 2


def test_bos_and_token_ids_are_as_in_other_tasks():
    assert prompts(["a"]) == [[BOS_ID, 97]]
    assert prompts(["a"], add_bos=False) == [[97]]
    assert prompts([[1, 2], (3,)]) == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("token_ids", "read"),
    [([1, 2, EOS_ID, EOS_ID], [1, 2]), ([EOS_ID, 1], [EOS_ID, 1]), ([EOS_ID, EOS_ID], [EOS_ID]), ([1], [1])],
)
def test_padding_at_the_end_is_not_read(token_ids, read):
    assert prompts([token_ids], ClassHead(("a", "b"), True, pad_id=EOS_ID)) == [read]


def test_large_logits_come_back_exactly_enough():
    item = read_classes(scores(60.0, -60.0, 1.5), HEAD)
    np.testing.assert_allclose(item.logits, [60.0, -60.0, 1.5], atol=2e-5)
    assert item.probabilities == pytest.approx((1.0, 0.0, 0.0))


def test_one_class_is_a_score_with_its_sigmoid():
    item = read_classes(scores(-1.25), ClassHead(("LABEL_0",), is_exclusive=False))
    assert item.logits == pytest.approx((-1.25,), abs=1e-6)
    assert item.probabilities == pytest.approx((1 / (1 + np.exp(1.25)),), abs=1e-6)


def test_classes_that_are_not_exclusive_have_a_sigmoid_each():
    item = read_classes(scores(2.0, 3.0), ClassHead(("angry", "loud"), is_exclusive=False))
    assert item.probabilities == pytest.approx((1 / (1 + np.exp(-2)), 1 / (1 + np.exp(-3))), abs=1e-6)
    assert item.top_class == "loud"


def test_records_are_plain():
    result = classify(["a", "b"])
    first, second = json.loads(json.dumps(result.to_dicts()))
    assert (first["item"], second["item"], first["class_names"]) == (0, 1, ["spam", "ham", "other"])
    assert first["probabilities"] == list(result.items[0].probabilities)


def test_a_frame_has_a_column_per_class():
    pytest.importorskip("pandas")
    frame = classify(["a", "b"]).to_pandas()
    assert list(frame)[1:4] == ["probability.spam", "probability.ham", "probability.other"]
    assert len(frame) == 2


@pytest.mark.parametrize(
    ("texts", "message", "param"),
    [
        ([], "must not be empty", "texts"),
        ("spam", "must be a list", "texts"),
        (["a", [1]], "send one kind", "texts[1]"),
        ([[1], []], "has no token", "texts[1]"),
        ([[1, 9999]], "9999", "texts[0]"),
        (["\ud800"], "surrogate", "texts[0]"),
    ],
)
def test_bad_texts_are_refused_by_name(texts, message, param):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        classify_job(TOKENIZER, HEAD, texts)
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)


def test_a_long_text_is_refused_never_cut():
    with pytest.raises(ContextLengthError, match=r"texts\[1\] makes a prompt of 6 tokens, the limit is 5"):
        classify_job(TOKENIZER, HEAD, ["abc", "abcde"], max_model_len=5)


def test_a_model_without_classes_is_named():
    with pytest.raises(UnsupportedFeatureError, match="no classification head"):
        classify(["a"], head=None)
