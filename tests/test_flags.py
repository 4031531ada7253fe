"""Flags and variables come from the config dataclasses, and nowhere else."""

import argparse
from dataclasses import dataclass
from typing import Literal

import pytest

from jprefill import config
from jprefill.config import EngineConfig, ServerConfig
from jprefill.errors import ConfigError
from jprefill.flags import add_flags, from_args


def parse(config, *argv, **environ):
    parser = argparse.ArgumentParser()
    add_flags(parser, config)
    return from_args(parser.parse_args(argv), config, environ)


def test_without_flags_the_defaults_of_the_dataclass_hold():
    assert parse(EngineConfig) == EngineConfig()
    assert parse(ServerConfig) == ServerConfig()


def test_flags_set_fields_of_every_kind():
    config = parse(
        EngineConfig,
        "--max-model-len",
        "4096",
        "--dtype=float32",
        "--buckets",
        "512,2048",
        "--attention",
        "xla",
    )
    assert config == EngineConfig(max_model_len=4096, dtype="float32", buckets=(512, 2048), attention="xla")


def test_lists_of_texts_are_given_by_repeating_the_flag():
    config = parse(ServerConfig, "--api-key", "k1", "--api-key", "k2", "--served-model-name", "a,b")
    assert config.api_keys == ("k1", "k2")
    assert config.served_model_names == ("a", "b")


def test_units_leave_the_names_of_flags():
    config = parse(ServerConfig, "--request-timeout", "1.5", JPREFILL_SHUTDOWN_TIMEOUT="3")
    assert (config.request_timeout_s, config.shutdown_timeout_s) == (1.5, 3.0)


def test_the_spelling_of_vllm_works_too():
    config = parse(EngineConfig, "--max-num-batched-tokens", "8192", "--max-num-queued-reqs", "7")
    assert (config.max_batch_tokens, config.max_queued_requests) == (8192, 7)


def test_a_flag_wins_over_its_variable_and_that_over_the_default():
    assert parse(ServerConfig, JPREFILL_PORT="9000").port == 9000
    assert parse(ServerConfig, "--port", "9001", JPREFILL_PORT="9000").port == 9001
    assert parse(ServerConfig, JPREFILL_API_KEY="a, b").api_keys == ("a", "b")
    assert parse(ServerConfig, JPREFILL_PORT="").port == ServerConfig().port


@pytest.mark.parametrize(
    ("argv", "environ", "text"),
    [
        (["--port", "x"], {}, "--port='x': must be a whole number"),
        ([], {"JPREFILL_PORT": "x"}, "JPREFILL_PORT='x': must be a whole number"),
        ([], {"JPREFILL_PORT": "70000"}, "port=70000: must be 0 to 65535"),
        (["--request-timeout", "soon"], {}, "--request-timeout='soon': must be a number"),
        (["--log-format", "xml"], {}, "--log-format='xml': allowed are text, json"),
        ([], {"JPREFILL_LOG_FORMAT": "xml"}, "JPREFILL_LOG_FORMAT='xml': allowed are text, json"),
    ],
)
def test_a_bad_value_names_its_source_and_what_is_allowed(argv, environ, text):
    with pytest.raises(ConfigError) as caught:
        parse(ServerConfig, *argv, **environ)
    assert text in caught.value.message


def test_a_choice_may_also_be_left_open():
    assert parse(EngineConfig).quantization is None
    assert parse(EngineConfig, "--quantization", "int8").quantization == "int8"
    assert parse(EngineConfig, JPREFILL_QUANTIZATION="fp8").quantization == "fp8"
    with pytest.raises(ConfigError, match="--quantization='int4': allowed are int8, fp8"):
        parse(EngineConfig, "--quantization", "int4")


def test_an_open_choice_is_checked_where_no_flag_was():
    @dataclass(frozen=True)  # of this module: the type checks of the tests would refuse EngineConfig's value first
    class Open(config._Checked):
        kind: Literal["a", "b"] | None = None

    assert [Open(kind).kind for kind in ("a", None)] == ["a", None]
    with pytest.raises(ConfigError, match="kind='c': allowed are 'a', 'b', None"):
        Open("c")


def test_a_bad_bucket_is_named():
    with pytest.raises(ConfigError, match="--buckets='big': must be a whole number"):
        parse(EngineConfig, "--buckets", "512,big")


def test_booleans_are_switches():
    @dataclass(frozen=True)
    class Switches:
        is_loud: bool = True

    assert parse(Switches, "--no-is-loud").is_loud is False
    assert parse(Switches, JPREFILL_IS_LOUD="0").is_loud is False
    with pytest.raises(ConfigError, match="JPREFILL_IS_LOUD='maybe': allowed are 1, true, yes, 0, false, no"):
        parse(Switches, JPREFILL_IS_LOUD="maybe")


def test_help_comes_from_the_docstring_and_shows_default_and_variable():
    parser = argparse.ArgumentParser(prog="x")
    add_flags(parser, EngineConfig)
    add_flags(parser, ServerConfig)
    text = " ".join(parser.format_help().split())
    assert "longest prompt in tokens; None takes the model's own limit. (JPREFILL_MAX_MODEL_LEN)" in text
    assert "--dtype {bfloat16,float32,float16}" in text
    assert "--quantization {int8,fp8}" in text
    assert "(default 8000; JPREFILL_PORT)" in text
    assert "`" not in text
