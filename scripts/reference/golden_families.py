"""Writes tests/model/golden_families.json: what transformers says about one tiny model of every family.

    python golden_families.py

Run it again only when a family is added. Needs `requirements.txt` beside this file, and nothing of jprefill but
`tests/golden_weights.py`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))  # both sides make their weights with the same lines

from golden_weights import golden_weight  # noqa: E402

OUT = ROOT / "tests" / "model" / "golden_families.json"
VOCAB_SIZE, PAD_ID = 160, 3
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": [1, 2],
}
CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama-3", "LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE}),
    ("mistral", "MistralForCausalLM", {"head_dim": 32, "sliding_window": None}),
    ("mistral-wide-window", "MistralForCausalLM", {"head_dim": 16, "sliding_window": 512}),
    ("qwen2", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    ("qwen3", "Qwen3ForCausalLM", {"head_dim": 32}),
    ("qwen3-bias", "Qwen3ForCausalLM", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    ("llama-classes", "LlamaForSequenceClassification", {"num_labels": 5, "pad_token_id": PAD_ID}),
    ("mistral-classes", "MistralForSequenceClassification", {"num_labels": 3, "sliding_window": None}),
    ("qwen2-classes", "Qwen2ForSequenceClassification", {"tie_word_embeddings": True, "num_labels": 2}),
    ("qwen3-score", "Qwen3ForSequenceClassification", {"head_dim": 32, "num_labels": 1}),
)


def main() -> int:
    """Writes the file."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (1, 33, 150)]
    prompts.append([*prompts[1][:20], PAD_ID, PAD_ID])  # an end that some classifiers call padding
    label_ids = torch.randperm(VOCAB_SIZE, generator=generator)[:5].tolist()
    cases = [_case(name, architecture, options, prompts, label_ids) for name, architecture, options in CASES]
    lines = ",\n".join(json.dumps(case) for case in cases)
    head = {"transformers": transformers.__version__, "prompts": prompts, "label_ids": label_ids}
    OUT.write_text(json.dumps(head)[:-1] + f',\n"cases": [\n{lines}\n]}}\n', encoding="utf-8")
    return 0


def _case(
    name: str, architecture: str, options: dict[str, Any], prompts: list[list[int]], label_ids: list[int]
) -> dict[str, Any]:
    """One model: its config.json as transformers writes it, and its answers."""
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**SHAPE, **options)
    config.architectures = [architecture]
    model = model_class(config).eval()
    _fill(model)
    is_classifier = "num_labels" in options
    answers = [_logits(model, prompt) if is_classifier else _next(model, prompt, label_ids) for prompt in prompts]
    return {"name": name, "config": json.loads(config.to_json_string()), "answers": answers}


@torch.no_grad()
def _fill(model: PreTrainedModel) -> None:
    for name, weight in model.named_parameters():
        weight.copy_(torch.from_numpy(golden_weight(name, tuple(weight.shape))))


@torch.inference_mode()
def _next(model: PreTrainedModel, prompt: list[int], label_ids: list[int]) -> dict[str, Any]:
    """Log-probabilities of the labels after the prompt, and the most probable token."""
    row = torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1].double(), dim=-1)
    return {"logprobs": [round(value, 7) for value in row[label_ids].tolist()], "top_id": int(row.argmax())}


@torch.inference_mode()
def _logits(model: PreTrainedModel, prompt: list[int]) -> dict[str, Any]:
    return {"logits": [round(value, 7) for value in model(torch.tensor([prompt])).logits[0].tolist()]}


if __name__ == "__main__":
    sys.exit(main())
