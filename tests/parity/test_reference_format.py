"""Reading reference files: what a good one gives, and what is said about a bad one."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from jprefill.bench.reference_format import load_reference
from jprefill.errors import ConfigError


def prompt(**changes: Any) -> dict[str, Any]:
    return {
        "name": "spam-00",
        "text": "Is this spam?",
        "token_ids": [5, 6, 7],
        "label_ids": [1, 2],
        "label_logprobs": [-0.5, -2.0],
        "top_id": 1,
        "top_logprob": -0.5,
        "second_logprob": -1.75,
        **changes,
    }


def write(folder: Path, prompts: list[Any], **changes: Any) -> Path:
    record = {
        "format": 1,
        "name": "tiny",
        "model": "../weights/tiny.gguf",
        "dtype": "float32",
        "max_model_len": 64,
        "versions": {"torch": "2.13.0"},
        "prompts": prompts,
    }
    path = folder / "tiny.json"
    path.write_text(json.dumps(record | changes))
    return path


def test_a_file_is_read_with_and_without_a_continuation(tmp_path: Path):
    continued = prompt(name="b", text=None, continuation={"token_ids": [8, 9], "logprobs": [-1.0, -0.25]})
    reference = load_reference(write(tmp_path, [prompt(), continued]))
    plain, other = reference.prompts
    assert plain.continuation is None
    assert plain.num_tokens == 3
    assert other.continuation is not None
    assert other.continuation.logprobs == (-1.0, -0.25)
    assert other.num_tokens == 4  # the last token of a continuation is predicted, not read


def test_the_model_path_is_relative_to_the_file(tmp_path: Path):
    path = write(tmp_path, [prompt()])
    assert load_reference(path).model_path(path) == (tmp_path / "../weights/tiny.gguf").resolve()


def test_margins_are_those_of_the_two_best(tmp_path: Path):
    labels = {"label_ids": [1, 2, 3], "label_logprobs": [-3.0, -0.5, -2.0]}
    single = {"label_ids": [1], "label_logprobs": [-3.0]}
    several, one = load_reference(write(tmp_path, [prompt(**labels), prompt(**single)])).prompts
    assert several.label_margin == 1.5
    assert several.top_margin == 1.25
    assert one.label_margin == math.inf


def test_a_classifier_is_read_through_its_own_head(tmp_path: Path):
    assert load_reference(write(tmp_path, [prompt()])).head == "tokens"
    assert load_reference(write(tmp_path, [prompt()], kind="classification")).head == "classes"


@pytest.mark.parametrize(
    ("kind", "message"),
    [("classification", "continuation: a classifier has none"), ("regression", "Invalid enum value 'regression'")],
)
def test_a_kind_that_does_not_fit_is_refused(tmp_path: Path, kind: str, message: str):
    continued = prompt(continuation={"token_ids": [8], "logprobs": [-1.0]})
    with pytest.raises(ConfigError, match=message):
        load_reference(write(tmp_path, [continued], kind=kind))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": []}, r"prompts\[0\] \(spam-00\): token_ids is empty"),
        ({"token_ids": [1, -4]}, r"token_ids holds -4"),
        ({"label_logprobs": [-0.5]}, r"2 label_ids but 1 label_logprobs"),
        ({"label_ids": [1, 1]}, r"label_ids holds an id twice"),
        (
            {"label_logprobs": [0.5, -1.0]},
            r"label_logprobs holds 0\.5: a log-probability is finite and at most",
        ),
        ({"top_id": "yes"}, r"Expected `int`, got `str` - at `\$\.prompts\[0\]\.top_id`"),
        ({"continuation": {"token_ids": [1], "logprobs": []}}, r"1 continuation\.token_ids but 0"),
        ({"token_ids": [1] * 65}, r"65 tokens, max_model_len is 64"),
    ],
)
def test_a_bad_prompt_is_named_with_its_field(tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        load_reference(write(tmp_path, [prompt(**changes)]))
    assert "tiny.json" in caught.value.message


def test_another_format_is_refused_before_its_fields_are_looked_at(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"format is 2; this version reads format 1"):
        load_reference(write(tmp_path, ["something new"], format=2))


def test_a_file_without_prompts_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="prompts is empty"):
        load_reference(write(tmp_path, []))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": NaN}', "null"])
def test_what_is_no_reference_file_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"reference file .*bad\.json"):
        load_reference(path)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere\.json: No such file"):
        load_reference(tmp_path / "nowhere.json")
