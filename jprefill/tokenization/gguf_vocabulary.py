"""The vocabulary inside a GGUF file, as a `tokenizers.Tokenizer`.

Two kinds: `gpt2` (byte-level BPE with a list of merges; the pre-tokenizer is only named) and `llama`
(SentencePiece BPE: pieces with scores). Texts are cut as the model's own tokenizer does it; llama.cpp is the
reference for what a GGUF key means.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from jprefill.errors import CheckpointError, JPrefillError
from jprefill.model.checkpoints.gguf_header import read_gguf_header
from jprefill.tokenization.checks import guarded
from jprefill.tokenization.json_tokenizer import JsonTokenizer
from jprefill.tokenization.settings import TokenizerSettings

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PATTERNS = {
    "llama-bpe": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    "qwen2": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    "tekken": rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
}
_GPT2 = ("gpt-2", "default")
PRE_TOKENIZERS = (*_GPT2, "smollm", *_PATTERNS)


def load_gguf_tokenizer(path: Path) -> JsonTokenizer:
    """Builds the tokenizer of a GGUF file.

    Raises:
      CheckpointError: no GGUF file, no vocabulary in it, or one of a kind that is not implemented (named).
    """
    metadata = read_gguf_header(path).metadata
    build = {"gpt2": _byte_level_backend, "llama": _sentencepiece_backend}
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in build:
        found = "holds no vocabulary" if kind is None else f"tokenizer.ggml.model={kind!r} is not implemented"
        raise CheckpointError(f"{path.name}: {found}: {', '.join(map(repr, build))} are")
    vocabulary = _Vocabulary(metadata, path.name)

    def fail(reason: str) -> JPrefillError:
        return CheckpointError(f"{path.name}: the vocabulary cannot be used: {reason}")

    backend = guarded(lambda: build[kind](vocabulary), fail)
    backend.add_tokens(vocabulary.added_tokens())
    if vocabulary.adds_bos and (bos := vocabulary.role_text("bos")) is not None:
        _prepend_bos(backend, bos, vocabulary.ids[bos])
    return JsonTokenizer(backend, vocabulary.settings())


def write_gguf_tokenizer(gguf_path: Path, directory: Path) -> None:
    """Writes the vocabulary of a GGUF file as `tokenizer.json` and `tokenizer_config.json` into `directory`.

    Raises:
      CheckpointError: see `load_gguf_tokenizer`.
    """
    tokenizer = load_gguf_tokenizer(gguf_path)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": tokenizer.adds_bos,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": None,
        **tokenizer.special_tokens,
    }
    if tokenizer.chat_template is not None:
        config["chat_template"] = tokenizer.chat_template
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(directory / "tokenizer.json")
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


class _Vocabulary:
    """The `tokenizer.*` keys of one file, checked and with their defaults."""

    def __init__(self, metadata: dict[str, Any], name: str):
        self.name = name
        self._metadata = metadata
        self.kind: str = metadata["tokenizer.ggml.model"]
        self.tokens: list[str] = self.get("tokens") or []
        self.types: list[int] = self.get("token_type") or [_NORMAL] * len(self.tokens)
        self.scores: list[float] = self.get("scores") or []
        if not self.tokens or len(self.types) != len(self.tokens):
            raise CheckpointError(
                f"{name}: {len(self.tokens)} tokens, {len(self.types)} token types: must be equal, at least 1"
            )
        # Added tokens are matched in raw text, where a space is a space.
        self.texts = [
            token.replace("▁", " ") if kind == _USER_DEFINED and self.kind == "llama" else token
            for token, kind in zip(self.tokens, self.types, strict=True)
        ]
        # Of two tokens with the same text the first is the one that text becomes.
        self.ids = {text: i for i, text in reversed(list(enumerate(self.texts)))}

    def get(self, key: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}")

    @property
    def pre(self) -> str:
        """The pre-tokenizer's name."""
        name = self.get("pre")
        if name not in PRE_TOKENIZERS:
            found = "is missing" if name is None else f"{name!r} is not implemented"
            raise CheckpointError(
                f"{self.name}: tokenizer.ggml.pre {found}: {', '.join(PRE_TOKENIZERS)} are implemented"
            )
        return name

    @property
    def adds_bos(self) -> bool:
        """llama.cpp's rule where the key is missing: yes for SentencePiece, Llama 3 and tekken, else no."""
        value = self.get("add_bos_token")
        if value is None:
            value = self.kind == "llama" or self.get("pre") in ("llama-bpe", "tekken")
        return bool(value) and self.role_text("bos") is not None

    def role_text(self, role: str) -> str | None:
        token_id = self.get(f"{role}_token_id")
        if token_id is None:
            return None
        if not 0 <= token_id < len(self.texts):
            raise CheckpointError(f"{self.name}: {role}_token_id={token_id}: there are {len(self.texts)} tokens")
        return self.texts[token_id]

    def added_tokens(self) -> list[AddedToken]:
        """Control, unknown and user-defined tokens, and BOS and EOS whatever type a converter gave them."""
        ends = {self.role_text("bos"), self.role_text("eos")}
        return [
            AddedToken(text, special=kind != _USER_DEFINED or text in ends, normalized=False)
            for text, kind in zip(self.texts, self.types, strict=True)
            if text and (kind in (_CONTROL, _UNKNOWN, _USER_DEFINED) or text in ends)
        ]

    def settings(self) -> TokenizerSettings:
        roles = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
        return TokenizerSettings(
            tokens={hf: self.role_text(role) for role, hf in roles.items()},
            adds_bos=self.adds_bos,
            chat_template=self._metadata.get("tokenizer.chat_template"),
        )


def _byte_level_backend(vocabulary: _Vocabulary) -> Backend:
    merges = vocabulary.get("merges")
    if merges is None:
        raise CheckpointError(f"{vocabulary.name}: tokenizer.ggml.merges is missing")
    pre = vocabulary.pre
    # Vocabularies made by tiktoken: a word that is a token is taken whole.
    ignore_merges = pre in ("llama-bpe", "tekken")
    backend = Backend(models.BPE(vocabulary.ids, [_split_merge(m) for m in merges], ignore_merges=ignore_merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(_pre_tokenizers(pre))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizers(pre: str) -> list[Any]:
    if pre in _GPT2:
        return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    if pre == "smollm":  # each digit alone, then GPT-2's words
        return [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    return [
        pre_tokenizers.Split(Regex(_PATTERNS[pre]), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge[1:].partition(" ")  # the first half has at least one character, maybe a space
    return merge[0] + left, right


def _sentencepiece_backend(vocabulary: _Vocabulary) -> Backend:
    if vocabulary.get("precompiled_charsmap"):
        raise CheckpointError(f"{vocabulary.name}: tokenizer.ggml.precompiled_charsmap is not implemented")
    if len(vocabulary.scores) != len(vocabulary.tokens):
        raise CheckpointError(f"{vocabulary.name}: tokenizer.ggml.scores has not one number per token")
    adds_space = vocabulary.get("add_space_prefix") is not False
    model = models.BPE(
        vocabulary.ids,
        _merges_by_score(vocabulary),
        unk_token=vocabulary.role_text("unknown"),
        fuse_unk=True,
        byte_fallback=all(f"<0x{byte:02X}>" in vocabulary.ids for byte in range(256)),
    )
    backend = Backend(model)
    # Per run of text between special tokens: "Hi there" -> "▁Hi▁there".
    prepend = [normalizers.Prepend("▁")] if adds_space else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Merges that make the library do what SentencePiece does: the pair with the best-scored whole first.

    Every cut of a piece into two pieces is a merge with the whole's score. Among equal scores SentencePiece
    takes the leftmost pair in the text. A rank cannot say that; the shorter left half is as near as it gets.
    """
    score = {text: vocabulary.scores[i] for text, i in vocabulary.ids.items() if vocabulary.types[i] == _NORMAL}
    merges = [
        (-whole_score, cut, whole)
        for whole, whole_score in score.items()
        for cut in range(1, len(whole))
        if whole[:cut] in score and whole[cut:] in score
    ]
    return [(whole[:cut], whole[cut:]) for _, cut, whole in sorted(merges)]


def _prepend_bos(backend: Backend, bos: str, bos_id: int) -> None:
    """For other readers of the written file: our own `encode` never runs the post-processor."""
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
    )
