import json
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from jprefill.errors import CheckpointError, InvalidRequestError
from jprefill.tokenization import load_tokenizer
from jprefill.tokenization.sentencepiece_tokenizer import SentencePieceTokenizer
from jprefill.tokenization.settings import AddedText, TokenizerSettings

TEXTS = [
    "The quick brown fox",
    " leading, two  spaces, trailing ",
    "Answer: yes\n\nAnswer: no\t!",
    "日本語 Ünïcode 😀",
    "▁literal",
    "   ",
]


@pytest.fixture(scope="module")
def reference(sentencepiece_model: bytes) -> sentencepiece.SentencePieceProcessor:
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(sentencepiece_model)
    return processor


@pytest.fixture(scope="module")
def tokenizer(sentencepiece_model: bytes) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(sentencepiece_model, TokenizerSettings())


@pytest.mark.parametrize("text", TEXTS)
def test_plain_text_is_encoded_as_by_the_library(
    tokenizer: SentencePieceTokenizer, reference: sentencepiece.SentencePieceProcessor, text: str
) -> None:
    ids = tokenizer.encode(text, add_bos=False)
    assert ids == reference.encode(text)
    assert tokenizer.decode(ids) == reference.decode(ids)


def test_text_comes_back_byte_fallback_included(tokenizer: SentencePieceTokenizer) -> None:
    @settings(max_examples=100, deadline=None)
    @given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁\0"), max_size=40))
    def check(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == text

    check()


def test_bos_stands_in_front_exactly_once(tokenizer: SentencePieceTokenizer) -> None:
    assert tokenizer.adds_bos
    assert tokenizer.encode("", add_bos=False) == []
    assert tokenizer.encode("", add_bos=True) == [1]
    for text in ("fox", "<s>fox"):
        assert tokenizer.encode(text, add_bos=True) == [1, *tokenizer.encode("fox", add_bos=False)]


def test_control_tokens_in_text_are_recognised(
    tokenizer: SentencePieceTokenizer, reference: sentencepiece.SentencePieceProcessor
) -> None:
    ids = tokenizer.encode("<s>The fox</s><s>yes", add_bos=False)
    assert ids == [1, *reference.encode("The fox"), 2, 1, *reference.encode("yes")]
    assert tokenizer.decode(ids) == "<s>The fox</s><s>yes"
    assert set(tokenizer.boundary_texts) == {"<unk>", "<s>", "</s>"}


def test_only_legacy_models_put_a_space_behind_a_special_token(
    sentencepiece_model: bytes, reference: sentencepiece.SentencePieceProcessor
) -> None:
    modern = SentencePieceTokenizer(sentencepiece_model, TokenizerSettings(is_legacy=False))
    ids = modern.encode("The<s>yes", add_bos=False)
    assert ids[: ids.index(1)] == reference.encode("The")
    assert "".join(map(modern.token_text, ids[ids.index(1) + 1 :])) == "yes"
    assert modern.decode(ids) == "The<s>yes"


def test_added_tokens_of_the_files_extend_the_vocabulary(sentencepiece_model: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model)
    config = {
        "bos_token": "<s>",
        "eos_token": "<|end|>",
        "add_bos_token": False,
        "added_tokens_decoder": {"361": {"content": "<|end|>", "special": True, "rstrip": True}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": 360}))
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.adds_bos) == (362, 361, False)
    ids = tokenizer.encode("yes<|end|>\n\n<pad>", add_bos=False)
    assert ids[-2:] == [361, 360]
    assert tokenizer.decode(ids) == "yes<|end|><pad>"


def test_longer_added_token_wins() -> None:
    from jprefill.tokenization.sentencepiece_tokenizer import _splitter

    splitter = _splitter([AddedText("<a>"), AddedText("<a><b>")])
    assert splitter is not None
    assert splitter.split("x<a><b>y") == ["x", "<a><b>", "y"]


def test_token_text(tokenizer: SentencePieceTokenizer, reference: sentencepiece.SentencePieceProcessor) -> None:
    assert tokenizer.token_text(reference.piece_to_id("<0x0A>")) == "\n"
    assert tokenizer.token_text(reference.piece_to_id("<0xE6>")) == "\ufffd"
    assert tokenizer.token_text(reference.encode("The")[0]).startswith(" ")
    assert tokenizer.token_text(10**6) == "<id 1000000>"
    assert tokenizer.decode([10**6, -1]) == ""


def test_bad_text_and_bad_file(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="lone surrogate"):
        tokenizer.encode("a\ud800", add_bos=False)
    (tmp_path / "tokenizer.model").write_bytes(b"no protobuf at all")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model is no SentencePiece model"):
        load_tokenizer(tmp_path)
