"""`tokenizer.json`, read by the Hugging Face tokenizers library."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from jprefill.errors import CheckpointError
from jprefill.tokenization.checks import check_text, guarded
from jprefill.tokenization.settings import ROLES, TokenizerSettings, read_settings

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class JsonTokenizer:
    """A `tokenizers.Tokenizer` behind our protocol.

    Invariant: the post-processor never runs in `encode`, so nothing is added but the BOS that we add;
    truncation and padding that a file may carry are off. Nothing changes after `__init__`: any thread may
    call.
    """

    def __init__(self, backend: Backend, settings: TokenizerSettings):
        # Files saved after training often carry truncation; it would drop the end of long prompts silently.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self._has_byte_level = '"ByteLevel"' in _state(backend.decoder)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_id = self._role_id(settings, "bos_token")
        self.eos_id = self._role_id(settings, "eos_token")
        self.adds_bos = self.bos_id is not None and self._bos_rule(settings)
        self.chat_template = settings.chat_template
        self.special_tokens = {role: text for role in ROLES if (text := settings.tokens.get(role))}
        for role, token_id in (("bos_token", self.bos_id), ("eos_token", self.eos_id)):
            if token_id is not None and (text := backend.id_to_token(token_id)) is not None:
                self.special_tokens.setdefault(role, text)
        self.boundary_texts = tuple(
            token.content for token in self._added.values() if token.special and not token.single_word
        )

    @classmethod
    def from_directory(cls, directory: Path) -> "JsonTokenizer":
        """Loads `tokenizer.json` and the settings beside it.

        Raises:
          CheckpointError: a file is broken, or names a token that the vocabulary lacks.
        """
        data = (directory / "tokenizer.json").read_bytes()
        backend = guarded(
            lambda: Backend.from_buffer(data),
            lambda reason: CheckpointError(f"tokenizer.json cannot be read: {reason}"),
        )
        return cls(backend, read_settings(directory))

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        """See `Tokenizer.encode`."""
        check_text(text)
        ids = guarded(lambda: self._backend.encode(text, add_special_tokens=False)).ids
        if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        known = [i for i in token_ids if 0 <= i < self.vocab_size]  # a negative id is an OverflowError in Rust
        return guarded(lambda: self._backend.decode(known, skip_special_tokens=False))

    def token_text(self, token_id: int) -> str:
        """See `Tokenizer.token_text`."""
        if token_id in self._added:
            return self._added[token_id].content
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return f"<id {token_id}>"
        if self._has_byte_level:
            return self.decode([token_id])
        # Decoders of the SentencePiece kind strip the first space, which a reader of one token wants to see.
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)]).decode(errors="replace")
        return token.replace("▁", " ")

    def save(self, path: Path) -> None:
        """Writes the vocabulary and its rules as one `tokenizer.json`."""
        self._backend.save(str(path))

    def _role_id(self, settings: TokenizerSettings, role: str) -> int | None:
        token_id = settings.token_id(role, self._backend.token_to_id)
        if token_id is not None and self._backend.id_to_token(token_id) is None:
            raise CheckpointError(f"{role}_id={token_id} is not in the vocabulary of {self.vocab_size} tokens")
        return token_id

    def _bos_rule(self, settings: TokenizerSettings) -> bool:
        if settings.adds_bos is not None:
            return settings.adds_bos
        return self._backend.encode("", add_special_tokens=True).ids[:1] == [self.bos_id]


def _state(part: Any) -> str:
    """A component's own JSON, compact; "" where the tokenizer has no such component."""
    if part is None:
        return ""
    return json.dumps(json.loads(part.__getstate__()))
