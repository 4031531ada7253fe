"""Small real vocabularies, made by the libraries themselves: byte-level BPE, SentencePiece, GGUF files."""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog. The answer is A, B or C.\n",
    "Answer: yes\nAnswer: no\nQuestion: is it true? I don't know, we'll see.\n",
    "def f(x):\n    return x + 1\n\nprint(f(123))\n",
    "Größe, naïve café; 東京は大きい。 3.14 and 2,718\n",
] * 8
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="session")
def byte_level_json() -> str:
    """A byte-level BPE tokenizer.json of GPT-2's kind with ChatML tokens and a non-special added token."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=[*SPECIALS], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_tokens(["[TOOL]"])
    return backend.to_str()


@pytest.fixture
def write_json(byte_level_json: str, tmp_path: Path) -> Callable[..., Path]:
    """Writes a checkpoint directory around the byte-level vocabulary."""

    def write(
        config: dict[str, Any] | None = None, *, adds_bos: bool = False, files: dict[str, Any] | None = None
    ) -> Path:
        backend = Backend.from_str(byte_level_json)
        if adds_bos:
            backend.post_processor = processors.TemplateProcessing(
                single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
            )
        backend.save(str(tmp_path / "tokenizer.json"))
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        for name, content in (files or {}).items():
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / name).write_text(text)
        return tmp_path

    return write


@pytest.fixture(scope="session")
def sentencepiece_model() -> bytes:
    """A SentencePiece BPE model with byte fallback, as Llama 2 has it; 330 pieces."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=model,
        model_type="bpe",
        vocab_size=360,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return model.getvalue()


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a GGUF file with a vocabulary and no tensor."""

    def write(
        tokens: Sequence[str],
        types: Sequence[int],
        *,
        model: str,
        pre: str | None = None,
        merges: Sequence[str] | None = None,
        scores: Sequence[float] | None = None,
        name: str = "model.gguf",
        **ids: int | bool | str,
    ) -> Path:
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        writer.add_tokenizer_model(model)
        writer.add_token_list(list(tokens))
        writer.add_token_types(list(types))
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        if merges is not None:
            writer.add_token_merges(list(merges))
        if scores is not None:
            writer.add_token_scores(list(scores))
        for key, value in ids.items():
            getattr(writer, f"add_{key}")(value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return tmp_path / name

    return write


@pytest.fixture
def byte_level_gguf(byte_level_json: str, write_gguf: Callable[..., Path]) -> Callable[..., Path]:
    """The byte-level vocabulary as a converter of llama.cpp would write it."""

    def write(pre: str | None = "gpt-2", **ids: Any) -> Path:
        model = json.loads(byte_level_json)
        tokens = sorted(model["model"]["vocab"], key=model["model"]["vocab"].get)
        tokens += [token["content"] for token in model["added_tokens"] if token["content"] not in tokens]
        kinds = {token["content"]: 3 if token["special"] else 4 for token in model["added_tokens"]}
        types = [kinds.get(token, 1) for token in tokens]
        merges = [" ".join(merge) for merge in model["model"]["merges"]]
        ids = {"bos_token_id": 1, "eos_token_id": 2, **ids}
        return write_gguf(tokens, types, model="gpt2", pre=pre, merges=merges, **ids)

    return write


@pytest.fixture
def sentencepiece_gguf(sentencepiece_model: bytes, write_gguf: Callable[..., Path]) -> Callable[..., Path]:
    """The SentencePiece vocabulary as a converter of llama.cpp would write it."""

    def write(**ids: Any) -> Path:
        processor = sentencepiece.SentencePieceProcessor()
        processor.LoadFromSerializedProto(sentencepiece_model)
        pieces = range(processor.vocab_size())
        types = [
            2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1
            for i in pieces
        ]
        ids = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, **ids}
        return write_gguf(
            [processor.id_to_piece(i) for i in pieces],
            types,
            model="llama",
            scores=[processor.get_score(i) for i in pieces],
            **ids,
        )

    return write
