"""The exact words of a decision prompt. A change of one character here is a new `PROMPT_FORMAT_VERSION`.

    Order 1042 is five days late.             <- the state first, so that all questions share it

    Question: Which team should handle it?
    A: "billing" - payments and refunds       <- choice values as JSON: "true" is not true
    B: "delivery"
    Answer with the letter of one option only.

Wording and order follow vLLM's `/v1/decisions`, so that scores can be compared.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jprefill.errors import InvalidRequestError, UnsupportedFeatureError
from jprefill.tasks.inputs import Text, check_list, check_text
from jprefill.tasks.questions import Choice, Predicate, Question, levels_of, options_of

PROMPT_FORMAT_VERSION = 1
ANSWER_LINE = "Answer with the letter of one option only."
BREAKPOINT = "prompt_cache_breakpoint"


@dataclass(frozen=True, slots=True)
class State:
    """The text to decide about.

    Attributes:
      num_marked_chars: up to the end of the last part with a cache breakpoint; 0 where none has one.
    """

    text: str
    num_marked_chars: int = 0


def check_version(version: int | Any) -> None:
    """Refuses a pinned wording that is not ours; None pins nothing.

    Raises:
      InvalidRequestError: another version.
    """
    if version is not None and (isinstance(version, bool) or version != PROMPT_FORMAT_VERSION):
        raise InvalidRequestError(
            f"prompt_format_version={version!r}: this server writes version {PROMPT_FORMAT_VERSION}",
            param="prompt_format_version",
        )


def option_texts(question: Question) -> tuple[tuple[str, str | None], ...]:
    """Name and description of every option as the model reads them, in label order."""
    if isinstance(question, Predicate):
        return (("false", None), ("true", None))
    if isinstance(question, Choice):
        return tuple((json.dumps(o.value, ensure_ascii=False), o.description) for o in options_of(question))
    return tuple((level.label, level.description) for level in levels_of(question))


def question_start(state: str) -> str:
    """What all questions about a state have in common."""
    return f"{state}\n\nQuestion: "


def question_text(state: str, question: Question, labels: Sequence[str]) -> str:
    """The one user message of a question: state, question, options with their labels, how to answer."""
    lines = [question_start(state) + question.instructions]
    for label, (name, description) in zip(labels, option_texts(question), strict=True):
        lines.append(f"{label}: {name} - {description}" if description else f"{label}: {name}")
    return "\n".join([*lines, ANSWER_LINE])


def read_state(value: Text | Sequence[Mapping[str, Any]]) -> State:
    """The text to decide about, from a string or from user messages.

    Parts of a message are joined by one line break, messages by an empty line. A part may carry
    `"prompt_cache_breakpoint": {"mode": "explicit"}`: the prompt up to its end will come again.

    Raises:
      InvalidRequestError: malformed or empty.
      UnsupportedFeatureError: a role or a kind of content that is not served; `param` says where.
    """
    if isinstance(value, str):
        return State(check_text(value, "input"))
    pieces: list[str] = []
    num_chars = num_marked_chars = 0
    for i, message in enumerate(check_list(value, "input")):
        for j, (text, is_marked) in enumerate(_parts(message, f"input[{i}]")):
            piece = text if not pieces else "\n" + text if j else "\n\n" + text
            pieces.append(piece)
            num_chars += len(piece)
            num_marked_chars = num_chars if is_marked else num_marked_chars
    return State(check_text("".join(pieces), "input"), num_marked_chars)


def _parts(message: Any, param: str) -> list[tuple[str, bool]]:
    """Each part's text, and whether a cache breakpoint stands after it."""
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{param} must be an object with role and content", param=param)
    kind = message.get("type") or "message"
    if kind != "message":
        raise UnsupportedFeatureError(f"{param}.type={kind!r} is not served: 'message' is", param=f"{param}.type")
    role = message.get("role")
    if role != "user":
        raise UnsupportedFeatureError(f"{param}.role={role!r} is not served: 'user' is", param=f"{param}.role")
    if unknown := [key for key in message if key not in ("type", "role", "content")]:
        raise InvalidRequestError(
            f"{param} has an unknown key {unknown[0]!r}: known are content, role, type",
            param=f"{param}.{unknown[0]}",
        )
    content = message.get("content")
    if isinstance(content, str):
        return [(check_text(content, f"{param}.content", may_be_empty=True), False)]
    parts = check_list(content, f"{param}.content")
    return [_part(part, f"{param}.content[{i}]") for i, part in enumerate(parts)]


def _part(part: Any, param: str) -> tuple[str, bool]:
    if not isinstance(part, Mapping):
        raise InvalidRequestError(f"{param} must be an object with type and text", param=param)
    kind = part.get("type")
    if kind not in ("input_text", "text"):
        raise UnsupportedFeatureError(f"{param}.type={kind!r} is not served: 'input_text' is", param=f"{param}.type")
    if unknown := [key for key in part if key not in ("type", "text", BREAKPOINT)]:
        raise UnsupportedFeatureError(
            f"{param}.{unknown[0]} is not served: a text part has type, text and {BREAKPOINT}",
            param=f"{param}.{unknown[0]}",
        )
    sent = part.get(BREAKPOINT)
    if sent is not None and sent != {"mode": "explicit"}:
        raise InvalidRequestError(f'{param}.{BREAKPOINT} must be {{"mode": "explicit"}}', param=f"{param}.{BREAKPOINT}")
    return check_text(part.get("text"), f"{param}.text", may_be_empty=True), sent is not None
