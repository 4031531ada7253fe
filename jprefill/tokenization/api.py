"""What the rest of jprefill knows about a tokenizer."""

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text to token ids and back, one interface for tokenizer.json, SentencePiece and GGUF vocabularies.

    Invariant: stateless after loading; every method may be called from any thread.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    adds_bos: bool
    """Whether a plain text prompt starts with BOS by the model's own rule."""
    chat_template: str | None

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        """Token ids of `text`; special tokens written in the text are recognised.

        With `add_bos` the ids start with exactly one BOS, also where the text already spells it.

        Raises:
          InvalidRequestError: the text holds lone surrogates, or the tokenizer fails on it.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens included, bytes that are no UTF-8 as U+FFFD."""
        ...

    def token_text(self, token_id: int) -> str:
        """One token as a person would read it, leading space kept."""
        ...
