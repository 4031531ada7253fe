"""A block's file gives back exactly what was written, or says why not; never anything else."""

import os
import stat
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvblocks import FINGERPRINT, chain, form, payload, same

from jprefill.errors import ConfigError
from jprefill.kvstore import block_file
from jprefill.kvstore.block_file import BlockForm, Miss, block_path, read_block, scan, write_block

KEYS = chain(2)
KEY, TOKENS = KEYS.hashes[0], KEYS.tokens[0]


def written(root, of=None, key=KEY, tokens=TOKENS):
    of = of or form()
    path = block_path(root, of.fingerprint, key)
    write_block(path, of, key, tokens, payload(key, of))
    return path


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_was_written_is_read_bit_for_bit(tmp_path, dtype):
    of = form(dtype=dtype)
    path = written(tmp_path, of)
    read = read_block(path, of, KEY, TOKENS)
    assert same(read, payload(KEY, of))
    assert read.flags.owndata
    assert path.stat().st_size == of.file_bytes


def test_folders_and_files_are_for_the_owner_only(tmp_path):
    path = written(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.parent.stat().st_mode) == 0o700


def test_writing_again_replaces_the_file_and_leaves_nothing_else(tmp_path):
    path = written(tmp_path)
    write_block(path, form(), KEY, TOKENS, payload(KEY), syncs=True)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"of": form(fingerprint=bytes(32))}, Miss.MODEL),
        ({"of": form(num_layers=3)}, Miss.DAMAGED),
        ({"of": form(dtype="float16")}, Miss.DAMAGED),
        ({"key": KEYS.hashes[1]}, Miss.DAMAGED),
        ({"tokens": TOKENS + np.int32(1)}, Miss.TOKENS),
    ],
)
def test_a_file_of_something_else_is_named_as_such(tmp_path, change, reason):
    path = written(tmp_path)
    expected = {"of": form(), "key": KEY, "tokens": TOKENS} | change
    assert read_block(path, *expected.values()) is reason


def test_another_format_version_is_a_miss_whatever_follows(tmp_path, monkeypatch):
    monkeypatch.setattr(block_file, "FORMAT_VERSION", 2)
    path = written(tmp_path)
    monkeypatch.undo()
    assert read_block(path, form(), KEY, TOKENS) is Miss.VERSION


def test_a_missing_file_is_a_miss(tmp_path):
    assert read_block(tmp_path / "none", form(), KEY, TOKENS) is Miss.MISSING


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_plain_file_is_neither_followed_nor_waited_for(tmp_path, kind):
    path = written(tmp_path)
    moved = path.rename(tmp_path / "moved")
    if kind == "link":
        path.symlink_to(moved)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert read_block(path, form(), KEY, TOKENS) is Miss.DAMAGED


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_damage_gives_wrong_bytes(tmp_path_factory, data):
    root = tmp_path_factory.getbasetemp() / "damage"
    path = written(root)
    good = path.read_bytes()
    size = len(good)
    kind = data.draw(st.sampled_from(["bit", "cut", "append", "zeros", "piece"]))
    at = data.draw(st.integers(0, size - 1))
    if kind == "bit":
        flipped = good[at] ^ 1 << data.draw(st.integers(0, 7))
        bad = good[:at] + bytes([flipped]) + good[at + 1 :]
    elif kind == "cut":
        bad = good[:at]
    elif kind == "append":
        bad = good + data.draw(st.binary(min_size=1, max_size=2000))
    elif kind == "zeros":
        bad = good[:at] + bytes(size - at)
    else:
        piece = data.draw(st.binary(min_size=1, max_size=64))
        bad = (good[:at] + piece + good[at + len(piece) :])[:size]
    path.write_bytes(bad)
    found = read_block(path, form(), KEY, TOKENS)
    if bad == good:  # a tail of zeros where zeros were
        assert same(found, payload(KEY))
    else:
        assert isinstance(found, Miss)


def test_swapped_files_are_misses(tmp_path):
    one, other = (
        written(tmp_path, key=key, tokens=tokens) for key, tokens in zip(KEYS.hashes, KEYS.tokens, strict=True)
    )
    one.rename(tmp_path / "x")
    other.rename(one)
    (tmp_path / "x").rename(other)
    assert read_block(one, form(), KEY, TOKENS) is Miss.DAMAGED


def test_a_scan_finds_blocks_of_every_model_and_nothing_else(tmp_path):
    foreign = form(fingerprint=bytes(32), num_layers=1)
    paths = [written(tmp_path), written(tmp_path, foreign)]
    for name in ("notes.txt", f"{FINGERPRINT.hex()}/readme", f"{paths[0].parent.relative_to(tmp_path)}/x"):
        (tmp_path / name).write_text("mine")
    found = {(entry.fingerprint, entry.key, entry.num_bytes) for entry in scan(tmp_path)}
    assert found == {(FINGERPRINT, KEY, form().file_bytes), (bytes(32), KEY, foreign.file_bytes)}
    assert (tmp_path / "notes.txt").exists()


def test_a_scan_of_no_folder_finds_nothing(tmp_path):
    assert list(scan(tmp_path / "none")) == []


def test_a_temporary_file_of_a_living_writer_is_spared(tmp_path, monkeypatch):
    path = block_path(tmp_path, FINGERPRINT, KEY)
    seen = []
    real = block_file._write_all

    def looks(fd, parts):
        real(fd, parts)
        list(scan(tmp_path))
        seen.extend(path.parent.iterdir())

    monkeypatch.setattr(block_file, "_write_all", looks)
    written(tmp_path)
    assert len(seen) == 1
    assert list(path.parent.iterdir()) == [path]


def test_a_temporary_file_without_a_writer_is_removed_by_a_scan(tmp_path):
    path = written(tmp_path)
    left = path.with_name(path.name + "-1-0.tmp")
    left.write_bytes(b"half")
    assert len(list(scan(tmp_path))) == 1
    assert not left.exists()


def test_a_short_write_goes_on_where_it_stopped(tmp_path, monkeypatch):
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, parts: real(fd, [memoryview(parts[0])[:7]]))
    path = written(tmp_path)
    monkeypatch.undo()
    assert same(read_block(path, form(), KEY, TOKENS), payload(KEY))


def test_a_short_read_goes_on_where_it_stopped(tmp_path, monkeypatch):
    path = written(tmp_path)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, offset: real(fd, [parts[0][:7]], offset))
    assert same(read_block(path, form(), KEY, TOKENS), payload(KEY))


@pytest.mark.parametrize(
    "wrong", [{"fingerprint": b"short"}, {"shape": (2, 3, 8, 1, 4)}, {"dtype": np.dtype(np.int32)}]
)
def test_a_form_that_no_block_can_have_is_refused(wrong):
    good = form()
    with pytest.raises(ConfigError, match="must be"):
        replace(good, **wrong)
    assert isinstance(good, BlockForm)
