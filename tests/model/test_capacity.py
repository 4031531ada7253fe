"""Start-up on a device whose memory is made up: what fits is served, what does not is refused with the limit."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny import CONFIG, SETTINGS, make_model, prompt, tokens

from jprefill.engine import Engine
from jprefill.errors import ConfigError, ContextLengthError
from jprefill.model import capacity
from jprefill.model.capacity import check_fit, longest_fitting
from jprefill.model.checkpoints import Checkpoint
from jprefill.model.layouts import LayoutSpec
from jprefill.model.llama import flatten
from jprefill.model.memory import LIBRARY_BYTES, library_bytes

SPEC = LayoutSpec(CONFIG, chunk_size=64, attention="xla")
FIXED_BYTES, TOKEN_BYTES = 50_000, 1000


@pytest.fixture
def holds(monkeypatch):
    """Makes the device hold passes of exactly so many tokens; nothing is compiled to find out."""
    compiled = []

    class FakePrograms:
        @classmethod
        def compile(cls, spec, layout, dtype, buckets):
            compiled.append(buckets)
            return SimpleNamespace(of=lambda bucket: SimpleNamespace(pass_bytes=FIXED_BYTES + TOKEN_BYTES * bucket))

    def install(num_tokens):
        free = FIXED_BYTES + TOKEN_BYTES * num_tokens + LIBRARY_BYTES
        monkeypatch.setattr(capacity, "free_bytes", lambda: free)
        monkeypatch.setattr(capacity, "Programs", FakePrograms)
        return compiled

    return install


def test_a_device_that_says_nothing_limits_nothing():
    assert capacity.free_bytes() is None
    assert longest_fitting(SPEC, SETTINGS, 1024) is None
    assert check_fit(None, SETTINGS, 1024) == 1024


def test_what_fits_costs_one_compile(holds):
    compiled = holds(512)
    assert longest_fitting(SPEC, SETTINGS, 500) == 500
    assert compiled == [(512,)]


@pytest.mark.parametrize("num_tokens", [64, 130, 512, 1000])
def test_the_limit_is_the_last_whole_chunk_that_fits(holds, num_tokens):
    holds(num_tokens)
    assert longest_fitting(SPEC, SETTINGS, 1024) == num_tokens // 64 * 64


def test_quantised_weights_set_one_matrix_aside():
    assert library_bytes(CONFIG, "int8") - library_bytes(CONFIG, None) == 2 * CONFIG.embed_dim * 192


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_model_len": 513}, "max_model_len=513: the device holds passes of at most 512 tokens"),
        ({"max_model_len": 512, "max_batch_tokens": 700}, "max_batch_tokens=700: the device holds passes of at most"),
        ({"max_model_len": 512, "buckets": (256, 1024)}, "buckets=1024: the device holds passes of at most 512"),
    ],
)
def test_a_wish_that_does_not_fit_is_refused_with_the_limit(settings, text):
    wish = replace(SETTINGS, **settings)
    with pytest.raises(ConfigError, match=text):
        check_fit(512, wish, wish.max_model_len)


def test_a_device_full_of_weights_is_refused():
    with pytest.raises(ConfigError, match="no room for a pass of one chunk"):
        check_fit(0, SETTINGS, 1024)


def test_without_a_wish_the_device_decides_and_the_engine_says_so(holds, caplog):
    holds(128)
    checkpoint = Checkpoint("tiny", CONFIG, flatten(make_model()), "00", Path(), "float32")
    with caplog.at_level(logging.WARNING, "jprefill.engine"):
        engine = Engine.from_checkpoint(checkpoint, SETTINGS)
    assert engine.max_model_len == 128
    assert "max_model_len is 128: the model was made for 1024, the device holds no more" in caplog.text
    with pytest.raises(ContextLengthError, match="128"):
        engine.submit(prompt(tokens(np.random.default_rng(0), 129)))
    engine.close()
