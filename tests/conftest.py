"""Strict settings for every test. Light tests never import JAX, so they are set through the environment."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["JAX_PLATFORMS"] = os.environ.get("JPREFILL_TEST_PLATFORM", "cpu")

# `from fakes import ...` in any test file: with --import-mode=importlib nothing else puts this folder there.
sys.path.insert(0, str(Path(__file__).parent))

import pytest
from fakes import ByteTokenizer, FakeEngine
from hypothesis import settings

# No test has a time limit of a fraction of a second: machines are shared.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A JPREFILL_* variable of the developer's shell must not change what a test sees."""
    for name in list(os.environ):
        if name.startswith("JPREFILL_") and name != "JPREFILL_TEST_PLATFORM":
            monkeypatch.delenv(name)


@pytest.fixture
def tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as fake:
        yield fake
