"""Checks of decision questions: OpenAI's JSON objects and our records are the same thing."""

import pytest

from jprefill.errors import InvalidRequestError, UnsupportedFeatureError
from jprefill.tasks.questions import Choice, Level, Option, Predicate, Rating, check_questions


def choice(choices, **fields):
    return {"type": "choice", "instructions": "Which?", "choices": choices, **fields}


def score(levels, **fields):
    return {"type": "score", "instructions": "How?", "levels": levels, **fields}


def refusal(*questions) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        check_questions(list(questions))
    return caught.value


def test_objects_and_records_are_the_same():
    objects = [
        {"type": "predicate", "instructions": "It is late.", "name": "late"},
        choice([{"value": "a", "description": "first"}, {"value": True}], name=None),
        score([{"label": "low"}, {"label": "high", "description": ""}]),
    ]
    records = [
        Predicate("It is late.", name="late"),
        Choice("Which?", [Option("a", "first"), True]),
        Rating("How?", ["low", Level("high")]),
    ]
    expected = (
        Predicate("It is late.", "late"),
        Choice("Which?", (Option("a", "first"), Option(True))),
        Rating("How?", (Level("low"), Level("high"))),
    )
    assert check_questions(objects) == expected
    assert check_questions(records) == expected


def test_true_and_the_text_true_are_distinct_values():
    (question,) = check_questions([choice([{"value": "true"}, {"value": True}])])
    assert [option.value for option in question.choices] == ["true", True]


def test_the_limits_themselves_are_allowed():
    check_questions([choice([{"value": str(i)} for i in range(255)])])
    check_questions([score([{"label": str(i)} for i in range(10)])])
    check_questions([Predicate("It is.")] * 400)


@pytest.mark.parametrize(
    ("question", "param", "text"),
    [
        (choice([{"value": "a"}]), "choices", "has 1 entries: allowed are 2 to 255"),
        (choice([{"value": str(i)} for i in range(256)]), "choices", "has 256 entries"),
        (choice([]), "choices", "must not be empty"),
        (choice("ab"), "choices", "must be a list, got str"),
        (choice(None), "choices", "has no choices"),
        (choice([{"value": "a"}, {"value": "a"}]), "choices", "values must be distinct"),
        (choice([{"value": "a"}, {"value": 1}]), "choices[1].value", "a string or a boolean, got int"),
        (choice([{"value": "a"}, {"value": ""}]), "choices[1].value", "must not be empty"),
        (choice([{"value": "a"}, {}]), "choices[1].value", "has no value"),
        (choice([{"value": "a"}, {"value": "b", "x": 1}]), "choices[1].x", "unknown key 'x'"),
        (choice([{"value": "a"}, {"value": "b", "description": 3}]), "choices[1].description", "a string"),
        (choice(["a", "\ud800"]), "choices[1].value", "lone surrogate"),
        (score([{"label": "a"}]), "levels", "has 1 entries: allowed are 2 to 10"),
        (score([{"label": str(i)} for i in range(11)]), "levels", "has 11 entries"),
        (score([{"label": "a"}, {"label": ""}]), "levels[1].label", "must not be empty"),
        (score([{"label": "a"}, {"label": 2}]), "levels[1].label", "must be a string, got int"),
        (score([{"label": "a"}, {"value": 2}]), "levels[1].value", "unknown key 'value'"),
        ({"type": "predicate"}, "instructions", "has no instructions"),
        ({"type": "predicate", "instructions": ""}, "instructions", "must not be empty"),
        ({"type": "predicate", "instructions": " \n"}, "instructions", "must not be blank"),
        ({"type": "predicate", "instructions": 5}, "instructions", "must be a string, got int"),
        ({"type": "predicate", "instructions": "\ud800"}, "instructions", "lone surrogate"),
        ({"type": "predicate", "instructions": "x", "name": 5}, "name", "must be a string, got int"),
        ({"type": "predicate", "instructions": "x", "choices": []}, "choices", "unknown key 'choices'"),
        ({"instructions": "x"}, "type", "has no type"),
    ],
)
def test_bad_questions_get_one_clear_error_with_a_path(question, param, text):
    error = refusal(Predicate("It is."), question)
    assert error.param == f"questions[1].{param}"
    assert text in error.message


@pytest.mark.parametrize("kind", ["box", "yes_no", 3, []])
def test_unknown_types_are_named(kind):
    error = refusal({"type": kind, "instructions": "x"})
    assert isinstance(error, UnsupportedFeatureError)
    assert error.param == "questions[0].type"
    assert "'predicate', 'choice' and 'score' are" in error.message


@pytest.mark.parametrize(
    ("questions", "text"),
    [
        ([], "must not be empty"),
        ("x", "must be a list"),
        (None, "must be a list"),
        ([Predicate("x")] * 401, "has 401 entries: allowed are 1 to 400"),
    ],
)
def test_the_list_itself_is_checked(questions, text):
    with pytest.raises(InvalidRequestError, match=text) as caught:
        check_questions(questions)
    assert caught.value.param == "questions"


@pytest.mark.parametrize("question", ["It is late.", 3, None])
def test_a_question_is_a_record_or_an_object(question):
    assert refusal(question).param == "questions[0]"
