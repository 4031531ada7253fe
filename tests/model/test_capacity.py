"""Start-up on a device whose memory is made up: what fits is served, what does not is refused with the limit."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny import CONFIG, SETTINGS, make_model, make_runner, prompt, tokens

from jprefill.engine import Engine
from jprefill.errors import ConfigError, ContextLengthError
from jprefill.model import capacity
from jprefill.model.checkpoints import Checkpoint
from jprefill.model.llama import flatten
from jprefill.model.memory import LIBRARY_BYTES


@pytest.fixture(scope="module")
def checkpoint():
    return Checkpoint("tiny", CONFIG, flatten(make_model()), "00", Path(), "float32")


@pytest.fixture
def holds(monkeypatch):
    """Makes the device hold passes of exactly so many tokens."""

    def install(num_tokens):
        bucket = make_runner(buckets=(num_tokens,)).programs.of(num_tokens)
        monkeypatch.setattr(capacity, "free_bytes", lambda: bucket.pass_bytes + LIBRARY_BYTES)

    return install


def start(checkpoint, **settings):
    return Engine.from_checkpoint(checkpoint, replace(SETTINGS, **settings))


def test_a_device_that_says_nothing_limits_nothing(checkpoint):
    assert capacity.free_bytes() is None
    engine = start(checkpoint, max_model_len=512)
    assert engine.max_model_len == 512
    engine.close()


def test_without_a_wish_the_device_decides_and_the_log_says_so(checkpoint, holds, caplog):
    holds(512)
    with caplog.at_level(logging.WARNING, "jprefill.engine"):
        engine = start(checkpoint)
    assert engine.max_model_len == 512
    assert "max_model_len is 512: the model was made for 1024, the device holds no more" in caplog.text
    with pytest.raises(ContextLengthError, match="512"):
        engine.submit(prompt(tokens(np.random.default_rng(0), 513)))
    engine.close()


def test_what_fits_is_served_as_asked(checkpoint, holds):
    holds(512)
    engine = start(checkpoint, max_model_len=500)
    assert engine.max_model_len == 500
    engine.close()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_model_len": 513}, "max_model_len=513: the device holds passes of at most 512 tokens"),
        ({"max_model_len": 512, "max_batch_tokens": 700}, "max_batch_tokens=700: the device holds passes of at most"),
        ({"max_model_len": 512, "buckets": (256, 1024)}, "buckets=1024: the device holds passes of at most 512"),
    ],
)
def test_a_wish_that_does_not_fit_is_refused_with_the_limit(checkpoint, holds, settings, text):
    holds(512)
    with pytest.raises(ConfigError, match=text):
        start(checkpoint, **settings)


def test_a_device_full_of_weights_is_refused(checkpoint, monkeypatch):
    monkeypatch.setattr(capacity, "free_bytes", lambda: LIBRARY_BYTES)
    with pytest.raises(ConfigError, match="no room for a pass of 64 tokens"):
        start(checkpoint)
