"""What never reaches the queue."""

from dataclasses import replace

import numpy as np
import pytest

from jprefill.config import EngineConfig
from jprefill.errors import ContextLengthError, InvalidRequestError, UnsupportedFeatureError
from jprefill.scheduler.admission import check
from jprefill.types import ClassHead, Item, ScoreRequest


def ints(*values):
    return np.array(values, np.int32)


GOOD = Item(ints(1, 2, 3), ints(2), ints(7, 8).reshape(1, 2))
EMPTY = np.zeros(0, np.int32)

EVIL = ints(7, 50).reshape(1, 2)

BAD = {
    "no items": (ScoreRequest(EMPTY, ()), "at least one item", "items"),
    "too many items": (ScoreRequest(EMPTY, (GOOD,) * 5), "5 items, the limit is 4", "items"),
    "empty item": (ScoreRequest(ints(1), (replace(GOOD, token_ids=EMPTY),)), "at least one token", "items[0]"),
    "nothing to read": (ScoreRequest(EMPTY, (GOOD, Item(ints(1), EMPTY, EMPTY.reshape(0, 1)))), "target", "items[1]"),
    "no labels": (ScoreRequest(EMPTY, (Item(ints(1), ints(0), EMPTY.reshape(1, 0)),)), "target", "items[0]"),
    "row beyond the item": (ScoreRequest(EMPTY, (replace(GOOD, rows=ints(3)),)), "0 to 2", "items[0]"),
    "negative row": (ScoreRequest(EMPTY, (replace(GOOD, rows=ints(-1)),)), "0 to 2", "items[0]"),
    "id too large": (ScoreRequest(EMPTY, (replace(GOOD, token_ids=ints(1, 50, 3)),)), "50 is out of", "items[0]"),
    "negative id in prefix": (ScoreRequest(ints(-1), (GOOD,)), "-1 is out of range: 0 to 49", "prefix"),
    "target too large": (ScoreRequest(EMPTY, (replace(GOOD, targets=EVIL),)), "50", "items[0] targets"),
    "too many labels": (
        ScoreRequest(EMPTY, (replace(GOOD, targets=np.zeros((1, 9), np.int32)),)),
        "9 labels, the limit is 8",
        "items[0]",
    ),
}  # fmt: skip


def admit(request):
    check(request, EngineConfig(max_items=4, max_labels=8), vocab_size=50, max_model_len=6)


@pytest.mark.parametrize(("request_", "message", "param"), BAD.values(), ids=BAD)
def test_bad_requests_are_refused_by_name(request_, message, param):
    with pytest.raises(InvalidRequestError, match=message) as refusal:
        admit(request_)
    assert refusal.value.param == param


def test_rows_and_targets_must_agree():
    """The records' own type check finds it in tests; a caller outside has no such net."""
    item = replace(GOOD)
    object.__setattr__(item, "rows", ints(0, 1))
    with pytest.raises(InvalidRequestError, match="2 rows but targets for 1"):
        admit(ScoreRequest(EMPTY, (item,)))


def test_the_longest_prompt_is_prefix_plus_item():
    admit(ScoreRequest(ints(1, 2, 3), (GOOD, GOOD)))
    with pytest.raises(ContextLengthError, match="7 tokens, the limit is 6") as refusal:
        admit(ScoreRequest(ints(1, 2, 3, 4), (GOOD,)))
    assert refusal.value.status == 400


CLASSES = ClassHead(tuple("abcdefghijk"), is_exclusive=True)


def classes(*ids):
    return ScoreRequest(EMPTY, (replace(GOOD, targets=ints(*ids).reshape(1, -1)),), head="classes")


def test_all_classes_may_be_read_whatever_the_limit_of_labels():
    check(classes(*range(12)), EngineConfig(max_labels=8), 50, 10, CLASSES)


def test_class_targets_end_with_the_zero_logit():
    with pytest.raises(InvalidRequestError, match="12 is out of range: 0 to 11"):
        check(classes(12), EngineConfig(), 50, 10, CLASSES)


def test_a_head_that_the_model_does_not_have_is_refused():
    with pytest.raises(UnsupportedFeatureError, match="a classifier with 11 classes"):
        check(ScoreRequest(EMPTY, (GOOD,)), EngineConfig(), 50, 10, CLASSES)
    with pytest.raises(UnsupportedFeatureError, match="no classification head"):
        check(classes(1), EngineConfig(), 50, 10)
