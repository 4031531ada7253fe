"""Decisions about a text: predicates, choices and ratings, all from one shared prefix."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np

from jprefill.errors import InvalidRequestError, UnsupportedFeatureError
from jprefill.tasks.decision_prompt import (
    ANSWER_LINE,
    PROMPT_FORMAT_VERSION,
    check_version,
    option_texts,
    question_start,
    question_text,
    read_state,
)
from jprefill.tasks.encoding import encode_all, num_settled_tokens, num_shared_chars
from jprefill.tasks.frames import to_frame
from jprefill.tasks.inputs import Ids, Text, check_length, check_text
from jprefill.tasks.job import Job
from jprefill.tasks.questions import (
    MAX_QUESTIONS,
    Choice,
    Predicate,
    Question,
    Rating,
    check_questions,
    levels_of,
    options_of,
)
from jprefill.tasks.score import ItemLabels, read_labels
from jprefill.tasks.sharing import split_prefix
from jprefill.tokenization.api import Tokenizer
from jprefill.tokenization.chat import ChatTemplate
from jprefill.tokenization.labels import letter_labels
from jprefill.types import Item, ScoreRequest, ScoreResult, Timings, Usage


@dataclass(frozen=True, slots=True)
class Replay:
    """Exact tokens of one question, to ask another engine the same thing."""

    prompt_token_ids: tuple[int, ...]
    label_token_ids: tuple[int, ...]

    def to_dict(self) -> dict[str, list[int]]:
        """As two lists."""
        return {
            "prompt_token_ids": list(self.prompt_token_ids),
            "label_token_ids": list(self.label_token_ids),
        }


@dataclass(frozen=True, slots=True)
class PredicateAnswer:
    """How probable the statement is true.

    Attributes:
      probability: of true, among true and false.
      label_mass: probability that the model answers with any of the offered letters; low means misfit.
    """

    name: str | None
    probability: float
    label_mass: float
    replay: Replay | None = None

    def to_dict(self) -> dict[str, Any]:
        """As an answer object of OpenAI's `/v1/decisions`."""
        fields = {"probability": self.probability, "label_mass": self.label_mass}
        return _answer_dict("predicate", self.name, fields, self.replay)


@dataclass(frozen=True, slots=True)
class ChoiceAnswer:
    """Which option.

    Attributes:
      choice: value of the most probable option.
      probabilities: by value, in the question's order; they sum to 1.
      confidence: probability of `choice` times `label_mass`.
    """

    name: str | None
    choice: str | bool
    probabilities: dict[str | bool, float]
    confidence: float
    label_mass: float
    replay: Replay | None = None

    def to_dict(self) -> dict[str, Any]:
        """As an answer object of OpenAI's `/v1/decisions`."""
        fields = {
            "choice": self.choice,
            "probabilities": [{"value": v, "probability": p} for v, p in self.probabilities.items()],
            "confidence": self.confidence,
            "label_mass": self.label_mass,
        }
        return _answer_dict("choice", self.name, fields, self.replay)


@dataclass(frozen=True, slots=True)
class RatingAnswer:
    """Which level.

    Attributes:
      score: expected level, 0 for the first.
      levels: their labels, from 0 upwards.
      probabilities: of the levels, in their order; they sum to 1.
      confidence: probability of the most probable level times `label_mass`.
    """

    name: str | None
    score: float
    levels: tuple[str, ...]
    probabilities: tuple[float, ...]
    confidence: float
    label_mass: float
    replay: Replay | None = None

    def to_dict(self) -> dict[str, Any]:
        """As an answer object of OpenAI's `/v1/decisions`."""
        pairs = zip(self.levels, self.probabilities, strict=True)
        fields = {
            "score": self.score,
            "probabilities": [{"value": i, "label": label, "probability": p} for i, (label, p) in enumerate(pairs)],
            "confidence": self.confidence,
            "label_mass": self.label_mass,
        }
        return _answer_dict("score", self.name, fields, self.replay)


Answer = PredicateAnswer | ChoiceAnswer | RatingAnswer
CacheMode = Literal["implicit", "explicit"]
# What stands for the rest of another message when two are compared: no text of ours or a caller's starts with it.
_OTHER_TEXT = "\ue000"
_NO_TEMPLATE = (
    "this model has no chat template, which decisions need: put a chat_template.jinja or a "
    "chat_template in tokenizer_config.json next to its tokenizer, or use score with your own prompt"
)


@dataclass(frozen=True, slots=True)
class Decisions:
    """The answer to a decision request; `answers` in the order of the questions."""

    answers: tuple[Answer, ...]
    usage: Usage
    timings: Timings
    prompt_format_version: int = PROMPT_FORMAT_VERSION

    def __getitem__(self, name: str) -> Answer:
        """The answer to the question called `name`.

        Raises:
          KeyError: no question had this name.
        """
        for answer in self.answers:
            if answer.name == name:
                return answer
        raise KeyError(name)

    def to_dicts(self) -> list[dict[str, Any]]:
        """One answer object per question, as in OpenAI's `/v1/decisions`."""
        return [answer.to_dict() for answer in self.answers]

    def to_pandas(self) -> Any:
        """A data frame with one row per option of each question.

        Raises:
          ImportError: pandas is not installed.
        """
        return to_frame([row for i, answer in enumerate(self.answers) for row in _rows(i, answer)])


def decide_job(
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
    input: Text | Sequence[Mapping[str, Any]],
    questions: Sequence[Question | Mapping[str, Any]] | Any,
    *,
    return_prompt_token_ids: bool = False,
    prompt_format_version: int | Any = None,
    max_questions: int = MAX_QUESTIONS,
    max_model_len: int | None = None,
    salt: Text = "",
    mark_prefix: bool = False,
    cache_mode: CacheMode | Any = "implicit",
    deadline_s: float | None = None,
) -> Job[Decisions]:
    """Asks the model all questions about `input`; the input is computed once.

    Each question is its own prompt: the input, the question, its options with letters, in one user message.

    Args:
      chat_template: how the model wants a user message written; None is refused.
      input: a text, or user messages with text parts.
      questions: records, or mappings in OpenAI's shape.
      return_prompt_token_ids: answers carry their `Replay`.
      prompt_format_version: pins the wording; None takes ours.
      max_questions: of one request.
      max_model_len: longest prompt in tokens; None leaves the check to the engine.
      salt: separates tenants in the prefix store.
      mark_prefix: the input will come again with other questions: its KV is kept. Cache breakpoints in its parts say
        more closely up to where.
      cache_mode: `explicit` leaves the prefix store alone unless a part has a cache breakpoint.
      deadline_s: on the monotonic clock.

    Raises:
      InvalidRequestError: a field is malformed; `param` names it, like `questions[2].choices`.
      UnsupportedFeatureError: no chat template, or a kind of content or question that is not served.
      ContextLengthError: a prompt is longer than `max_model_len`.
    """
    check_version(prompt_format_version)
    _check_cache_mode(cache_mode)
    if chat_template is None:
        raise UnsupportedFeatureError(_NO_TEMPLATE)
    state = read_state(input)
    checked = check_questions(questions, max_questions)
    ending = _render(chat_template, ANSWER_LINE)
    labels = [_labels(tokenizer, ending, question, i) for i, question in enumerate(checked)]
    label_ids = [ids for _, ids in labels]
    texts = [
        _render(chat_template, question_text(state.text, question, letters))
        for question, (letters, _) in zip(checked, labels, strict=True)
    ]
    prompts = encode_all(tokenizer, texts, add_bos=False)  # the template writes BOS where it belongs
    for i, prompt in enumerate(prompts):
        check_length(len(prompt), max_model_len, f"questions[{i}]")
    pairs = zip(prompts, label_ids, strict=True)
    replays = [_replay(p, ids) if return_prompt_token_ids else None for p, ids in pairs]
    count = partial(_num_shared_tokens, tokenizer, chat_template, texts[0], prompts[0])
    num_state = count(question_start(state.text)) if mark_prefix or len(prompts) == 1 else 0
    num_marked = num_state if mark_prefix else 0
    if state.num_marked_chars:
        num_marked = count(state.text[: state.num_marked_chars])
    request = _request(
        prompts,
        label_ids,
        num_state,
        deadline_s=deadline_s,
        salt=check_text(salt, "salt", may_be_empty=True),
        uses_store=cache_mode == "implicit" or state.num_marked_chars > 0,
        num_marked_tokens=num_marked,
    )
    return Job((request,), _finisher(checked, label_ids, replays))


def _check_cache_mode(mode: Any) -> None:
    if mode not in get_args(CacheMode):
        allowed = ", ".join(map(repr, get_args(CacheMode)))
        raise InvalidRequestError(f"cache_mode={mode!r}: allowed are {allowed}", param="cache_mode")


def _num_shared_tokens(tokenizer: Tokenizer, chat_template: ChatTemplate, text: str, prompt: Ids, start: str) -> int:
    """Leading tokens of a prompt that every prompt has whose message begins with `start`."""
    num_chars = num_shared_chars([text, _render(chat_template, start + _OTHER_TEXT)])
    return num_settled_tokens(tokenizer, text, prompt, num_chars, add_bos=False)


def _render(chat_template: ChatTemplate, text: str) -> str:
    try:
        return chat_template.render([{"role": "user", "content": text}], add_generation_prompt=True)
    except InvalidRequestError as error:  # a caller sent an input, not messages
        raise type(error)(error.message, param="input") from None


def _labels(tokenizer: Tokenizer, ending: str, question: Question, i: int) -> tuple[tuple[str, ...], Ids]:
    """Letters and their ids. Every prompt ends like the short `ending`, so they are the same tokens there."""
    count = len(option_texts(question))
    try:
        letters, ids = letter_labels(tokenizer, count, ending)
    except InvalidRequestError as error:
        key = {Choice: ".choices", Rating: ".levels"}.get(type(question), "")
        raise type(error)(error.message, param=f"questions[{i}]{key}") from None
    return tuple(letters), np.asarray(ids, np.int32)


def _replay(prompt: Ids, label_ids: Ids) -> Replay:
    return Replay(tuple(prompt.tolist()), tuple(label_ids.tolist()))


def _request(prompts: Sequence[Ids], label_ids: Sequence[Ids], num_reusable: int, **options: Any) -> ScoreRequest:
    prefix, suffixes = split_prefix(prompts, num_reusable)
    items = tuple(
        Item(token_ids=ids, rows=np.array([len(ids) - 1], np.int32), targets=targets[None])
        for ids, targets in zip(suffixes, label_ids, strict=True)
    )
    return ScoreRequest(prefix, items, **options)


def _finisher(
    questions: Sequence[Question], label_ids: Sequence[Ids], replays: Sequence[Replay | None]
) -> Callable[[Sequence[ScoreResult]], Decisions]:
    def finish(results: Sequence[ScoreResult]) -> Decisions:
        result = results[0]
        reads = [read_labels(scores, ids) for scores, ids in zip(result.items, label_ids, strict=True)]
        answers = tuple(map(_answer, questions, reads, replays))
        return Decisions(answers=answers, usage=result.usage, timings=result.timings)

    return finish


def _answer(question: Question, read: ItemLabels, replay: Replay | None) -> Answer:
    p, mass = read.probabilities, read.label_mass
    if isinstance(question, Predicate):
        return PredicateAnswer(question.name, p[1], mass, replay)
    top = p.index(max(p))
    if isinstance(question, Choice):
        values = [option.value for option in options_of(question)]
        by_value = dict(zip(values, p, strict=True))
        return ChoiceAnswer(question.name, values[top], by_value, p[top] * mass, mass, replay)
    levels = tuple(level.label for level in levels_of(question))
    score = sum(i * probability for i, probability in enumerate(p))
    return RatingAnswer(question.name, score, levels, p, p[top] * mass, mass, replay)


def _answer_dict(kind: str, name: str | None, fields: Mapping[str, Any], replay: Replay | None) -> dict[str, Any]:
    return {"type": kind, "name": name, **fields, **(replay.to_dict() if replay else {})}


def _rows(i: int, answer: Answer) -> list[dict[str, Any]]:
    """Rows of the data frame: question, name, type, option, probability, label_mass."""
    if isinstance(answer, PredicateAnswer):
        kind, pairs = "predicate", [(False, 1 - answer.probability), (True, answer.probability)]
    elif isinstance(answer, ChoiceAnswer):
        kind, pairs = "choice", list(answer.probabilities.items())
    else:
        kind, pairs = "score", list(zip(answer.levels, answer.probabilities, strict=True))
    head = {"question": i, "name": answer.name, "type": kind}
    return [{**head, "option": o, "probability": p, "label_mass": answer.label_mass} for o, p in pairs]
