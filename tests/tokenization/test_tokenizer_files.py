import json
from collections.abc import Callable
from pathlib import Path

import pytest

import jprefill.tokenization
from jprefill.errors import CheckpointError
from jprefill.tokenization import copy_tokenizer_files, load_tokenizer
from jprefill.tokenization.json_tokenizer import JsonTokenizer
from jprefill.tokenization.sentencepiece_tokenizer import SentencePieceTokenizer

Write = Callable[..., Path]


def test_json_wins_over_sentencepiece_over_gguf(
    write_json: Write, sentencepiece_model: bytes, byte_level_gguf: Write
) -> None:
    directory = byte_level_gguf(bos_token_id=0).parent
    assert load_tokenizer(directory).bos_id == 0
    (directory / "tokenizer.model").write_bytes(sentencepiece_model)
    assert isinstance(load_tokenizer(directory), SentencePieceTokenizer)
    write_json({"bos_token": "<|im_end|>"})
    tokenizer = load_tokenizer(directory)
    assert isinstance(tokenizer, JsonTokenizer)
    assert tokenizer.bos_id == 2


def test_a_gguf_file_is_a_checkpoint_of_its_own(byte_level_gguf: Write) -> None:
    assert load_tokenizer(byte_level_gguf()).bos_id == 1


def test_nothing_found_says_what_was_looked_for(tmp_path: Path, byte_level_gguf: Write) -> None:
    wanted = r"looked for tokenizer\.json, tokenizer\.model and one \.gguf file"
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=rf"{wanted} \(0 are there\)"):
        load_tokenizer(tmp_path / "empty")
    byte_level_gguf(name="a.gguf")
    byte_level_gguf(name="b.gguf")
    with pytest.raises(CheckpointError, match=rf"{wanted} \(2 are there\)"):
        load_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"missing: no such directory or \.gguf file") as error:
        load_tokenizer(tmp_path / "missing")
    assert str(tmp_path) not in str(error.value)


@pytest.mark.parametrize(
    ("files", "config", "expected"),
    [
        ({}, {"chat_template": "key"}, "key"),
        ({"chat_template.json": {"chat_template": "json"}}, {"chat_template": "key"}, "json"),
        (
            {"chat_template.jinja": "file", "chat_template.json": {"chat_template": "json"}},
            {"chat_template": "key"},
            "file",
        ),
        (
            {},
            {
                "chat_template": [
                    {"name": "tool_use", "template": "tools"},
                    {"name": "default", "template": "plain"},
                ]
            },
            "plain",
        ),
        ({}, {"chat_template": [{"name": "tool_use", "template": "tools"}]}, None),
        ({}, {}, None),
    ],
)
def test_chat_template_is_found(write_json: Write, files: dict, config: dict, expected: str | None) -> None:
    assert load_tokenizer(write_json(config, files=files)).chat_template == expected


@pytest.mark.parametrize("content", ["{not json", "[1]", "\ufeff{}"])
def test_broken_config_names_the_file(write_json: Write, content: str) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        load_tokenizer(write_json(files={"tokenizer_config.json": content}))


def test_role_of_a_wrong_kind_is_named(write_json: Write) -> None:
    with pytest.raises(CheckpointError, match=r"bos_token must be a text or an AddedToken object, not 7"):
        load_tokenizer(write_json({"bos_token": 7}))


def test_copies_what_there_is(write_json: Write, tmp_path: Path) -> None:
    files = {"special_tokens_map.json": {}, "chat_template.jinja": "{{ 1 }}", "config.json": {}}
    source = write_json({"bos_token": "<|im_start|>"}, files=files)
    names = copy_tokenizer_files(source, tmp_path / "out")
    assert names == (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(names)
    assert load_tokenizer(tmp_path / "out").chat_template == "{{ 1 }}"
    assert copy_tokenizer_files(tmp_path / "out", tmp_path / "out") == names


def test_copies_a_gguf_vocabulary_as_json(byte_level_gguf: Write, tmp_path: Path) -> None:
    path = byte_level_gguf()
    for source in (path, path.parent):
        names = copy_tokenizer_files(source, tmp_path / "out")
        assert names == ("tokenizer.json", "tokenizer_config.json")
        assert load_tokenizer(tmp_path / "out").encode("yes", add_bos=True)[0] == 1


def test_copying_from_nowhere_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer found"):
        copy_tokenizer_files(tmp_path, tmp_path / "out")


def test_public_names_load_lazily() -> None:
    for name in jprefill.tokenization.__all__:
        assert getattr(jprefill.tokenization, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = jprefill.tokenization.nothing


def test_tokenization_needs_no_jax(write_json: Write) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from jprefill.tokenization import *\n"
        "assert not {'jax', 'flax'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_settings_survive_odd_but_legal_files(write_json: Write) -> None:
    files = {"generation_config.json": {"eos_token_id": [], "bos_token_id": None}}
    tokenizer = load_tokenizer(write_json(files=files))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, None)
    assert json.dumps(tokenizer.special_tokens) == "{}"


@pytest.mark.parametrize("entries", [{"1": {}}, {"one": {"content": "x"}}, {"1": "x"}, [1]])
def test_added_tokens_of_a_wrong_shape_are_an_error(write_json: Write, entries: object) -> None:
    with pytest.raises(CheckpointError, match="added_tokens_decoder"):
        load_tokenizer(write_json({"added_tokens_decoder": entries}))
