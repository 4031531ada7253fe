"""KV handed over as a file: what comes in is what went out, and nothing in the file is believed."""

import argparse
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvblocks import BLOCK_SIZE, FINGERPRINT, chain, form, payload, same
from safetensors import safe_open
from safetensors.numpy import save_file

from jprefill.errors import ConfigError, InvalidRequestError
from jprefill.kvstore import command
from jprefill.kvstore.disk_tier import DiskTier
from jprefill.kvstore.exchange import export_blocks, import_blocks
from jprefill.kvstore.hashing import KeyMaker

KEYS = chain(4)
MAKER = KeyMaker(FINGERPRINT, BLOCK_SIZE)


def exported(folder, keys=KEYS, count=3, of=None):
    path = folder / "blocks.safetensors"
    of = of or form()
    export_blocks(path, of, keys, [payload(key, of) for key in keys.hashes[:count]], model_name="tiny")
    return path


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_was_exported_is_imported_bit_for_bit(tmp_path, dtype):
    of = form(dtype=dtype)
    found = import_blocks(exported(tmp_path, of=of), of, MAKER)
    assert found.keys.hashes == KEYS.hashes[:3]
    assert found.model_name == "tiny"
    assert all(same(got, payload(key, of)) for got, key in zip(found.payloads, found.keys.hashes, strict=True))


def test_any_safetensors_reader_can_read_it(tmp_path):
    with safe_open(exported(tmp_path), framework="np") as file:
        assert file.metadata()["format_version"] == "1"
        assert file.get_tensor("kv").shape == (3, *form().shape)
        assert np.array_equal(file.get_tensor("tokens"), KEYS.tokens[:3])
        assert file.get_tensor("keys").tobytes() == b"".join(KEYS.hashes[:3])


def test_another_model_is_refused_by_its_fingerprint(tmp_path):
    other = form(fingerprint=bytes(32))
    with pytest.raises(InvalidRequestError, match=r"of model 'tiny' with fingerprint 000102030405\.\.\."):
        import_blocks(exported(tmp_path), other, KeyMaker(bytes(32), BLOCK_SIZE))


def test_another_salt_is_refused(tmp_path):
    path = exported(tmp_path, chain(4, salt="tenant"))
    with pytest.raises(InvalidRequestError, match="give the salt it was exported with"):
        import_blocks(path, form(), MAKER)
    assert len(import_blocks(path, form(), MAKER, "tenant").keys) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": "2"}, "format_version='2': '1' is read"),
        ({"checksum": "00"}, "its checksum does not match"),
        ({"kv": np.zeros((3, 2), np.float32)}, "tensor 'kv' is float32"),
        ({"tokens": KEYS.tokens[1:4]}, "its checksum does not match"),
        ({"keys": np.zeros((3, 32), np.uint8)}, "its keys are not those of its tokens"),
        ({"keys": np.zeros((2, 32), np.uint8)}, "tensor 'kv' is bfloat16"),
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path, change, message):
    path = exported(tmp_path)
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in ("kv", "tokens", "keys")}
    tensors |= {name: value for name, value in change.items() if name in tensors}
    metadata |= {name: value for name, value in change.items() if name in metadata}
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, path, metadata)
    with pytest.raises(InvalidRequestError, match=message):
        import_blocks(path, form(), MAKER)


def test_a_missing_file_and_a_missing_folder_are_named(tmp_path):
    with pytest.raises(InvalidRequestError, match=r"none: cannot be read"):
        import_blocks(tmp_path / "none", form(), MAKER)
    with pytest.raises(InvalidRequestError, match=r"cannot be written"):
        exported(tmp_path / "none")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_damage_is_imported_as_something_else(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / "exchange"
    folder.mkdir(exist_ok=True)
    path = exported(folder)
    good = path.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    bad = data.draw(
        st.sampled_from(
            [good[:at], good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :], good[:at] + bytes(len(good) - at)]
        )
    )
    path.write_bytes(bad)
    try:
        found = import_blocks(path, form(), MAKER)
    except InvalidRequestError:
        return
    assert found.keys.hashes == KEYS.hashes[:3]
    assert all(same(got, payload(key)) for got, key in zip(found.payloads, KEYS.hashes, strict=False))


# ---- the command -------------------------------------------------------------------------------------------------


def run(*argv):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(arg) for arg in argv]))


def filled(root, *numbers, fingerprint=FINGERPRINT, name="tiny"):
    tier = DiskTier(root, 10**6, form(fingerprint), model_name=name)
    for i in numbers:
        tier.put(KEYS.hashes[i], KEYS.tokens[i], payload(KEYS.hashes[i]), used_ns=(i + 1) * 10**18)
    return tier


def test_stat_counts_by_model(tmp_path, capsys):
    filled(tmp_path / "kv", 0, 1)
    filled(tmp_path / "kv", 2, fingerprint=bytes(32), name="other")
    assert run("stat", "--kv-disk-path", tmp_path / "kv", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["num_blocks"], record["num_bytes"]) == (3, 3 * form().file_bytes)
    newest, oldest = record["models"]
    assert (newest["model"], newest["num_blocks"], newest["fingerprint"]) == ("other", 1, bytes(32).hex())
    assert (oldest["oldest"], oldest["newest"]) == ("2001-09-09T01:46:40+00:00", "2033-05-18T03:33:20+00:00")
    assert run("stat", "--kv-disk-path", tmp_path / "kv") == 0
    assert capsys.readouterr().out.startswith("3 blocks, 0.0 MiB; models: 2\n")


def test_stat_makes_no_folder(tmp_path):
    with pytest.raises(ConfigError, match="No such file or directory"):
        run("stat", "--kv-disk-path", tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.fixture
def model(monkeypatch):
    """Stands in for a checkpoint; its tokenizer reads numbers."""
    tokens = {"prompt": KEYS.tokens.reshape(-1)}
    fake = command._Model("tiny", form(), MAKER, lambda text: tokens.get(text, np.zeros(9, np.int32)))
    monkeypatch.setattr(command, "_open", lambda path, config: fake)


@pytest.mark.usefixtures("model")
def test_blocks_travel_from_one_folder_to_another(tmp_path, capsys):
    here, there, file, prompt = (tmp_path / name for name in ("here", "there", "x.safetensors", "prompt.txt"))
    prompt.write_text("prompt\n")
    filled(here, 0, 1, 3)
    assert run("export", "--model", "m", "--kv-disk-path", here, "--prompt-file", prompt, "--output", file) == 0
    assert "exported 2 of 4 blocks of tiny" in capsys.readouterr().out
    shutil.rmtree(here)
    assert run("import", "--model", "m", "--kv-disk-path", there, "--input", file, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"num_blocks": 2, "block_size": 8}
    tier = DiskTier(there, 10**6, form())
    for key, tokens in zip(KEYS.hashes[:2], KEYS.tokens[:2], strict=True):
        assert same(tier.get(key, tokens), payload(key))


@pytest.mark.usefixtures("model")
def test_importing_evicts_nothing_whatever_the_limit_says(tmp_path):
    filled(tmp_path / "kv", 3)
    file = exported(tmp_path)
    argv = ["import", "--model", "m", "--kv-disk-path", tmp_path / "kv", "--input", file, "--kv-disk-bytes", 1]
    assert run(*argv) == 0
    tier = DiskTier(tmp_path / "kv", 10**6, form())
    assert [tier.has(key) for key in KEYS.hashes] == [True] * 4


@pytest.mark.usefixtures("model")
def test_a_prompt_without_stored_blocks_is_said_so(tmp_path):
    filled(tmp_path / "kv", 0)
    (tmp_path / "p").write_text("something else")
    argv = ["export", "--model", "m", "--kv-disk-path", tmp_path / "kv", "--prompt-file", tmp_path / "p"]
    with pytest.raises(InvalidRequestError, match="holds no block of this prompt, model and salt"):
        run(*argv, "--output", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_folder_must_be_named(tmp_path):
    with pytest.raises(ConfigError, match="--kv-disk-path: must be given"):
        run("import", "--model", "m", "--input", tmp_path / "x")


def test_keys_that_are_not_a_chain_from_the_root_are_refused(tmp_path):
    tail = replace(KEYS, hashes=KEYS.hashes[1:], tokens=KEYS.tokens[1:])
    with pytest.raises(InvalidRequestError, match="its keys are not those of its tokens"):
        import_blocks(exported(tmp_path, tail), form(), MAKER)
