"""A disk that is full, broken, read-only or locked away: the tier goes off with one warning, answers stay right."""

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from kvblocks import chain, form, payload, same

from jprefill.kvstore import block_file
from jprefill.kvstore.disk_tier import DiskTier
from jprefill.kvstore.host_tier import HostTier
from jprefill.kvstore.lower_tiers import LowerTiers

CHILD = Path(__file__).with_name("kv_child.py")
KEYS = chain(4)
CALLS = [
    "open",
    "writev",
    "replace",
    "close",
    "fstat",
    "pread",
    "preadv",
    "utime",
    "scandir",
    "mkdir",
    "stat",
    "unlink",
]


def child(folder, *limit, before=()):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    argv = [*before, sys.executable, str(CHILD), "put", str(folder), *limit]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def is_off(record, reason):
    assert not record["is_on"]
    assert record["num_errors"] == 1
    assert len(record["warnings"]) == 1
    assert reason in record["warnings"][0]
    assert record["temporary"] == []
    return True


def test_a_file_size_limit_switches_the_tier_off(tmp_path):
    record = child(tmp_path / "kv", "file-size")
    assert is_off(record, "write failed: File too large; the disk tier is off")
    assert record["done"] == [False] * 4


def test_a_full_disk_switches_the_tier_off(tmp_path):
    mount = ["unshare", "-Urm", "sh", "-c", f'mount -t tmpfs -o size=1m none {tmp_path} && exec "$@"', "sh"]
    try:
        works = subprocess.run([*mount, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        works = False
    if not works:
        pytest.skip("this machine lets nobody mount a tmpfs in a namespace")
    record = child(tmp_path / "kv", before=mount)
    assert is_off(record, "write failed: No space left on device")
    assert 0 < sum(record["done"]) < 8  # of 128 KiB each


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
def test_a_folder_that_may_not_be_written_switches_the_tier_off():
    folder = Path(tempfile.mkdtemp())  # not below pytest's own, where nobody may not look
    try:
        folder.chmod(0o755)
        (folder / "kv").mkdir(mode=0o500)
        os.chown(folder / "kv", 65534, 65534)
        assert is_off(child(folder / "kv", "nobody"), "write failed: Permission denied")
    finally:
        shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_of_mode_0500_switches_the_tier_off(tmp_path):
    (tmp_path / "kv").mkdir(mode=0o500)
    assert is_off(child(tmp_path / "kv", "as-i-am"), "write failed: Permission denied")


def test_a_device_that_is_always_full_switches_the_tier_off(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(block_file, "_create", lambda path: os.open("/dev/full", os.O_WRONLY))
    tier = DiskTier(tmp_path / "kv", 10**6, form())
    assert not any(tier.put(key, tokens, payload(key)) for key, tokens in zip(KEYS.hashes, KEYS.tokens, strict=True))
    assert not tier.is_on
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left on device" in caplog.text


def test_too_many_open_files_is_a_miss_and_the_tier_stays_on(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path / "kv", 10**6, form())
    tier.put(KEYS.hashes[0], KEYS.tokens[0], payload(KEYS.hashes[0]))
    monkeypatch.setattr(os, "open", failing(os.open, errno.EMFILE))
    assert tier.get(KEYS.hashes[0], KEYS.tokens[0]) is None
    assert not tier.put(KEYS.hashes[1], KEYS.tokens[1], payload(KEYS.hashes[1]))
    monkeypatch.undo()
    assert tier.is_on
    assert tier.stats().num_errors == 2
    assert same(tier.get(KEYS.hashes[0], KEYS.tokens[0]), payload(KEYS.hashes[0]))


def failing(real, number, at=0):
    """`real`, but its call number `at` and all later ones fail."""
    calls = iter(range(1 << 30))

    def call(*args, **options):
        if next(calls) < at:
            return real(*args, **options)
        if real is CLOSE:
            real(*args)
        raise OSError(number, os.strerror(number))

    return call


CLOSE = os.close


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_fails_from_the_nth_time_on_gives_no_wrong_block(tmp_path, monkeypatch, caplog, name, number):
    caplog.set_level(logging.WARNING, "jprefill.kvstore")
    for at in range(12):
        root = tmp_path / str(at)
        filled = DiskTier(root, 10**6, form())
        filled.put(KEYS.hashes[0], KEYS.tokens[0], payload(KEYS.hashes[0]))
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing(getattr(os, name), number, at))
            tier = DiskTier(root, 3 * form().file_bytes, form())
            for _ in range(2):
                for key, tokens in zip(KEYS.hashes, KEYS.tokens, strict=True):
                    found = tier.get(key, tokens)
                    assert found is None or same(found, payload(key))
                    tier.put(key, tokens, payload(key))
        assert len(caplog.records) == (not tier.is_on)
        again = DiskTier(root, 10**6, form())
        for key, tokens in zip(KEYS.hashes, KEYS.tokens, strict=True):
            found = again.get(key, tokens)
            assert found is None or same(found, payload(key))
        assert again.is_on
        assert list(root.glob("*/*/*.tmp")) == []


def test_when_the_disk_fails_host_memory_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "writev", failing(os.writev, errno.EIO, at=1))
    lower = LowerTiers(HostTier(2 * form().payload_bytes), DiskTier(tmp_path / "kv", 10**6, form()))
    try:
        for key, tokens in zip(KEYS.hashes, KEYS.tokens, strict=True):
            assert lower.put([(key, tokens)], Payload(key))
        assert not lower.flush(10.0)
        assert not lower.stats()["disk"].is_on
        assert lower.num_found(KEYS, 0, 4) == 0
        found = lower.fetch(KEYS, 2, 4)
        assert [same(got, payload(key)) for got, key in zip(found, KEYS.hashes[2:], strict=True)] == [True, True]
    finally:
        lower.close()


class Payload:
    def __init__(self, key):
        self.key = key

    def wait(self):
        return payload(self.key)[None]
