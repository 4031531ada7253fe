"""The repository itself: what is tracked, what the documents promise, whether the scripts parse."""

import importlib
import pkgutil
import re
import subprocess
from pathlib import Path

import pytest

import jprefill

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_BYTES = 1_000_000
# Spelled in parts, so that this file does not name what it looks for.
MACHINE_PATHS = re.compile("/wo" + r"rk/(main|shared|tmp|\.)|/ro" + r"ot/\.|/op" + "t/(pypi|wheels)")
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "checkpoints/README.md")
CODE_SUFFIXES = {".py", ".toml", ".md", ".lock", ".in", ".txt", ".json", ".jsonl", ""}


def project_files() -> list[Path]:
    """Files that git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def shell_scripts() -> list[Path]:
    candidates = [*(ROOT / "scripts").iterdir(), ROOT / ".ci" / "run"]
    return sorted(p for p in candidates if p.is_file() and p.read_bytes().startswith(b"#!/usr/bin/env bash"))


def test_no_file_names_a_path_of_the_machine_it_was_written_on():
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in project_files()
        if path.suffix in CODE_SUFFIXES
        for match in MACHINE_PATHS.finditer(path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert found == []


def test_nothing_large_is_tracked():
    large = {str(p.relative_to(ROOT)): p.stat().st_size for p in project_files() if p.stat().st_size > MAX_FILE_BYTES}
    assert large == {}


def test_locks_hold_hashes_and_no_index_and_no_torch():
    locks = sorted((ROOT / "requirements").glob("*.lock"))
    assert {lock.stem for lock in locks} >= {"cpu", "demo", "dev", "cuda12", "cuda13"}
    for lock in locks:
        text = lock.read_text()
        assert "--hash=sha256:" in text, lock.name
        assert not re.search(r"^(--|-f|torch==)|file:|https?://", text, re.MULTILINE), lock.name


def test_classes_named_in_architecture_exist():
    document = ROOT / "ARCHITECTURE.md"
    if not document.exists():
        pytest.skip("no ARCHITECTURE.md")
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    named = set(re.findall(r"`([A-Z][a-z0-9]+(?:[A-Z][A-Za-z0-9]*)+|[A-Z][a-z]{3,})(?:\.\w+)?`", text))
    assert named - class_names() == set()


def class_names() -> set[str]:
    """Classes and aliases that a module of the package defines or imports."""
    names: set[str] = set()
    for module in pkgutil.walk_packages(jprefill.__path__, "jprefill."):
        if not module.name.endswith("__main__"):
            names |= {name for name in vars(importlib.import_module(module.name)) if name[0].isupper()}
    return names


def test_commands_in_documents_exist():
    targets, missing = make_targets(), []
    for name in DOCUMENTS:
        if not (ROOT / name).exists():
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        missing += [f"{name}: make {t}" for t in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.M) if t not in targets]
        scripts = re.findall(r"\bscripts/[\w./]+\b", text)
        missing += [f"{name}: {script}" for script in scripts if not (ROOT / script).exists()]
    assert missing == []


def test_links_in_documents_lead_somewhere():
    broken = [
        f"{name}: {target}"
        for name in DOCUMENTS
        if (ROOT / name).exists()
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / name).read_text(encoding="utf-8"))
        if not (ROOT / name).parent.joinpath(target).exists()
    ]
    assert broken == []


@pytest.mark.parametrize("script", shell_scripts(), ids=lambda path: path.name)
def test_shell_script_parses_and_stops_at_errors(script: Path):
    assert subprocess.run(["bash", "-n", script], capture_output=True, text=True).stderr == ""
    assert re.search(r"^set -e?uo pipefail$", script.read_text(), re.MULTILINE)
    assert script.stat().st_mode & 0o111, "not executable"


def test_setup_refuses_an_unknown_set_by_name():
    run = subprocess.run([ROOT / "scripts" / "setup", "nosuch"], capture_output=True, text=True)
    assert run.returncode == 1
    assert "no set 'nosuch': allowed are cpu, demo, dev, plan, cuda12, cuda13" in run.stderr
