"""Decisions: the exact prompt, the shared state, and answers that follow from label probabilities."""

import json

import numpy as np
import pytest
from fakes import ByteTokenizer, FakeEngine, next_token_logprobs

from jprefill.errors import ContextLengthError, InvalidRequestError, UnsupportedFeatureError
from jprefill.tasks.decide import Decisions, decide_job
from jprefill.tasks.questions import Choice, Level, Option, Predicate, Rating
from jprefill.tokenization.chat import ChatTemplate

TOKENIZER = ByteTokenizer()
STATE = "Order 1042 is five days late. The customer asks for a refund."
QUESTIONS = [
    Predicate("The message needs an answer today.", name="urgent"),
    Choice("Which team should handle it?", [Option("billing", "payments and refunds"), "delivery"], name="team"),
    Rating("How upset is the customer?", ["calm", Level("annoyed", "a bit"), "angry"], name="tone"),
]

# Version 1 of the wording. A failure here means: raise PROMPT_FORMAT_VERSION, or undo the change.
GOLDEN = [
    "<s><|user|>Order 1042 is five days late. The customer asks for a refund.\n\n"
    "Question: The message needs an answer today.\n"
    "A: false\n"
    "B: true\n"
    "Answer with the letter of one option only.<|end|><|assistant|>",
    "<s><|user|>Order 1042 is five days late. The customer asks for a refund.\n\n"
    "Question: Which team should handle it?\n"
    'A: "billing" - payments and refunds\n'
    'B: "delivery"\n'
    "Answer with the letter of one option only.<|end|><|assistant|>",
    "<s><|user|>Order 1042 is five days late. The customer asks for a refund.\n\n"
    "Question: How upset is the customer?\n"
    "A: calm\n"
    "B: annoyed - a bit\n"
    "C: angry\n"
    "Answer with the letter of one option only.<|end|><|assistant|>",
]


def template(tokenizer: ByteTokenizer = TOKENIZER) -> ChatTemplate | None:
    return ChatTemplate.from_tokenizer(tokenizer)


def run(input, questions, tokenizer=TOKENIZER, **options) -> Decisions:
    job = decide_job(tokenizer, template(tokenizer), input, questions, **options)
    with FakeEngine(vocab_size=tokenizer.vocab_size) as engine:
        return job.finish([engine.submit(request).result(10) for request in job.requests])


def prompts(input, questions, tokenizer=TOKENIZER) -> list[str]:
    (request,) = decide_job(tokenizer, template(tokenizer), input, questions).requests
    return [tokenizer.decode([*request.prefix.tolist(), *item.token_ids.tolist()]) for item in request.items]


# ---- prompts


def test_the_wording_is_version_1():
    assert prompts(STATE, QUESTIONS) == GOLDEN
    assert run(STATE, QUESTIONS).prompt_format_version == 1


def test_all_questions_share_the_state():
    (request,) = decide_job(TOKENIZER, template(), STATE, QUESTIONS, salt="s", deadline_s=9.0).requests
    assert TOKENIZER.decode(request.prefix.tolist()) == f"<s><|user|>{STATE}\n\nQuestion: "
    assert [item.targets.tolist() for item in request.items] == [[[65, 66]], [[65, 66]], [[65, 66, 67]]]
    assert (request.salt, request.deadline_s) == ("s", 9.0)


def test_choice_values_are_written_as_json():
    (prompt,) = prompts("x", [Choice("Which?", ["true", True, 'say "é"'])])
    assert 'A: "true"\nB: true\nC: "say \\"é\\""\n' in prompt


def test_messages_are_joined_to_one_state():
    messages = [
        {"role": "user", "content": "one"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "two"}] * 2},
    ]
    (prompt,) = prompts(messages, [Predicate("x")])
    assert prompt.startswith("<s><|user|>one\n\ntwo\ntwo\n\nQuestion: x\n")


def test_more_than_26_options_get_two_letters():
    pairs = [a + b for a in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" for b in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
    tokenizer = ByteTokenizer(merges=pairs)
    decisions = run("x", [Choice("Which?", [f"v{i}" for i in range(40)])], tokenizer, return_prompt_token_ids=True)
    (answer,) = decisions.answers
    assert len(answer.probabilities) == 40
    assert len(set(answer.replay.label_token_ids)) == 40


def test_more_options_than_labels_is_refused_with_the_path():
    with pytest.raises(InvalidRequestError, match="40 options, but only 0") as caught:
        decide_job(TOKENIZER, template(), "x", [Predicate("y"), Choice("Which?", [f"v{i}" for i in range(40)])])
    assert caught.value.param == "questions[1].choices"


# ---- answers


def test_answers_follow_from_the_label_probabilities():
    decisions = run(STATE, QUESTIONS)
    expected = []
    for text, count in zip(GOLDEN, (2, 2, 3), strict=True):
        row = next_token_logprobs(TOKENIZER.encode(text, add_bos=False), TOKENIZER.vocab_size)
        expected.append(np.exp(row[65 : 65 + count]))
    (predicate, choice, rating), masses = decisions.answers, [e.sum() for e in expected]
    shares = [e / e.sum() for e in expected]

    assert predicate.probability == pytest.approx(shares[0][1], abs=1e-6)
    assert choice.probabilities == pytest.approx(dict(zip(["billing", "delivery"], shares[1], strict=True)), abs=1e-6)
    assert choice.choice == ["billing", "delivery"][shares[1].argmax()]
    assert choice.confidence == pytest.approx(shares[1].max() * masses[1], abs=1e-6)
    assert rating.probabilities == pytest.approx(tuple(shares[2]), abs=1e-6)
    assert rating.score == pytest.approx(shares[2] @ [0, 1, 2], abs=1e-6)
    assert rating.levels == ("calm", "annoyed", "angry")
    assert rating.confidence == pytest.approx(shares[2].max() * masses[2], abs=1e-6)
    assert [a.label_mass for a in decisions.answers] == pytest.approx(masses, abs=1e-6)
    assert [a.name for a in decisions.answers] == ["urgent", "team", "tone"]
    assert decisions.usage.num_prompt_tokens == sum(len(TOKENIZER.encode(t, add_bos=False)) for t in GOLDEN)


def test_an_answer_is_found_by_its_name():
    decisions = run(STATE, QUESTIONS)
    assert decisions["team"] is decisions.answers[1]
    with pytest.raises(KeyError):
        decisions["nobody"]


def test_objects_give_the_same_answers_as_records():
    objects = [
        {"type": "predicate", "name": "urgent", "instructions": "The message needs an answer today."},
        {
            "type": "choice",
            "name": "team",
            "instructions": "Which team should handle it?",
            "choices": [{"value": "billing", "description": "payments and refunds"}, {"value": "delivery"}],
        },
        {
            "type": "score",
            "name": "tone",
            "instructions": "How upset is the customer?",
            "levels": [{"label": "calm"}, {"label": "annoyed", "description": "a bit"}, {"label": "angry"}],
        },
    ]
    assert run(STATE, objects).answers == run(STATE, QUESTIONS).answers


def test_records_have_the_shape_of_the_openai_answers():
    predicate, choice, score = json.loads(json.dumps(run(STATE, QUESTIONS).to_dicts(), allow_nan=False))
    assert set(predicate) == {"type", "name", "probability", "label_mass"}
    assert set(choice) == {"type", "name", "choice", "probabilities", "confidence", "label_mass"}
    assert [set(p) for p in choice["probabilities"]] == [{"value", "probability"}] * 2
    assert [p["value"] for p in score["probabilities"]] == [0, 1, 2]
    assert [p["label"] for p in score["probabilities"]] == ["calm", "annoyed", "angry"]
    assert [a["type"] for a in (predicate, choice, score)] == ["predicate", "choice", "score"]


def test_token_ids_are_echoed_for_replay_when_asked():
    decisions = run(STATE, QUESTIONS, return_prompt_token_ids=True)
    for answer, text in zip(decisions.answers, GOLDEN, strict=True):
        record = answer.to_dict()
        assert record["prompt_token_ids"] == TOKENIZER.encode(text, add_bos=False)
        assert record["label_token_ids"][:2] == [65, 66]


# ---- refusals


@pytest.mark.parametrize(
    ("input", "param", "text"),
    [
        ("", "input", "must not be empty"),
        ([], "input", "must not be empty"),
        (None, "input", "must be a list, got NoneType"),
        (7, "input", "must be a list, got int"),
        ("a\ud800", "input", "lone surrogate"),
        (["x"], "input[0]", "must be an object with role and content"),
        ([{"role": "user"}], "input[0].content", "must be a list, got NoneType"),
        ([{"role": "user", "content": []}], "input[0].content", "must not be empty"),
        ([{"role": "user", "content": ""}], "input", "must not be empty"),
        ([{"role": "user", "content": "\ud800"}], "input[0].content", "lone surrogate"),
        ([{"role": "user", "content": "x", "id": 1}], "input[0].id", "unknown key 'id'"),
        ([{"role": "user", "content": ["x"]}], "input[0].content[0]", "object with type and text"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text", "a string"),
    ],
)
def test_bad_input_gets_one_clear_error(input, param, text):
    with pytest.raises(InvalidRequestError) as caught:
        decide_job(TOKENIZER, template(), input, [Predicate("x")])
    assert caught.value.param == param
    assert text in caught.value.message


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "system", "content": "x"}, "input[1].role"),
        ({"role": "assistant", "content": "x"}, "input[1].role"),
        ({"content": "x"}, "input[1].role"),
        ({"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}, "input[1].type"),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
            "input[1].content[0].type",
        ),
        (
            {"role": "user", "content": [{"type": "input_text", "text": "x", "detail": "high"}]},
            "input[1].content[0].detail",
        ),
    ],
)
def test_content_that_is_not_served_is_named(message, param):
    with pytest.raises(UnsupportedFeatureError, match="is not served") as caught:
        decide_job(TOKENIZER, template(), [{"role": "user", "content": "x"}, message], [Predicate("x")])
    assert caught.value.param == param


def test_without_a_chat_template_the_error_says_how_to_give_one():
    with pytest.raises(UnsupportedFeatureError, match=r"chat_template\.jinja"):
        decide_job(TOKENIZER, None, "x", [Predicate("y")])


@pytest.mark.parametrize("version", [0, 2, "1", True])
def test_another_wording_is_refused(version):
    with pytest.raises(InvalidRequestError, match="writes version 1") as caught:
        decide_job(TOKENIZER, template(), "x", [Predicate("y")], prompt_format_version=version)
    assert caught.value.param == "prompt_format_version"
    decide_job(TOKENIZER, template(), "x", [Predicate("y")], prompt_format_version=1)


def test_limits_name_the_question():
    with pytest.raises(ContextLengthError, match=r"questions\[1\] makes a prompt of \d+ tokens, the limit is 120"):
        decide_job(TOKENIZER, template(), "x", [Predicate("y"), Predicate("y" * 60)], max_model_len=120)
    with pytest.raises(InvalidRequestError, match="2 entries: allowed are 1 to 1"):
        decide_job(TOKENIZER, template(), "x", [Predicate("y")] * 2, max_questions=1)
