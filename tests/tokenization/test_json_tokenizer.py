import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jprefill.errors import CheckpointError, InvalidRequestError
from jprefill.tokenization import load_tokenizer
from jprefill.tokenization.checks import guarded
from jprefill.tokenization.json_tokenizer import JsonTokenizer
from jprefill.tokenization.settings import TokenizerSettings

Write = Callable[..., Path]
CHATML = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>", "lstrip": False}}


@pytest.fixture(scope="module")
def plain(byte_level_json: str) -> JsonTokenizer:
    return JsonTokenizer(Backend.from_str(byte_level_json), TokenizerSettings(tokens={"bos_token": "<|im_start|>"}))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_every_text_comes_back_from_byte_level_ids(plain: JsonTokenizer, text: str) -> None:
    ids = plain.encode(text, add_bos=False)
    assert plain.decode(ids) == text
    assert all(0 <= i < plain.vocab_size for i in ids)


def test_empty_text_gives_nothing_or_bos(plain: JsonTokenizer) -> None:
    assert plain.encode("", add_bos=False) == []
    assert plain.encode("", add_bos=True) == [1]
    assert plain.decode([]) == ""


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("text", ["Answer", "<|im_start|>Answer"])
def test_bos_stands_in_front_exactly_once(write_json: Write, adds_bos: bool, text: str) -> None:
    tokenizer = load_tokenizer(write_json(CHATML, adds_bos=adds_bos))
    with_bos = tokenizer.encode(text, add_bos=True)
    assert with_bos[0] == 1
    assert with_bos.count(1) == 1
    assert with_bos[1:] == tokenizer.encode("Answer", add_bos=False)


def test_post_processor_never_adds_to_encode(write_json: Write) -> None:
    tokenizer = load_tokenizer(write_json(CHATML, adds_bos=True))
    assert 1 not in tokenizer.encode("Answer", add_bos=False)


@pytest.mark.parametrize(
    ("config", "post_processor", "expected"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"add_bos_token": True}, False, True),
        ({"add_bos_token": False}, True, False),
        ({"add_bos_token": None}, True, True),
    ],
)
def test_bos_rule_is_the_files_then_the_post_processors(
    write_json: Write, config: dict, post_processor: bool, expected: bool
) -> None:
    assert load_tokenizer(write_json(CHATML | config, adds_bos=post_processor)).adds_bos is expected


def test_tokenizer_without_bos_ignores_add_bos(write_json: Write) -> None:
    config = {"bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": True}
    tokenizer = load_tokenizer(write_json(config, files={"config.json": {"bos_token_id": 0}}))
    assert (tokenizer.bos_id, tokenizer.adds_bos) == (None, False)
    assert tokenizer.encode("Answer", add_bos=True) == tokenizer.encode("Answer", add_bos=False)
    assert "bos_token" not in tokenizer.special_tokens


def test_special_tokens_may_be_added_token_objects(write_json: Write) -> None:
    tokenizer = load_tokenizer(write_json(CHATML))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def test_special_tokens_map_is_read_and_config_wins(write_json: Write) -> None:
    files = {"special_tokens_map.json": {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"}}
    tokenizer = load_tokenizer(write_json({"eos_token": "<|im_end|>"}, files=files))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)


def test_model_files_name_the_ids_where_the_tokenizer_files_do_not(write_json: Write) -> None:
    files = {
        "config.json": {"bos_token_id": 0, "eos_token_id": 0},
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": [2, 0]},
    }
    tokenizer = load_tokenizer(write_json(files=files))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def test_named_token_that_is_missing_is_an_error(write_json: Write) -> None:
    with pytest.raises(CheckpointError, match=r"bos_token '<s>' is not in the vocabulary"):
        load_tokenizer(write_json({"bos_token": "<s>"}))
    directory = write_json({}, files={"config.json": {"eos_token_id": 9999}})
    with pytest.raises(CheckpointError, match=r"eos_token_id=9999 is not in the vocabulary"):
        load_tokenizer(directory)


def test_truncation_and_padding_of_the_file_are_off(byte_level_json: str) -> None:
    backend = Backend.from_str(byte_level_json)
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = JsonTokenizer(backend, TokenizerSettings())
    text = "The quick brown fox jumps over the lazy dog. " * 3
    assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == text


def test_added_tokens_in_text_are_one_token_each(plain: JsonTokenizer) -> None:
    ids = plain.encode("<|im_start|>user\n[TOOL]x<|im_end|>", add_bos=False)
    assert [plain.token_text(i) for i in ids if plain.token_text(i)[0] in "<["] == [
        "<|im_start|>",
        "[TOOL]",
        "<|im_end|>",
    ]
    assert plain.decode(ids) == "<|im_start|>user\n[TOOL]x<|im_end|>"
    assert plain.boundary_texts == ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def test_token_text_keeps_the_space_and_marks_broken_bytes(plain: JsonTokenizer) -> None:
    (the,) = plain.encode(" the", add_bos=False)
    assert plain.token_text(the) == " the"
    first_byte = plain.encode("\U0001f600", add_bos=False)[0]
    assert plain.token_text(first_byte) == "\ufffd"
    assert plain.token_text(10**6) == "<id 1000000>"
    assert plain.token_text(-1) == "<id -1>"


def test_decode_skips_ids_without_a_token(plain: JsonTokenizer) -> None:
    ids = plain.encode("Answer", add_bos=False)
    assert plain.decode([-1, *ids, 10**6, 2**40]) == "Answer"


def test_token_text_of_a_metaspace_vocabulary() -> None:
    backend = Backend(models.BPE({"▁yes": 0, "<0x0A>": 1, "<0xE6>": 2}, []))
    tokenizer = JsonTokenizer(backend, TokenizerSettings())
    assert [tokenizer.token_text(i) for i in range(3)] == [" yes", "\n", "\ufffd"]


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff", "é" * 50 + "\ud83d"])
def test_lone_surrogate_is_refused_with_its_place(plain: JsonTokenizer, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"lone surrogate \\u[0-9a-f]{{4}} at character {len(text) - 1}"):
        plain.encode(text, add_bos=False)


def test_rust_panic_becomes_one_refused_request() -> None:
    backend = Backend(models.BPE({"a": 0, "b": 1}, []))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")  # the regex engine gives up
    tokenizer = JsonTokenizer(backend, TokenizerSettings())
    with pytest.raises(InvalidRequestError, match="the tokenizer failed on this input: the library panicked"):
        tokenizer.encode("a" * 40 + "b", add_bos=False)
    assert tokenizer.encode("ab", add_bos=False) == [0, 1]


def test_library_error_becomes_one_refused_request() -> None:
    tokenizer = JsonTokenizer(Backend(models.WordLevel({"a": 0}, unk_token="?")), TokenizerSettings())
    with pytest.raises(InvalidRequestError, match="failed on this input: WordLevel error"):
        tokenizer.encode("b", add_bos=False)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, KeyError])
def test_other_exceptions_pass_the_guard(error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(error):
        guarded(fail)


def test_broken_tokenizer_json_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "nothing"}}))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)
