"""Every model family, from checkpoint files to answers, against frozen numbers of transformers in float32.

`scripts/reference/golden_families.py` wrote `golden_families.json`; the weights come from `golden_weights.py`.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes import ByteTokenizer
from flax import nnx
from golden_weights import golden_weight
from safetensors.numpy import save_file
from tiny import SETTINGS, prompt

from jprefill.engine import Engine
from jprefill.errors import CheckpointError, UnsupportedFeatureError
from jprefill.model.checkpoints import Checkpoint, load
from jprefill.model.config import ModelConfig
from jprefill.model.llama import Llama, flatten
from jprefill.model.weights import weight_shapes
from jprefill.scorer import Scorer

BOUND = 5e-5  # nats, float32
GOLDEN = json.loads((Path(__file__).parent / "golden_families.json").read_text(encoding="utf-8"))
CASES = {case["name"]: case for case in GOLDEN["cases"]}
PROMPTS = GOLDEN["prompts"]


def write(case, folder: Path, **more_shapes) -> Path:
    shapes = weight_shapes(ModelConfig.from_hf(case["config"])) | more_shapes
    (folder / "config.json").write_text(json.dumps(case["config"]))
    save_file({name: golden_weight(name, shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def logits_of_the_module(checkpoint: Checkpoint) -> list[np.ndarray]:
    """At the last token of each prompt; all are padded to one length, since padding behind a row changes nothing."""
    model = nnx.eval_shape(lambda: Llama(checkpoint.config, nnx.Rngs(0)))
    state = nnx.to_flat_state(nnx.state(model))
    nnx.update(
        model,
        nnx.from_flat_state(
            [(path, leaf.replace(checkpoint.weights[".".join(map(str, path))])) for path, leaf in state]
        ),
    )
    run, width = nnx.jit(Llama.__call__), max(map(len, PROMPTS))
    padded = [np.pad(np.array(ids, np.int32), (0, width - len(ids))) for ids in PROMPTS]
    return [np.asarray(run(model, ids))[len(real) - 1] for ids, real in zip(padded, PROMPTS, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name, tmp_path):
    checkpoint = load(write(CASES[name], tmp_path), dtype="float32")
    pad_id = checkpoint.config.class_head.pad_id if checkpoint.config.class_head else None
    for ids, row, answer in zip(PROMPTS, logits_of_the_module(checkpoint), CASES[name]["answers"], strict=True):
        if "logits" not in answer:
            logprobs = row - np.log(np.exp(row.astype(np.float64)).sum())
            np.testing.assert_allclose(logprobs[GOLDEN["label_ids"]], answer["logprobs"], atol=BOUND)
            assert row.argmax() == answer["top_id"]
        elif ids[-1] != pad_id:  # what transformers reads there is the task's business: see below
            np.testing.assert_allclose(row, [*answer["logits"], 0.0], atol=BOUND)


def start(case, folder: Path) -> Engine:
    settings = replace(SETTINGS, buckets=(256,), max_model_len=192)
    return Engine.from_checkpoint(load(write(case, folder), dtype="float32"), settings)


@pytest.mark.parametrize("name", ["llama-classes", "qwen3-score"])
def test_a_classifier_answers_as_transformers_does(name, tmp_path):
    """The last prompt ends in what one of the models calls padding."""
    with Scorer(start(CASES[name], tmp_path), ByteTokenizer()) as scorer:
        result = scorer.classify(PROMPTS)
        with pytest.raises(UnsupportedFeatureError, match=f"a classifier with {len(result.class_names)} classes"):
            scorer.score([5], [[6]], label_ids=[0, 1])
    for item, answer in zip(result.items, CASES[name]["answers"], strict=True):
        logits = np.array(answer["logits"])
        np.testing.assert_allclose(item.logits, logits, atol=BOUND)
        weights = np.exp(logits)
        expected = weights / weights.sum() if len(logits) > 1 else weights / (1 + weights)
        np.testing.assert_allclose(item.probabilities, expected, atol=BOUND)
        assert item.top_class == f"LABEL_{logits.argmax()}"


def test_a_language_model_answers_as_transformers_does(tmp_path):
    with Scorer(start(CASES["qwen3"], tmp_path), ByteTokenizer()) as scorer:
        for ids, answer in zip(PROMPTS, CASES["qwen3"]["answers"], strict=True):
            request = prompt(np.array(ids, np.int32), GOLDEN["label_ids"])
            [item] = scorer.engine.submit(request).result(60).items
            np.testing.assert_allclose(item.logprobs[0], answer["logprobs"], atol=BOUND)
            assert item.top_ids[0] == answer["top_id"]
        with pytest.raises(UnsupportedFeatureError, match="no classification head"):
            scorer.classify(["spam"])


@pytest.mark.parametrize("name", CASES)
def test_the_module_has_the_leaves_of_the_weight_table(name):
    config = ModelConfig.from_hf(CASES[name]["config"])
    model = nnx.eval_shape(lambda: Llama(config, nnx.Rngs(0)))
    assert {leaf: array.shape for leaf, array in flatten(model).items()} == weight_shapes(config)


def test_a_bias_of_the_class_head_is_refused_by_name(tmp_path):
    write(CASES["llama-classes"], tmp_path, **{"score.bias": (5,)})
    with pytest.raises(CheckpointError, match=r"tensor 'score\.bias' is not part of LlamaForSequenceClassification"):
        load(tmp_path)


def test_labels_that_the_matrix_does_not_have_are_refused(tmp_path):
    case = CASES["llama-classes"]
    write(case, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(case["config"] | {"id2label": {"0": "spam", "1": "ham"}}))
    with pytest.raises(CheckpointError, match=r"'score\.weight' has shape \(5, 64\), the config asks for \(2, 64\)"):
        load(tmp_path)
