"""Checks of what callers send, shared by the tasks. Each refusal names the field in the caller's words."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from jprefill.errors import ContextLengthError, InvalidRequestError
from jprefill.tokenization.checks import check_token_ids

# Any length: `TokenIds` names its axis, and one call here sees arrays of several lengths.
Ids = Int32[np.ndarray, " _"]
# `Any`: what comes from outside may be of any kind, and a wrong kind gets our error, naming the field.
Text = str | Any
TextOrIds = str | Sequence[int] | Any


def check_text(value: Text, param: str, *, may_be_empty: bool = False) -> str:
    """Returns `value` if it is a text that UTF-8 can hold.

    Raises:
      InvalidRequestError: not a str, empty, or with lone surrogates.
    """
    if not isinstance(value, str):
        raise InvalidRequestError(f"{param} must be a string, got {type(value).__name__}", param=param)
    if not value and not may_be_empty:
        raise InvalidRequestError(f"{param} must not be empty", param=param)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{param} holds a lone surrogate at character {error.start}: send valid Unicode", param=param
        ) from None
    return value


def check_list(value: Any, param: str, *, minimum: int = 1, maximum: int | None = None) -> Sequence[Any]:
    """Returns `value` if it is a list or tuple with `minimum` to `maximum` entries.

    Raises:
      InvalidRequestError: another kind, or too few or too many entries.
    """
    if isinstance(value, np.ndarray):
        value = list(value)
    if not isinstance(value, list | tuple):
        raise InvalidRequestError(f"{param} must be a list, got {type(value).__name__}", param=param)
    if not value and minimum:
        raise InvalidRequestError(f"{param} must not be empty", param=param)
    if len(value) < minimum or (maximum is not None and len(value) > maximum):
        allowed = f"at least {minimum}" if maximum is None else f"{minimum} to {maximum}"
        raise InvalidRequestError(f"{param} has {len(value)} entries: allowed are {allowed}", param=param)
    return value


def is_text(value: TextOrIds, param: str) -> bool:
    """Whether `value` is text; False for a list of token ids.

    Raises:
      InvalidRequestError: neither.
    """
    if isinstance(value, str):
        return True
    if isinstance(value, list | tuple | np.ndarray):
        return False
    raise InvalidRequestError(
        f"{param} must be a string or a list of token ids, got {type(value).__name__}", param=param
    )


def check_kinds(first: TextOrIds, first_param: str, others: Sequence[TextOrIds], param: str) -> bool:
    """Whether a query and its items are all text; False if all are token ids.

    Raises:
      InvalidRequestError: the kinds are mixed, or one is neither.
    """
    kind = is_text(first, first_param)
    for i, other in enumerate(others):
        if is_text(other, f"{param}[{i}]") != kind:
            names = ("token ids", "text")
            raise InvalidRequestError(
                f"{first_param} is {names[kind]} and {param}[{i}] is {names[not kind]}: send one kind",
                param=f"{param}[{i}]",
            )
    return kind


def as_ids(value: TextOrIds, vocab_size: int, param: str) -> Ids:
    """Token ids as they are, checked; an empty list is allowed here.

    Raises:
      InvalidRequestError: an entry is no int or is outside `0 <= id < vocab_size`.
    """
    return check_token_ids(value, vocab_size, param) if len(value) else np.zeros(0, np.int32)


def check_length(num_tokens: int, max_model_len: int | None, param: str) -> None:
    """Refuses a prompt that is longer than the engine takes; never cuts it.

    Raises:
      ContextLengthError: with both numbers.
    """
    if max_model_len is not None and num_tokens > max_model_len:
        raise ContextLengthError(
            f"{param} makes a prompt of {num_tokens} tokens, the limit is {max_model_len}", param=param
        )
