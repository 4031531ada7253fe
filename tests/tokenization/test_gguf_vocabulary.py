import json
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from jprefill.errors import CheckpointError
from jprefill.model.checkpoints.gguf_header import read_gguf_header
from jprefill.tokenization import load_tokenizer, write_gguf_tokenizer
from jprefill.tokenization.gguf_vocabulary import PRE_TOKENIZERS, load_gguf_tokenizer
from jprefill.tokenization.sentencepiece_tokenizer import NO_DUMMY_PREFIX

Write = Callable[..., Path]
TEXTS = [
    "The quick brown fox don't jump 12345 times,  twice\n\n  indented\ttab \n",
    "<|im_start|>user\nIs 3.14 > 2?<|im_end|>\n<|im_start|>assistant\n[TOOL] ok",
    "naïve Größe 東京は大きい。 ½ ² ٣٤ 😀👍🏽 e\u0301",
    "",
    " ",
    "\n 5",
]
_FUZZ = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.text("aA1 .'\n<|>", max_size=40)


def test_gpt2_ids_equal_those_of_the_original_tokenizer(byte_level_gguf: Write, byte_level_json: str) -> None:
    ours = load_gguf_tokenizer(byte_level_gguf())
    original = Backend.from_str(byte_level_json)

    @settings(max_examples=150, deadline=None)
    @given(text=st.sampled_from(TEXTS) | _FUZZ)
    def check(text: str) -> None:
        ids = ours.encode(text, add_bos=False)
        assert ids == original.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids) == text

    check()
    assert ours.vocab_size == original.get_vocab_size()
    assert (ours.bos_id, ours.eos_id, ours.adds_bos) == (1, 2, False)
    assert ours.boundary_texts == ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def test_smollm_splits_digits_before_words(byte_level_gguf: Write, byte_level_json: str) -> None:
    ours = load_gguf_tokenizer(byte_level_gguf("smollm"))
    original = Backend.from_str(byte_level_json)
    original.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in TEXTS:
        assert ours.encode(text, add_bos=False) == original.encode(text, add_special_tokens=False).ids


def _words(pre: str, text: str) -> list[str]:
    """How a pre-tokenizer cuts the text, read back from the byte-level alphabet."""
    from jprefill.tokenization.gguf_vocabulary import _pre_tokenizers

    pieces = pre_tokenizers.Sequence(_pre_tokenizers(pre)).pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in pieces]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "It's 1234 ok.\n\n  go", ["It", "'s", " 1234", " ok", ".", "\n\n ", " go"]),
        ("smollm", "at 1234 ok", ["at", " ", "1", "2", "3", "4", " ok"]),
        ("smollm", "\n 5", ["\n ", "5"]),
        ("llama-bpe", "IT'S 12345 ok.\n\n  go", ["IT", "'S", " ", "123", "45", " ok", ".\n\n", " ", " go"]),
        ("llama-bpe", "(word", ["(word"]),
        ("qwen2", "IT'S 123 ok", ["IT", "'S", " ", "1", "2", "3", " ok"]),
        ("tekken", "camelCase HTTPServer a/\nb", ["camel", "Case", " HTTPServer", " a", "/\n", "b"]),
    ],
)
def test_pre_tokenizers_cut_as_documented(pre: str, text: str, expected: list[str]) -> None:
    assert _words(pre, text) == expected


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_the_text(byte_level_gguf: Write, pre: str) -> None:
    tokenizer = load_gguf_tokenizer(byte_level_gguf(pre))
    for text in TEXTS:
        expected = text.replace("e\u0301", "é") if pre == "qwen2" else text  # Qwen composes characters (NFC)
        assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == expected


def test_unknown_kinds_are_named(byte_level_gguf: Write, write_gguf: Write) -> None:
    with pytest.raises(CheckpointError, match=r"model\.gguf: tokenizer\.ggml\.pre 'deepseek-llm' is not implemented"):
        load_gguf_tokenizer(byte_level_gguf("deepseek-llm"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre is missing: gpt-2, default, smollm"):
        load_gguf_tokenizer(byte_level_gguf(None))
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.model='bert' is not implemented: 'gpt2', 'llama'"):
        load_gguf_tokenizer(write_gguf(["a"], [1], model="bert"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.merges is missing"):
        load_gguf_tokenizer(write_gguf(["a"], [1], model="gpt2", pre="gpt-2"))
    with pytest.raises(CheckpointError, match=r"the vocabulary cannot be used: .*`b` out of vocabulary"):
        load_gguf_tokenizer(write_gguf(["a"], [1], model="gpt2", pre="gpt-2", merges=["a b"]))
    with pytest.raises(CheckpointError, match=r"bos_token_id=7: there are 2 tokens"):
        load_gguf_tokenizer(write_gguf(["a", "aa"], [1, 1], model="gpt2", pre="gpt-2", merges=["a a"], bos_token_id=7))


@pytest.mark.parametrize(
    ("pre", "value", "expected"),
    [("gpt-2", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", True, True)],
)
def test_bos_rule_of_byte_level_files(byte_level_gguf: Write, pre: str, value: bool | None, expected: bool) -> None:
    ids = {} if value is None else {"add_bos_token": value}
    assert load_gguf_tokenizer(byte_level_gguf(pre, **ids)).adds_bos is expected


@pytest.mark.parametrize("adds_space", [True, False])
def test_llama_ids_equal_sentencepieces(
    sentencepiece_gguf: Write, sentencepiece_model: bytes, adds_space: bool
) -> None:
    ours = load_gguf_tokenizer(sentencepiece_gguf(add_space_prefix=adds_space))
    reference = sentencepiece.SentencePieceProcessor()
    reference.LoadFromSerializedProto(sentencepiece_model + (b"" if adds_space else NO_DUMMY_PREFIX))

    @settings(max_examples=200, deadline=None)
    @given(text=st.sampled_from(["The quick brown fox", "  two ", "Answer: yes\n東京"]) | _FUZZ)
    def check(text: str) -> None:
        if any(token in text for token in ("<s>", "</s>", "<unk>", "\0")):
            return
        ids = ours.encode(text, add_bos=False)
        assert ids == reference.encode(text)
        assert ours.decode(ids) == reference.decode(ids)

    check()
    assert (ours.bos_id, ours.eos_id, ours.adds_bos, ours.vocab_size) == (1, 2, True, reference.vocab_size())


def test_llama_control_tokens_and_byte_fallback(sentencepiece_gguf: Write) -> None:
    tokenizer = load_gguf_tokenizer(sentencepiece_gguf())
    ids = tokenizer.encode("<s>yes</s>☃", add_bos=True)
    assert ids.count(1) == 1
    assert 2 in ids
    assert [tokenizer.token_text(i) for i in ids[-3:]] == ["\ufffd"] * 3  # the snowman's three bytes
    assert tokenizer.decode(ids).endswith("☃")


def test_user_defined_tokens_hold_spaces_and_are_not_special(write_gguf: Write) -> None:
    tokens = ["<unk>", "<s>", "▁", "a", "▁a", "▁▁tool"]
    path = write_gguf(tokens, [2, 3, 1, 1, 1, 4], model="llama", scores=[0, 0, -1, -2, -3, 0], add_space_prefix=False)
    tokenizer = load_gguf_tokenizer(path)
    assert tokenizer.encode("a  tool a", add_bos=False) == [3, 5, 4]
    assert tokenizer.decode([3, 5, 4]) == "a  tool a"
    assert tokenizer.boundary_texts == ("<unk>", "<s>")


def test_written_files_stand_alone(byte_level_gguf: Write, tmp_path: Path) -> None:
    path = byte_level_gguf("llama-bpe", chat_template="{{ bos_token }}hi", pad_token_id=0)
    directory = tmp_path / "converted"
    write_gguf_tokenizer(path, directory)
    ours, written = load_gguf_tokenizer(path), load_tokenizer(directory)
    for text in TEXTS:
        assert ours.encode(text, add_bos=True) == written.encode(text, add_bos=True)
    for name in (
        "vocab_size",
        "bos_id",
        "eos_id",
        "adds_bos",
        "chat_template",
        "special_tokens",
        "boundary_texts",
    ):
        assert getattr(written, name) == getattr(ours, name), name
    # Another reader of tokenizer.json gets the BOS from the post-processor.
    assert Backend.from_file(str(directory / "tokenizer.json")).encode("yes").ids[0] == ours.bos_id


def test_written_config_says_that_there_is_no_bos(byte_level_json: str, write_gguf: Write, tmp_path: Path) -> None:
    path = write_gguf(["a", "b", "aa"], [1, 3, 1], model="gpt2", pre="qwen2", merges=["a a"], eos_token_id=1)
    write_gguf_tokenizer(path, tmp_path / "out")
    config = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"], config["add_bos_token"]) == (None, "b", False)
    assert load_tokenizer(tmp_path / "out").bos_id is None


def test_damaged_headers_are_refused(byte_level_gguf: Write, tmp_path: Path) -> None:
    data = byte_level_gguf().read_bytes()
    bad = tmp_path / "bad.gguf"
    for cut in (0, 3, 10, 24, 100, len(data) // 2):
        bad.write_bytes(data[:cut])
        with pytest.raises(CheckpointError, match=r"bad\.gguf"):
            read_gguf_header(bad)
    for offset in (4, 16, 24):  # version, number of keys, length of the first key
        bad.write_bytes(data[:offset] + b"\xff" * 8 + data[offset + 8 :])
        with pytest.raises(CheckpointError, match=r"bad\.gguf"):
            read_gguf_header(bad)


# Written by transformers 5.24 from HuggingFaceTB/SmolLM2-135M-Instruct.
SMOLLM2_IDS = {
    "<|im_start|>user\nHi 123<|im_end|>\n": [1, 4093, 198, 26843, 216, 33, 34, 35, 2, 198],
    "The answer is A, don't ask.": [504, 2988, 314, 330, 28, 1326, 982, 1998, 30],
    "na\xefve \u6771\u4eac \U0001f600\xa0x": [
        3546,
        46494,
        17097,
        247,
        126,
        16736,
        122,
        40303,
        218,
        15442,
        104,
    ],
    "def f(x):\n\treturn x  + 1\n\n\n": [
        1604,
        275,
        24,
        104,
        727,
        198,
        197,
        5406,
        1792,
        216,
        1232,
        216,
        33,
        16506,
    ],
}
CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "smollm2-135m-instruct"


@pytest.mark.model
@pytest.mark.skipif(not (CHECKPOINT / "tokenizer.json").exists(), reason="needs the demo model")
def test_smollm2_gives_the_reference_ids() -> None:
    tokenizer = load_tokenizer(CHECKPOINT)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (
        49152,
        1,
        2,
        False,
    )
    for text, ids in SMOLLM2_IDS.items():
        assert tokenizer.encode(text, add_bos=False) == ids
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == text
