"""Named models have the sizes that their names promise; other names are paths or hub names."""

import json
import math

import pytest

from jprefill.errors import CheckpointError, ConfigError
from jprefill.model.weights import weight_shapes
from jprefill.planner.models import MODELS, find_model

# Parameters in millions as the model cards have them.
MILLIONS = {
    "llama-3.1-8b": 8030,
    "llama-3.2-1b": 1236,
    "llama-3.2-3b": 3213,
    "llama-3.3-70b": 70554,
    "qwen2.5-7b": 7616,
    "qwen2.5-32b": 32764,
    "qwen3-8b": 8191,
    "mistral-7b": 7248,
    "smollm2-135m": 134.5,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_named_model_has_its_parameters(name):
    shapes = weight_shapes(find_model(name)).values()
    assert sum(map(math.prod, shapes)) / 1e6 == pytest.approx(MILLIONS[name], rel=5e-4)


def test_names_are_read_in_any_case():
    assert find_model("Llama-3.1-8B") == find_model("llama-3.1-8b")


def test_a_folder_with_a_config_alone_is_enough(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3-8b"]))
    assert find_model(str(tmp_path)) == find_model("qwen3-8b")


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"model='llama-9': no such path; known names are llama-3.1-8b, "):
        find_model("llama-9")


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds neither manifest\.json, nor config\.json"):
        find_model(str(tmp_path))
