"""A conversion that is killed leaves no checkpoint, and nothing that passes for one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jprefill.errors import CheckpointError
from jprefill.model.checkpoints import convert, load

ROOT = Path(__file__).parents[3]
CHILD = """
import importlib, sys, time

source, target, moment = sys.argv[1:]
module = importlib.import_module("jprefill.model.checkpoints.conversion")
importlib.import_module("jprefill.model.checkpoints.orbax")._GROUP_BYTES = 1

def stop(*_):
    print("here", flush=True)
    time.sleep(60)

real = module.digest_tensor
if moment == "weights":
    module.digest_tensor = lambda name, array: stop() if "layers.1" in name else real(name, array)
else:
    module.Manifest.write = stop
module.convert(source, target, progress=False)
"""


@pytest.mark.parametrize("moment", ["weights", "manifest"])
def test_killed_conversion_leaves_no_checkpoint(tiny, hf_directory, tmp_path, moment):
    target = tmp_path / "converted"
    command = [sys.executable, "-c", CHILD, str(hf_directory), str(target), moment]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "here\n"
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=30)
    assert not target.exists()
    (partial,) = tmp_path.glob("converted.partial-*")
    with pytest.raises(CheckpointError, match="converted: no such file or directory"):
        load(target)
    with pytest.raises(CheckpointError, match="is left from an interrupted conversion"):
        load(partial)
    convert(hf_directory, target, progress=False)
    assert len(load(target).weights) == len(tiny.weights)


def test_complete_partial_directory_is_refused_too(hf_directory, tmp_path):
    """Killed between the manifest and the rename."""
    convert(hf_directory, tmp_path / "converted", progress=False)
    (tmp_path / "converted").rename(tmp_path / "converted.partial-123")
    with pytest.raises(CheckpointError, match="is left from an interrupted conversion"):
        load(tmp_path / "converted.partial-123")


def test_failed_overwrite_keeps_the_old_checkpoint(tiny, hf_directory, tmp_path):
    before = convert(hf_directory, tmp_path / "converted", progress=False)
    (hf_directory / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError):
        convert(hf_directory, tmp_path / "converted", overwrite=True, progress=False)
    assert load(tmp_path / "converted").fingerprint == before.fingerprint


def test_unwritable_destination_is_one_error(hf_directory, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="converted: cannot be written: Not a directory"):
        convert(hf_directory, tmp_path / "file" / "converted", progress=False)


def test_failed_rename_brings_the_old_checkpoint_back(hf_directory, tmp_path, monkeypatch):
    before = convert(hf_directory, tmp_path / "converted", progress=False)
    rename = Path.rename

    def fail_for_new(self, target):
        if ".partial-" in self.name:
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_for_new)
    with pytest.raises(CheckpointError, match="converted: cannot be written: No space left on device"):
        convert(hf_directory, tmp_path / "converted", dtype="float32", overwrite=True, progress=False)
    assert load(tmp_path / "converted").fingerprint == before.fingerprint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["converted", "tiny"]
