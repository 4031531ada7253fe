"""Tokenises the prompts of one request, the text that they share only once.

A prompt's tokens are always those of its whole text. For texts that share a long start this is reached
without reading the start again for each of them:

    text 0   |----------- head -----------|w|-- margin --|c|-- own --|
    text i   |----------- head -----------|w|-- margin --|c|-- own --|

The texts are equal up to c; w is a word's start well before it. If text 0 as a whole has the tokens of its
head followed by those of the rest, so has text i: what a tokenizer does at w depends on the words around it,
and these are equal. Where text 0 does not confirm the cut, every text is tokenised as a whole.

By the same reason the tokens before a word's start are settled: other requests whose texts begin alike have them too.
"""

import re
from collections.abc import Sequence

import numpy as np

from jprefill.tasks.inputs import Ids
from jprefill.tokenization.api import Tokenizer

MIN_SHARED_CHARS = 4096
"""Shorter starts are not worth the two extra calls."""
_MARGIN_CHARS = 1024
_MIN_MARGIN_WORDS = 16
_WORD_START = re.compile(r"(?<=\w) (?=\w)")
# Where vocabularies end a token whatever follows: at a single space, where a line starts with a word, and, for JSON
# without spaces and scripts without them, where a word ends.
_BOUNDARY = re.compile(r'(?<=\S) (?=\S)|(?<=\n)(?=\w)|(?<=[^\W_])(?=[",。，、！？；：])')
_MAX_CUTS = 4


def encode(tokenizer: Tokenizer, text: str, *, add_bos: bool) -> Ids:
    """Token ids of a checked text as an array."""
    return np.asarray(tokenizer.encode(text, add_bos=add_bos), np.int32)


def encode_all(tokenizer: Tokenizer, texts: Sequence[str], *, add_bos: bool) -> list[Ids]:
    """Token ids of each text, equal to `encode` of each."""
    first = encode(tokenizer, texts[0], add_bos=add_bos)
    num_shared = num_shared_chars(texts)
    cut = _find_cut(texts[0], num_shared) if len(texts) > 1 else None
    head = None if cut is None else _confirm(tokenizer, texts[0], first, cut, add_bos=add_bos)
    if cut is None or head is None:
        return [first, *(encode(tokenizer, text, add_bos=add_bos) for text in texts[1:])]
    head_ids, start = head
    tails = (encode(tokenizer, text[start:], add_bos=False) for text in texts[1:])
    return [first, *(np.concatenate([head_ids, tail]) for tail in tails)]


def num_settled_tokens(tokenizer: Tokenizer, text: str, token_ids: Ids, num_chars: int, *, add_bos: bool) -> int:
    """Leading tokens of a text that every other text with the same first `num_chars` characters has too.

    A cautious count: the tokens up to the start of the last word in there. Only the shorter side of it is tokenised
    again, to confirm that a token ends there; 0 where none does.

    Args:
      token_ids: of the whole `text`.
    """
    cuts = [match.start() for match in _BOUNDARY.finditer(text, max(0, num_chars - _MARGIN_CHARS), num_chars)]
    lengths = (_num_tokens_before(tokenizer, text, token_ids, cut, add_bos=add_bos) for cut in cuts[-_MAX_CUTS:][::-1])
    return next((length for length in lengths if length), 0)


def _num_tokens_before(tokenizer: Tokenizer, text: str, token_ids: Ids, cut: int, *, add_bos: bool) -> int:
    """Tokens of `text[:cut]` if they start `token_ids`; 0 if a token crosses the cut."""
    if cut <= len(text) - cut:
        head = encode(tokenizer, text[:cut], add_bos=add_bos)
        return len(head) if np.array_equal(token_ids[: len(head)], head) else 0
    for start in (cut, cut + 1)[: 1 + (text[cut] == " ")]:  # as in `_confirm`
        tail = encode(tokenizer, text[start:], add_bos=False)
        length = max(len(token_ids) - len(tail), 0)
        if len(tail) and np.array_equal(token_ids[length:], tail):
            return length
    return 0


def num_shared_chars(texts: Sequence[str]) -> int:
    """Characters with which all texts start: those that the first and the last in order share."""
    first, last = min(texts), max(texts)
    low, high = 0, min(len(first), len(last))
    while low < high:  # slices are compared in C, characters would be in Python
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[:middle] == last[:middle] else (low, middle - 1)
    return low


def _find_cut(text: str, num_shared: int) -> int | None:
    """Where a word starts (at its space), with enough equal words behind it; None if nowhere."""
    if num_shared < MIN_SHARED_CHARS:
        return None
    end = num_shared - _MARGIN_CHARS
    if len(text[end:num_shared].split()) < _MIN_MARGIN_WORDS:
        return None  # one endless word: its tokens may depend on what follows it
    starts = [match.start() for match in _WORD_START.finditer(text, end - _MARGIN_CHARS, end)]
    return starts[-1] if starts else None


def _confirm(tokenizer: Tokenizer, text: str, whole: Ids, cut: int, *, add_bos: bool) -> tuple[Ids, int] | None:
    """Tokens of the head and where the tail starts, if head and tail together are the whole; else None.

    A SentencePiece vocabulary puts a space before every text, so there the tail starts behind its own.
    """
    head = encode(tokenizer, text[:cut], add_bos=add_bos)
    if not np.array_equal(whole[: len(head)], head):
        return None
    for start in (cut, cut + 1):
        if np.array_equal(whole[len(head) :], encode(tokenizer, text[start:], add_bos=False)):
            return head, start
    return None
