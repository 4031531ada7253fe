"""Log-probabilities from a Hugging Face model, without ever making a prompt length x vocabulary matrix."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

FORMAT = 1


@torch.inference_mode()
def row_logprobs(model: PreTrainedModel, token_ids: Sequence[int], num_rows: int) -> torch.Tensor:
    """Log-softmax in float64 of the last `num_rows` positions: `[num_rows, vocabulary]`."""
    ids = torch.tensor([list(token_ids)])
    logits = model(ids, use_cache=False, logits_to_keep=num_rows).logits[0]
    return torch.log_softmax(logits.double(), dim=-1)


def score(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    label_ids: Sequence[int],
    continuation: Sequence[int] = (),
) -> dict[str, Any]:
    """The numbers of one prompt, as the reference file holds them.

    The continuation is scored in the same pass: row 0 reads the labels and its first token.
    """
    num_rows = max(1, len(continuation))
    rows = row_logprobs(model, [*token_ids, *continuation[:-1]], num_rows)
    record: dict[str, Any] = {
        "token_ids": list(token_ids),
        "label_ids": list(label_ids),
        "label_logprobs": _rounded(rows[0, list(label_ids)]),
        **_top_two(rows[0]),
    }
    if continuation:
        picked = rows[torch.arange(len(continuation)), torch.tensor(list(continuation))]
        record["continuation"] = {"token_ids": list(continuation), "logprobs": _rounded(picked)}
    return record


@torch.inference_mode()
def score_classes(model: PreTrainedModel, token_ids: Sequence[int]) -> dict[str, Any]:
    """What a classifier says about one prompt: log-probabilities of its classes and of a constant logit 0, the last.

    With the 0 among them they hold the raw logits too, whatever their common height.
    """
    logits = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].double()
    row = torch.log_softmax(torch.nn.functional.pad(logits, (0, 1)), dim=-1)
    return {
        "token_ids": list(token_ids),
        "label_ids": list(range(len(row))),
        "label_logprobs": _rounded(row),
        **_top_two(row),
    }


def _top_two(row: torch.Tensor) -> dict[str, Any]:
    top = torch.topk(row, 2)
    first, second = _rounded(top.values)
    return {"top_id": int(top.indices[0]), "top_logprob": first, "second_logprob": second}


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(float(value), 7) for value in values]


def write_reference(
    path: Path,
    name: str,
    model: str,
    max_model_len: int,
    prompts: Iterable[dict[str, Any]],
    kind: str = "next_token",
) -> None:
    """Writes one reference file, a prompt a line, so that two files can be compared by eye."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    head = {
        "format": FORMAT,
        "name": name,
        "kind": kind,
        "model": model,
        "dtype": "float32",
        "max_model_len": max_model_len,
        "versions": versions,
    }
    lines = ",\n".join(json.dumps(prompt, ensure_ascii=False) for prompt in prompts)
    text = json.dumps(head, indent=1)[:-2] + f',\n "prompts": [\n{lines}\n]\n}}\n'
    path.write_text(text, encoding="utf-8")
