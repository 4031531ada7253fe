"""The README's first example runs, and prints what the README shows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_NUMBER = re.compile(r"\d+\.\d+")


def blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_first_screen_has_the_example_and_the_server():
    first_screen = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:45]
    for needed in ("make demo", "from jprefill import Scorer", "jprefill serve", "curl"):
        assert any(needed in line for line in first_screen), needed


def test_python_example_is_about_ten_lines():
    code = [line for line in blocks("python")[0].splitlines() if line.strip()]
    assert len(code) <= 11


@pytest.mark.model
def test_python_example_prints_what_is_shown():
    shown = blocks("text")[0]
    run = subprocess.run(
        [sys.executable, "-c", blocks("python")[0]], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stderr
    assert _NUMBER.sub("N", run.stdout) == _NUMBER.sub("N", shown)
    numbers, expected = ([float(n) for n in _NUMBER.findall(text)] for text in (run.stdout, shown))
    assert numbers == pytest.approx(expected, abs=0.02)  # bfloat16 rounds differently on other processors
