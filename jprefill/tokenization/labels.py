"""Answer labels as single tokens: checked where they will stand, named for a list of options."""

import re
import string
from collections.abc import Sequence
from functools import lru_cache
from itertools import product

from jprefill.errors import InvalidRequestError, LabelError
from jprefill.tokenization.api import Tokenizer
from jprefill.tokenization.checks import check_text, shorten

_MAX_TAIL = 512
_MAX_SHOWN_TOKENS = 8
_LINE_BREAK = re.compile(r"\s*\n\s*")


def resolve_labels(tokenizer: Tokenizer, labels: Sequence[str], context: str, *, param: str = "labels") -> list[int]:
    """Token ids of the labels as they stand right after `context`.

    A label is usable if the text with it has the context's tokens and exactly one more.

    Args:
      context: the prompt's text, as it is tokenised. Only its end is read, see `context_tail`.
      param: the field's name, for errors; a label's is `param.index`.

    Returns:
      One id per label, all distinct.

    Raises:
      InvalidRequestError: no label.
      LabelError: a label is empty, not one token here (the message says what it became and what would work),
        or the same token as another.
    """
    if not labels:
        raise InvalidRequestError(f"{param}: at least one label is needed", param=param)
    tail = context_tail(tokenizer, context)
    tail_ids = tokenizer.encode(tail, add_bos=False)
    ids: dict[int, int] = {}  # token id -> index of its label
    for index, label in enumerate(labels):
        where = f"{param}[{index}]"
        check_text(label, where)
        token_id = _one_token(tokenizer, tail, tail_ids, label)
        if token_id is None:
            raise LabelError(_explain(tokenizer, tail, tail_ids, label), param=where)
        if token_id in ids:
            other = ids[token_id]
            both = f"{other} ({shorten(labels[other])}) and {index} ({shorten(label)})"
            raise LabelError(f"labels {both} are the same token: {_show(tokenizer, [token_id])}", param=where)
        ids[token_id] = index
    return list(ids)


def letter_labels(tokenizer: Tokenizer, count: int, context: str) -> tuple[list[str], list[int]]:
    """Names `count` options: A, B, ... up to 26, else AA, AB, ...; all are one token after `context`.

    Returns:
      The labels and their ids, both `count` long, ids distinct.

    Raises:
      InvalidRequestError: the tokenizer has fewer usable labels; the message says how many.
    """
    if count < 1:
        raise InvalidRequestError("at least one option is needed", param="options")
    tail = context_tail(tokenizer, context)
    labels, ids = _usable_letters(tokenizer, 1 if count <= 26 else 2, count, tail)
    if len(ids) < count:
        size = "one-letter" if count <= 26 else "two-letter"
        raise InvalidRequestError(
            f"{count} options, but only {len(ids)} {size} labels are one token after this prompt",
            param="options",
        )
    return list(labels), list(ids)


def context_tail(tokenizer: Tokenizer, context: str) -> str:
    """The end of `context` that decides how a label after it is tokenised.

    Tokenizers cut text into words before they merge, and neither a special token nor a line break is joined
    to the letters behind it. So the tail starts at the last of these, *with* it: the tokens behind the break
    do not depend on what stands before it. Text without either is cut at a space in the first half of its
    last 512 characters, else there: longer than any token, and merging decides from neighbours.
    """
    window = context[-_MAX_TAIL:]
    starts = [window.rfind(text) for text in tokenizer.boundary_texts]
    starts += [match.start() for match in _LINE_BREAK.finditer(window)]
    start = max(starts, default=-1)
    if start < 0 and len(context) > _MAX_TAIL:
        start = window.find(" ", 0, _MAX_TAIL // 2)
    return window[max(start, 0) :]


def _one_token(tokenizer: Tokenizer, tail: str, tail_ids: Sequence[int], label: str) -> int | None:
    ids = tokenizer.encode(tail + label, add_bos=False) if label else []
    is_one_more = len(ids) == len(tail_ids) + 1 and ids[:-1] == list(tail_ids)
    return ids[-1] if is_one_more else None


def _explain(tokenizer: Tokenizer, tail: str, tail_ids: Sequence[int], label: str) -> str:
    if not label:
        return "the label is empty"
    ids = tokenizer.encode(tail + label, add_bos=False)
    num_same = next((i for i, (a, b) in enumerate(zip(ids, tail_ids, strict=False)) if a != b), len(tail_ids))
    became = _show(tokenizer, ids[num_same:])
    if num_same < len(tail_ids):
        problem = f"joins the end of the prompt {shorten(tokenizer.decode(tail_ids[num_same:]))}: {became}"
    else:
        problem = f"is {len(ids) - num_same} tokens here: {became}"
    return f"label {shorten(label)} {problem}; {_hint(tokenizer, tail, tail_ids, label)}"


def _hint(tokenizer: Tokenizer, tail: str, tail_ids: Sequence[int], label: str) -> str:
    """Variants of the label that are one token here, or would be if the prompt ended without its spaces."""
    bare = label.strip()
    words = dict.fromkeys([bare, bare.capitalize(), bare.lower(), bare.upper()])
    variants = dict.fromkeys([label, *(variant for word in words if word for variant in (word, f" {word}"))])
    hints = []
    if works := [shorten(v) for v in variants if _one_token(tokenizer, tail, tail_ids, v) is not None]:
        hints.append(f"one token here: {', '.join(works)}")
    stripped = tail.rstrip(" \t")
    if stripped != tail:
        ids = tokenizer.encode(stripped, add_bos=False)
        if works := [shorten(v) for v in variants if _one_token(tokenizer, stripped, ids, v) is not None]:
            hints.append(f"one token if the prompt ends without the space: {', '.join(works)}")
    return "; ".join(hints) or "no simple variant of it is one token"


def _show(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    shown = ", ".join(f"{shorten(tokenizer.token_text(i))} ({i})" for i in ids[:_MAX_SHOWN_TOKENS])
    return shown + (", ..." if len(ids) > _MAX_SHOWN_TOKENS else "")


# Prompts of one kind end alike ("<|im_start|>assistant\n"), so a few entries serve all requests.
@lru_cache(maxsize=64)
def _usable_letters(
    tokenizer: Tokenizer, num_letters: int, count: int, tail: str
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    tail_ids = tokenizer.encode(tail, add_bos=False)
    labels: dict[int, str] = {}
    for letters in product(string.ascii_uppercase, repeat=num_letters):
        label = "".join(letters)
        token_id = _one_token(tokenizer, tail, tail_ids, label)
        if token_id is not None:
            labels.setdefault(token_id, label)
        if len(labels) == count:
            break
    return tuple(labels.values()), tuple(labels)
