"""What may enter a tokenizer or a model: text that is UTF-8, ids that are in the vocabulary."""

from collections.abc import Callable, Sequence

import numpy as np

from jprefill.errors import InvalidRequestError, JPrefillError
from jprefill.types import TokenIds

_MAX_SHOWN = 40


def shorten(value: object) -> str:
    """`repr` of a caller's value for an error message, bounded whatever the value is."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"  # repr of 5,000 digits raises ValueError
    text = repr(value[:_MAX_SHOWN] if isinstance(value, str) else value)
    is_cut = len(text) > 2 * _MAX_SHOWN or (isinstance(value, str) and len(value) > _MAX_SHOWN)
    return text[: 2 * _MAX_SHOWN] + "..." if is_cut else text


def check_text(text: str, param: str | None = None) -> None:
    """Refuses text that has no UTF-8 form; the tokenizer libraries fail on it in their own words.

    Raises:
      InvalidRequestError: naming the first lone surrogate and its position.
    """
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        bad = f"\\u{ord(text[error.start]):04x}"
        message = f"the text is not valid Unicode: lone surrogate {bad} at character {error.start}"
        raise InvalidRequestError(message, param=param) from None


def _bad_input(reason: str) -> JPrefillError:
    return InvalidRequestError(f"the tokenizer failed on this input: {reason}")


def guarded[T](action: Callable[[], T], failure: Callable[[str], JPrefillError] = _bad_input) -> T:
    """Runs a call into a tokenizer library; its failures leave as one of our errors.

    A Rust panic arrives as `pyo3_runtime.PanicException`, a BaseException that cannot be imported; other
    failures of the Rust library are plain `Exception`. All else (KeyboardInterrupt too) passes unchanged.

    Args:
      failure: makes the error from a bounded reason; by default an `InvalidRequestError`.
    """
    try:
        return action()
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"
        if not is_panic and type(error) not in (Exception, OverflowError, RuntimeError, ValueError):
            raise
        reason = "the library panicked" if is_panic else str(error)[:200]
        raise failure(reason) from None


def check_token_ids(token_ids: Sequence[object] | np.ndarray, vocab_size: int, param: str) -> TokenIds:
    """Token ids of a caller as int32, each checked against the model's vocabulary.

    Args:
      token_ids: ints (NumPy integers too); a one-axis integer array is taken as it is.
      vocab_size: ids must be below it.
      param: the field's name, for the error.

    Raises:
      InvalidRequestError: the first bad id: its index and value, and what is allowed. `param` becomes
        `param.index`.
    """
    # `np.asarray([True, 2])` makes ints of both, so types are looked at before NumPy sees the list.
    is_plain = isinstance(token_ids, np.ndarray) or set(map(type, token_ids)) <= {int}
    if is_plain and (ids := _as_int64(token_ids)) is not None:
        if not len(ids) or (ids.min() >= 0 and ids.max() < vocab_size):
            return ids.astype(np.int32)
    elif not is_plain and all(_is_token_id(value, vocab_size) for value in token_ids):
        return np.asarray(token_ids, dtype=np.int32)
    for index, value in enumerate(token_ids):
        if not _is_token_id(value, vocab_size):
            raise InvalidRequestError(
                f"{param}[{index}]={shorten(value)}: a token id is an integer from 0 to {vocab_size - 1}",
                param=f"{param}[{index}]",
            )
    raise InvalidRequestError(f"{param}: must be one list of token ids", param=param)


def _is_token_id(value: object, vocab_size: int) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return False
    return 0 <= int(value) < vocab_size


def _as_int64(token_ids: Sequence[object] | np.ndarray) -> np.ndarray | None:
    """None where the ids are no one-axis array of integers that fit."""
    if isinstance(token_ids, np.ndarray):
        is_ids = token_ids.ndim == 1 and np.issubdtype(token_ids.dtype, np.integer)
        return token_ids if is_ids else None
    try:
        return np.asarray(token_ids, dtype=np.int64)
    except OverflowError:
        return None
