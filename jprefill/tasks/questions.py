"""Questions of a decision request: predicate, choice, rating; as records or as OpenAI's JSON objects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jprefill.errors import InvalidRequestError, UnsupportedFeatureError
from jprefill.tasks.inputs import check_list, check_text

MAX_QUESTIONS = 400
MAX_CHOICES = 255
MAX_LEVELS = 10


@dataclass(frozen=True, slots=True)
class Option:
    """One allowed answer of a `Choice`; `description` helps the model, `value` comes back."""

    value: str | bool
    description: str | None = None


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a `Rating`, from the lowest (0) upwards."""

    label: str
    description: str | None = None


@dataclass(frozen=True, slots=True)
class Predicate:
    """How probable is it that this statement is true?"""

    instructions: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """Which of these options? A plain string or bool in `choices` stands for `Option(value)`."""

    instructions: str
    choices: Sequence[Option | str | bool]
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Rating:
    """Which level of this ordered scale? A plain string in `levels` stands for `Level(label)`."""

    instructions: str
    levels: Sequence[Level | str]
    name: str | None = None


Question = Predicate | Choice | Rating


def options_of(choice: Choice) -> tuple[Option, ...]:
    """The choices as records."""
    return tuple(option if isinstance(option, Option) else Option(option) for option in choice.choices)


def levels_of(rating: Rating) -> tuple[Level, ...]:
    """The levels as records."""
    return tuple(level if isinstance(level, Level) else Level(level) for level in rating.levels)


_KEYS = {
    "predicate": {"type", "instructions", "name"},
    "choice": {"type", "instructions", "name", "choices"},
    "score": {"type", "instructions", "name", "levels"},
}


def check_questions(questions: Any, maximum: int = MAX_QUESTIONS) -> tuple[Question, ...]:
    """Checks every question; what comes back holds only `Option` and `Level` records.

    Args:
      questions: records, or mappings in OpenAI's shape: `{"type": "predicate", "instructions": ...}`.
      maximum: questions of one request.

    Raises:
      InvalidRequestError: what is wrong; `param` is a path like `questions[2].choices`.
      UnsupportedFeatureError: a question type that is not served.
    """
    questions = check_list(questions, "questions", maximum=maximum)
    return tuple(_check_question(question, f"questions[{i}]") for i, question in enumerate(questions))


def _check_question(question: Any, param: str) -> Question:
    fields = question if isinstance(question, Mapping) else _as_mapping(question, param)
    kind = _check_kind(fields, param)
    _check_keys(fields, _KEYS[kind], param)
    instructions = check_text(_required(fields, "instructions", param), f"{param}.instructions")
    if not instructions.strip():
        raise InvalidRequestError(f"{param}.instructions must not be blank", param=f"{param}.instructions")
    name = fields.get("name")
    if name is not None:
        check_text(name, f"{param}.name", may_be_empty=True)
    if kind == "predicate":
        return Predicate(instructions, name)
    if kind == "choice":
        return Choice(instructions, _check_options(_required(fields, "choices", param), f"{param}.choices"), name)
    return Rating(instructions, _check_levels(_required(fields, "levels", param), f"{param}.levels"), name)


def _as_mapping(question: Any, param: str) -> Mapping[str, Any]:
    """A record as the object that says the same."""
    head = {"instructions": getattr(question, "instructions", None), "name": getattr(question, "name", None)}
    if isinstance(question, Predicate):
        return {"type": "predicate", **head}
    if isinstance(question, Choice):
        return {"type": "choice", **head, "choices": question.choices}
    if isinstance(question, Rating):
        return {"type": "score", **head, "levels": question.levels}
    raise InvalidRequestError(
        f"{param} must be a Predicate, Choice or Rating, or an object with a type, got {type(question).__name__}",
        param=param,
    )


def _check_kind(fields: Mapping[str, Any], param: str) -> str:
    kind = fields.get("type")
    if kind is None:
        raise InvalidRequestError(f"{param} has no type: send 'predicate', 'choice' or 'score'", param=f"{param}.type")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise UnsupportedFeatureError(
            f"{param}.type={kind!r} is not served: 'predicate', 'choice' and 'score' are",
            param=f"{param}.type",
        )
    return kind


def _check_keys(fields: Mapping[str, Any], known: set[str], param: str) -> None:
    if unknown := [key for key in fields if key not in known]:
        raise InvalidRequestError(
            f"{param} has an unknown key {unknown[0]!r}: known are {', '.join(sorted(known))}",
            param=f"{param}.{unknown[0]}",
        )


def _required(fields: Mapping[str, Any], key: str, param: str) -> Any:
    if fields.get(key) is None:
        raise InvalidRequestError(f"{param} has no {key}", param=f"{param}.{key}")
    return fields[key]


def _check_options(options: Any, param: str) -> tuple[Option, ...]:
    options = check_list(options, param, minimum=2, maximum=MAX_CHOICES)
    checked = tuple(_check_option(option, f"{param}[{i}]") for i, option in enumerate(options))
    seen: dict[tuple[type, str | bool], int] = {}  # "true" is not True
    for i, option in enumerate(checked):
        first = seen.setdefault((type(option.value), option.value), i)
        if first != i:
            raise InvalidRequestError(
                f"{param}[{i}].value repeats {option.value!r} of {param}[{first}]: values must be distinct",
                param=param,
            )
    return checked


def _check_option(option: Any, param: str) -> Option:
    if isinstance(option, Mapping):
        _check_keys(option, {"value", "description"}, param)
        value, description = _required(option, "value", param), option.get("description")
    elif isinstance(option, Option):
        value, description = option.value, option.description
    else:
        value, description = option, None
    if not isinstance(value, bool):
        if not isinstance(value, str):
            raise InvalidRequestError(
                f"{param}.value must be a string or a boolean, got {type(value).__name__}",
                param=f"{param}.value",
            )
        check_text(value, f"{param}.value")
    return Option(value, _check_description(description, param))


def _check_levels(levels: Any, param: str) -> tuple[Level, ...]:
    levels = check_list(levels, param, minimum=2, maximum=MAX_LEVELS)
    return tuple(_check_level(level, f"{param}[{i}]") for i, level in enumerate(levels))


def _check_level(level: Any, param: str) -> Level:
    if isinstance(level, Mapping):
        _check_keys(level, {"label", "description"}, param)
        label, description = _required(level, "label", param), level.get("description")
    elif isinstance(level, Level):
        label, description = level.label, level.description
    else:
        label, description = level, None
    return Level(check_text(label, f"{param}.label"), _check_description(description, param))


def _check_description(description: Any, param: str) -> str | None:
    if description is None:
        return None
    return check_text(description, f"{param}.description", may_be_empty=True) or None
