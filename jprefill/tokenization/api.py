"""What the rest of jprefill knows about a tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back, one interface for tokenizer.json, SentencePiece and GGUF vocabularies.

    Invariant: stateless after loading; every method may be called from any thread.
    """

    @property
    def vocab_size(self) -> int:
        """Largest token id + 1. The model's own vocabulary may be larger (padded embedding), never smaller."""
        ...

    @property
    def bos_id(self) -> int | None:
        """Token that begins a text; None where the model has none."""
        ...

    @property
    def eos_id(self) -> int | None:
        """Token that ends a text; None where the model has none."""
        ...

    @property
    def adds_bos(self) -> bool:
        """Whether a plain text prompt starts with BOS by the model's own rule."""
        ...

    @property
    def chat_template(self) -> str | None:
        """Jinja source, as the checkpoint's files hold it."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Role (`bos_token`, `eos_token`, `unk_token`, ...) to text, as chat templates want them."""
        ...

    @property
    def boundary_texts(self) -> Sequence[str]:
        """Texts that are one special token wherever they stand, so that no other token crosses their edges."""
        ...

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        """Token ids of `text`; special tokens written in the text are recognised.

        With `add_bos` the ids start with exactly one BOS, also where the text already spells it. A tokenizer
        without BOS ignores `add_bos`. Empty text gives no id but BOS.

        Raises:
          InvalidRequestError: the text holds lone surrogates, or the tokenizer fails on it.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens included, bytes that are no UTF-8 as U+FFFD.

        Ids that name no token give no text.
        """
        ...

    def token_text(self, token_id: int) -> str:
        """One token as a person would read it, leading space kept; `<id 7>` for an id that names no token."""
        ...
