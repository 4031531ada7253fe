"""Chat messages to prompt text, by the model's own template."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError

from jprefill.errors import CheckpointError, InvalidRequestError, UnsupportedFeatureError
from jprefill.tokenization.api import Tokenizer
from jprefill.tokenization.sandbox import BoundedSandbox, TemplateLimitError, limits
from jprefill.tokenization.settings import ROLES

MAX_RENDERED_CHARS = 64 * 2**20
_MAX_REASON = 200
_RESERVED = (*ROLES, "messages", "add_generation_prompt")
# What Python raises from inside a template: `none + "text"`, `messages[9]`, `1 / 0`, a macro without end.
_FAULTS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)


class _RefusedError(TemplateError):
    """The template called `raise_exception`: its author's words for the caller."""


class ChatTemplate:
    """A chat template, compiled once.

    Templates come from the model's files only, never from a request; they run in a sandbox with bounded
    steps and sizes all the same. BOS: a chat prompt starts with BOS if the template writes it, so encode the
    text with `add_bos=False`.

    Invariant: nothing changes after `__init__`: any thread may call `render`.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        """Compiles the template.

        Args:
          special_tokens: role (`bos_token`, ...) to text; templates read them as variables.

        Raises:
          CheckpointError: the template is no valid jinja2; the message names the line.
        """
        environment = BoundedSandbox()
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        environment.bind()
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise CheckpointError(f"the chat template is broken at line {error.lineno}: {error.message}") from None
        except (TemplateError, *_FAULTS) as error:
            raise CheckpointError(f"the chat template cannot be compiled: {type(error).__name__}") from None

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> "ChatTemplate | None":
        """The tokenizer's own template; None where it has none.

        Raises:
          CheckpointError: the template is no valid jinja2.
        """
        if tokenizer.chat_template is None:
            return None
        return cls(tokenizer.chat_template, tokenizer.special_tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """Writes the messages as the model was trained to read them.

        Args:
          messages: as in the OpenAI API, checked for shape by the caller.
          add_generation_prompt: end with the opening of the assistant's turn.
          kwargs: further variables of the template (`tools`, `documents`, ...). Thinking is always off.

        Raises:
          InvalidRequestError: the template refuses or fails on these messages, or exceeds the limits; a
            reserved name in `kwargs`.
          UnsupportedFeatureError: `enable_thinking=True`.
        """
        variables = {
            **self._special_tokens,
            **self._checked(kwargs),
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with limits(MAX_RENDERED_CHARS):
                return _join_bounded(self._template.generate(variables))
        except (TemplateError, *_FAULTS) as error:
            message = f"the chat template does not take these messages: {_reason(error)}"
            raise InvalidRequestError(message, param="messages") from None

    def _checked(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if kwargs.get("enable_thinking"):
            raise UnsupportedFeatureError(
                "enable_thinking: decisions are read without thinking: leave it out or send false",
                param="chat_template_kwargs.enable_thinking",
            )
        for name in kwargs:
            if name in _RESERVED or name in self._template.globals:
                raise InvalidRequestError(f"{name} is set by the server", param=f"chat_template_kwargs.{name}")
        return {**kwargs, "enable_thinking": False}


def _join_bounded(pieces: Iterable[str]) -> str:
    parts, num_chars = [], 0
    for piece in pieces:
        num_chars += len(piece)
        if num_chars > MAX_RENDERED_CHARS:
            raise TemplateLimitError(f"a text of more than {MAX_RENDERED_CHARS} characters")
        parts.append(piece)
    return "".join(parts)


def _reason(error: BaseException) -> str:
    """Words written for readers are passed on, bounded; Python's own may quote addresses and prompts."""
    if isinstance(error, _RefusedError | TemplateLimitError | UndefinedError):
        return str(error)[:_MAX_REASON]
    return type(error).__name__


def _raise_exception(message: object) -> NoReturn:
    raise _RefusedError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: jinja2's own `tojson` escapes `<` for web pages."""
    pair = None if separators is None else (separators[0], separators[1])
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)
