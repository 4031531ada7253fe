"""`tokenizer.model`, read by the SentencePiece library."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from jprefill.errors import CheckpointError
from jprefill.tokenization.checks import check_text, guarded
from jprefill.tokenization.settings import AddedText, TokenizerSettings, read_settings

NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"
"""`normalizer_spec { add_dummy_prefix: false }`: one protobuf message after another is both, merged."""


class SentencePieceTokenizer:
    """A SentencePiece model behind our protocol.

    The library reads `<s>` in a text as three characters. Here control tokens, and the tokens that the files
    add, are cut out first, and the library sees the runs between them.

    Invariant: nothing changes after `__init__`: any thread may call.
    """

    def __init__(self, model: bytes, settings: TokenizerSettings):
        self._first = _processor(model)
        # The processor for runs that get no space in front: all but the text's first, unless `is_legacy`.
        self._later = self._first if settings.is_legacy else _processor(model + NO_DUMMY_PREFIX)
        self._added = {**_control_texts(self._first), **settings.added}
        self._ids = {token.text: token_id for token_id, token in self._added.items()}
        self._splitter = _splitter(list(self._added.values()))
        self.vocab_size = max([self._first.vocab_size() - 1, *self._added]) + 1
        self.bos_id = self._role_id(settings, "bos_token", self._first.bos_id())
        self.eos_id = self._role_id(settings, "eos_token", self._first.eos_id())
        # Hugging Face's rule for SentencePiece models of the Llama kind: BOS unless the files say no.
        self.adds_bos = self.bos_id is not None and settings.adds_bos is not False
        self.chat_template = settings.chat_template
        self.special_tokens = {role: text for role, text in settings.tokens.items() if text}
        for role, token_id in (("bos_token", self.bos_id), ("eos_token", self.eos_id)):
            if token_id is not None:
                self.special_tokens.setdefault(role, self.token_text(token_id))
        self.boundary_texts = tuple(token.text for token in self._added.values() if token.is_special)

    @classmethod
    def from_directory(cls, directory: Path) -> "SentencePieceTokenizer":
        """Loads `tokenizer.model` and the settings beside it.

        Raises:
          CheckpointError: a file is broken, or names a token that the vocabulary lacks.
        """
        return cls((directory / "tokenizer.model").read_bytes(), read_settings(directory))

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        """See `Tokenizer.encode`."""
        check_text(text)
        ids = guarded(lambda: list(self._walk(text)))
        if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        parts: list[str] = []
        for is_added, run in groupby(token_ids, key=self._added.__contains__):
            if is_added:
                parts += [self._added[token_id].text for token_id in run]
            else:
                processor = self._later if parts else self._first
                parts.append(processor.decode([i for i in run if 0 <= i < self._first.vocab_size()]))
        return "".join(parts)

    def token_text(self, token_id: int) -> str:
        """See `Tokenizer.token_text`."""
        if token_id in self._added:
            return self._added[token_id].text
        if not 0 <= token_id < self._first.vocab_size():
            return f"<id {token_id}>"
        piece = self._first.id_to_piece(token_id)
        if self._first.is_byte(token_id):
            return bytes([int(piece[3:5], 16)]).decode(errors="replace")
        return piece.replace("▁", " ")

    def _walk(self, text: str) -> Iterator[int]:
        """Token ids, run by run; `re.split` with one group gives run, token, run, token, ..., run."""
        parts = self._splitter.split(text) if self._splitter else [text]
        for index, part in enumerate(parts):
            if index % 2:
                yield self._ids[part] if part in self._ids else self._ids[part.strip()]
            elif part:
                yield from (self._later if index else self._first).encode(part)

    def _role_id(self, settings: TokenizerSettings, role: str, own_id: int) -> int | None:
        """The files' choice, else the model's own id (-1: none)."""
        if role in settings.tokens:
            return settings.token_id(role, self._token_to_id)
        return own_id if own_id >= 0 else None

    def _token_to_id(self, text: str) -> int | None:
        if text in self._ids:
            return self._ids[text]
        token_id = self._first.piece_to_id(text)  # the id of <unk> where there is no such piece
        return token_id if self._first.id_to_piece(token_id) == text else None


def _processor(model: bytes) -> SentencePieceProcessor:
    processor = SentencePieceProcessor()

    def fail(reason: str) -> CheckpointError:
        return CheckpointError(f"tokenizer.model is no SentencePiece model: {reason}")

    guarded(lambda: processor.LoadFromSerializedProto(model), fail)
    return processor


def _control_texts(processor: SentencePieceProcessor) -> dict[int, AddedText]:
    ids = range(processor.vocab_size())
    return {i: AddedText(processor.id_to_piece(i)) for i in ids if processor.is_control(i) or processor.is_unknown(i)}


def _splitter(tokens: list[AddedText]) -> re.Pattern[str] | None:
    """A pattern that finds the tokens in a text, longest first."""
    patterns = [
        r"\s*" * token.lstrip + re.escape(token.text) + r"\s*" * token.rstrip
        for token in sorted(tokens, key=lambda token: -len(token.text))
    ]
    return re.compile(f"({'|'.join(patterns)})") if patterns else None
