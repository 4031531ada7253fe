"""The demo model, where it was put under checkpoints/."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jprefill.model.checkpoints import convert, load, open_source
from jprefill.model.checkpoints.source import check_tensors

ROOT = Path(__file__).parents[3] / "checkpoints"
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not (ROOT / "smollm2-135m-instruct").is_dir(), reason="the demo model is not here"),
]


def test_demo_model_is_whole():
    source = open_source(ROOT / "smollm2-135m-instruct")
    assert len(check_tensors(source)) == 272
    assert (source.config.num_layers, source.config.embed_dim, source.config.is_tied) == (30, 576, True)


def test_demo_model_loads():
    checkpoint = load(ROOT / "smollm2-135m-instruct")
    assert sum(array.size for array in checkpoint.weights.values()) == 134_515_008
    for name in ("model.embed_tokens.weight", "model.layers.29.mlp.down_proj.weight"):
        assert 0.001 < float(np.asarray(checkpoint.weights[name]).astype(np.float32).std()) < 1


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.gguf")), ids=lambda path: path.name)
def test_gguf_survives_conversion(path, tmp_path):
    convert(path, tmp_path / "converted", progress=False)
    direct, converted = load(path), load(tmp_path / "converted")
    assert direct.config == converted.config
    for name, array in jax.device_get(direct.weights).items():
        np.testing.assert_array_equal(array.view(np.uint16), np.asarray(converted.weights[name]).view(np.uint16))
