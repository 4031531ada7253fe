"""`org/name` goes through the Hugging Face cache; the network is never needed here."""

import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from jprefill.errors import CheckpointError
from jprefill.model.checkpoints import convert, load, open_source
from jprefill.model.checkpoints.hub import is_repo_id

ROOT = Path(__file__).parents[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OFFLINE = """
import sys
from jprefill.errors import CheckpointError
from jprefill.model.checkpoints import open_source

print(len(open_source("org/tiny").names()))
try:
    open_source("org/other")
except CheckpointError as error:
    print(error)
"""


def test_name_is_looked_up_in_the_cache(tiny, hf_directory, tmp_path, monkeypatch):
    asked = {}

    def snapshot_download(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        return str(hf_directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert load("org/tiny").name == "org/tiny"
    assert asked["repo_id"] == "org/tiny"
    assert {"*.json", "*.safetensors", "*.jinja", "tokenizer.model"} <= set(asked["allow_patterns"])
    manifest = convert("org/tiny", tmp_path / "converted", progress=False)
    assert (manifest.name, manifest.source_name) == ("converted", "org/tiny")


@pytest.mark.parametrize(
    "error",
    [LocalEntryNotFoundError("Cannot reach the hub.\nMore text."), ValueError("bad name"), ConnectionError()],
)
def test_failure_is_one_sentence(monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError) as caught:
        open_source("org/tiny")
    assert caught.value.message.startswith("org/tiny: no such local path, and the Hugging Face hub did not give it: ")
    assert "\n" not in caught.value.message
    assert not caught.value.message.endswith(": ")


def test_offline_cache_is_enough(tiny, tmp_path):
    repo = tmp_path / "home" / "hub" / "models--org--tiny"
    (repo / "snapshots").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    tiny.write_hf(repo / "snapshots" / COMMIT)
    environment = os.environ | {
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
    child = subprocess.run([sys.executable, "-c", OFFLINE], env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    found, message = child.stdout.splitlines()
    assert int(found) == len(tiny.weights)
    assert message.startswith("org/other: no such local path, and the Hugging Face hub did not give it: ")


def test_local_directory_wins_over_the_hub(tiny, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    (tmp_path / "org").mkdir()
    tiny.write_hf(tmp_path / "org" / "tiny")
    monkeypatch.chdir(tmp_path)
    assert open_source("org/tiny").name == "tiny"
    with pytest.raises(CheckpointError, match=r"\./org/other: no such file or directory"):
        open_source("./org/other")


@pytest.mark.parametrize("text", ["/abs/path", "./org/name", "../name", "a/b/c", "name", "org/", "org/na me", "~/x"])
def test_paths_are_no_repository_names(text):
    assert not is_repo_id(text)


def test_repository_names():
    assert is_repo_id("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert is_repo_id("meta-llama/Llama-3.1_8B.v2")
