"""Small random models that cover what SmolLM2 does not: families, head counts, biases, rope kinds, classifiers, files.

The weights are scaled so that logits spread (standard deviation about 2) and attention is far from uniform:
on a degenerate model every implementation agrees.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf_model import load_model
from scoring import row_logprobs, score, score_classes, write_reference
from transformers import PreTrainedModel

VOCAB_SIZE = 640
LOGIT_SPREAD = 2.0
ATTENTION_GAIN = 1.6
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class RandomModel:
    """One model to make.

    Attributes:
      shape: (hidden size, heads, KV heads, head size).
      options: further keys of the Hugging Face config.
      lengths: prompt lengths in tokens.
      num_labels: of a sequence classifier; None: a language model.
      has_old_rope_keys: config.json is rewritten to `rope_theta` + `rope_scaling`, as before transformers 5.
    """

    name: str
    shape: tuple[int, int, int, int]
    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = (1, 17, 255, 600)
    family: str = "Llama"
    num_labels: int | None = None
    has_old_rope_keys: bool = False
    stored_dtype: torch.dtype = torch.float32
    max_shard_size: str = "1GB"


MODELS = (
    RandomModel("gqa1-tied", (256, 4, 4, 64), {"tie_word_embeddings": True}),
    RandomModel("gqa3-untied", (288, 9, 3, 32), {"rms_norm_eps": 1e-6}),
    RandomModel("gqa4-head128", (256, 8, 2, 128)),
    RandomModel("gqa8-bias", (256, 8, 1, 64), {"attention_bias": True, "mlp_bias": True}),
    RandomModel("bias-tied", (192, 6, 2, 64), {"attention_bias": True, "tie_word_embeddings": True}),
    RandomModel(
        "llama3-rope",
        (256, 4, 2, 64),
        {"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 131_072},
        lengths=(64, 1000, 9000),
    ),
    RandomModel(
        "llama3-rope-old-keys",
        (256, 8, 2, 64),
        {"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 131_072},
        lengths=(64, 1000, 8500),
        has_old_rope_keys=True,
    ),
    RandomModel(
        "theta-old-keys-sharded",
        (256, 4, 1, 64),
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}},
        has_old_rope_keys=True,
        max_shard_size="1MB",
    ),
    RandomModel("mistral-head128", (384, 4, 2, 128), {"sliding_window": None}, family="Mistral"),
    RandomModel("bf16-stored", (256, 4, 2, 64), stored_dtype=torch.bfloat16),
    RandomModel("qwen2", (256, 8, 2, 32), {"tie_word_embeddings": True}, family="Qwen2"),
    RandomModel("qwen3", (192, 4, 2, 64), {"rms_norm_eps": 1e-6}, family="Qwen3"),
    RandomModel("llama-classes", (128, 4, 2, 32), {"pad_token_id": 3}, num_labels=5),
    RandomModel("mistral-classes", (128, 4, 1, 64), {"sliding_window": None}, family="Mistral", num_labels=3),
    RandomModel("qwen2-classes", (128, 4, 4, 32), family="Qwen2", num_labels=2),
    RandomModel("qwen3-logit", (128, 4, 2, 64), family="Qwen3", num_labels=1),
)


def write_random_models(out: Path, is_quick: bool) -> Iterator[str]:
    """Makes every model under `out/NAME` with its reference `out/NAME.json`; yields a line about each."""
    for seed, spec in enumerate(MODELS):
        torch.manual_seed(seed)
        folder = out / spec.name
        _save(spec, folder)
        # Read back from disk: what counts is what the files say, the rewritten config included.
        model = _load(spec, folder)
        lengths = [length for length in spec.lengths if not is_quick or length <= 1000]
        prompts = [_prompt(spec, model, number, length) for number, length in enumerate(lengths)]
        _check_eager_agrees(spec, folder, prompts[1])
        kind = "next_token" if spec.num_labels is None else "classification"
        write_reference(out / f"{spec.name}.json", spec.name, spec.name, max(lengths) + 16, prompts, kind)
        yield f"{spec.name}: {len(prompts)} prompts, logit spread {_spread(spec, model, prompts):.2f}"


def _load(spec: RandomModel, folder: Path, attention: str = "sdpa") -> PreTrainedModel:
    return load_model(folder, torch.float32, attention, is_classifier=spec.num_labels is not None)


def _save(spec: RandomModel, folder: Path) -> None:
    hidden, num_heads, num_kv_heads, head_dim = spec.shape
    options = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden + 64,
        "num_hidden_layers": 3,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    if spec.family == "Qwen2":  # its configs have no such key
        del options["head_dim"]
    options |= spec.options
    task = "ForCausalLM"
    if spec.num_labels is not None:
        task, options["num_labels"] = "ForSequenceClassification", spec.num_labels
    config = getattr(transformers, f"{spec.family}Config")(**options)
    model = getattr(transformers, spec.family + task)(config)
    _initialise(model)
    model.to(spec.stored_dtype).save_pretrained(folder, max_shard_size=spec.max_shard_size)
    if spec.has_old_rope_keys:
        _write_old_rope_keys(folder / "config.json")


@torch.no_grad()
def _initialise(model: PreTrainedModel) -> None:
    """Unit-variance projections, norm weights around one, biases that matter, logits with a real spread."""
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            is_norm = "norm" in name
            mean = ATTENTION_GAIN if "q_norm" in name or "k_norm" in name else float(is_norm)
            weight.normal_(mean=mean, std=0.2 if is_norm else 0.3)
            continue
        gain = ATTENTION_GAIN if "q_proj" in name or "k_proj" in name else 1.0
        if "embed_tokens" in name or "lm_head" in name or "score" in name:
            gain = LOGIT_SPREAD
        weight.normal_(std=gain / math.sqrt(weight.shape[1]))


def _write_old_rope_keys(path: Path) -> None:
    """Rewrites the rope part of config.json as transformers 4 spelled it."""
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _prompt(spec: RandomModel, model: PreTrainedModel, number: int, length: int) -> dict[str, Any]:
    token_ids = torch.randint(0, VOCAB_SIZE, (length,)).tolist()
    if spec.num_labels is not None:
        return {"name": f"random-{length}", "text": None, **score_classes(model, token_ids)}
    labels = torch.randperm(VOCAB_SIZE)[: 2 + number].tolist()
    continuation = torch.randint(0, VOCAB_SIZE, (12,)).tolist() if number % 2 else []
    return {"name": f"random-{length}", "text": None, **score(model, token_ids, labels, continuation)}


def _check_eager_agrees(spec: RandomModel, folder: Path, prompt: dict[str, Any]) -> None:
    """The library's plain attention must give the same numbers, else the reference itself is in doubt."""
    model, token_ids = _load(spec, folder, attention="eager"), prompt["token_ids"]
    record = (
        score(model, token_ids, prompt["label_ids"]) if spec.num_labels is None else score_classes(model, token_ids)
    )
    eager = record["label_logprobs"]
    worst = max(abs(a - b) for a, b in zip(eager, prompt["label_logprobs"], strict=True))
    if worst > 2e-5:
        raise SystemExit(f"{folder.name}: sdpa and eager attention differ by {worst:.1e} in label log-probabilities")


def _spread(spec: RandomModel, model: PreTrainedModel, prompts: list[dict[str, Any]]) -> float:
    """Standard deviation of the logits: over the vocabulary, or of a classifier's over the prompts."""
    if spec.num_labels is None:
        return float(row_logprobs(model, list(range(32)), 1).std())
    rows = torch.tensor([prompt["label_logprobs"] for prompt in prompts])
    return float((rows[:, :-1] - rows[:, -1:]).std())
