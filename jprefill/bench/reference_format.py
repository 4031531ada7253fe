"""The reference file: prompts with the log-probabilities that another implementation computed for them.

    {"format": 1,
     "name": "smollm2",
     "kind": "next_token",                        or "classification", see below; may be missing
     "model": "../../checkpoints/model.gguf",     path of the weights, relative to this file
     "dtype": "float32",
     "max_model_len": 8192,
     "versions": {"torch": "...", ...},           of whoever wrote the file
     "prompts": [
       {"name": "spam-00",
        "text": "...",                            null where the prompt was made of token ids
        "token_ids": [...],                       of `text`, by the other side's tokenizer, no BOS added
        "label_ids": [...], "label_logprobs": [...],   of the token after the prompt, natural logarithms
        "top_id": 17, "top_logprob": -0.5, "second_logprob": -0.9,   the two best over the whole vocabulary
        "continuation": {"token_ids": [...], "logprobs": [...]}}]}   optional: tokens after the prompt, scored

Of a sequence classifier ("classification") the label ids are class indices, and one more after the last class: a
constant logit of 0, so that the log-probabilities hold the raw logits too. There is no continuation.

Written by `scripts/reference/make_reference.py`; any other program may write one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec

from jprefill.errors import ConfigError
from jprefill.types import Head

FORMAT = 1
_LOGPROB_SLACK = 1e-6  # a certain token may round to a hair above zero


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens after a prompt, and the log-probability of each given everything before it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ReferencePrompt:
    """One prompt and what the other side computed; see the module's picture for the fields."""

    name: str
    text: str | None
    token_ids: tuple[int, ...]
    label_ids: tuple[int, ...]
    label_logprobs: tuple[float, ...]
    top_id: int
    top_logprob: float
    second_logprob: float
    continuation: Continuation | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens the model must see: the prompt, and the continuation without its last token."""
        return len(self.token_ids) + (len(self.continuation.token_ids) - 1 if self.continuation else 0)

    @property
    def label_margin(self) -> float:
        """Nats between the two most probable labels; infinite where there is one label only."""
        ranked = sorted(self.label_logprobs, reverse=True)
        return next((first - second for first, second in pairwise(ranked)), math.inf)

    @property
    def top_margin(self) -> float:
        """Nats between the two most probable tokens of the vocabulary."""
        return self.top_logprob - self.second_logprob


@dataclass(frozen=True, slots=True)
class Reference:
    """A whole file; `model_path` finds the weights."""

    format: int
    name: str
    model: str
    dtype: str
    max_model_len: int
    versions: dict[str, str]
    prompts: tuple[ReferencePrompt, ...]
    kind: Literal["next_token", "classification"] = "next_token"

    @property
    def head(self) -> Head:
        """What the ids of labels and top tokens are ids of."""
        return "classes" if self.kind == "classification" else "tokens"

    def model_path(self, reference_path: Path) -> Path:
        """Where the weights lie: `model`, relative to the folder of the reference file."""
        return (reference_path.parent / self.model).resolve()


def load_reference(path: Path) -> Reference:
    """Reads and checks a reference file.

    Raises:
      ConfigError: it cannot be read, is another format, or a value is of the wrong kind; the message names
        the file, the prompt and the field.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"reference file {path}: {error.strerror}") from None
    try:
        _check_format(msgspec.json.decode(data))
        reference = msgspec.json.decode(data, type=Reference)
        _check(reference)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"reference file {path}: {error}") from None
    return reference


def _check_format(raw: object) -> None:
    """Before the other fields: another format may have other fields."""
    found = raw.get("format") if isinstance(raw, dict) else None
    if found != FORMAT:
        raise ValueError(f"format is {found!r}; this version reads format {FORMAT}")


def _check(reference: Reference) -> None:
    if not reference.prompts:
        raise ValueError("prompts is empty")
    for number, prompt in enumerate(reference.prompts):
        where = f"prompts[{number}] ({prompt.name})"
        _check_ids(f"{where}: token_ids", prompt.token_ids)
        _check_pair(where, "label_ids", prompt.label_ids, "label_logprobs", prompt.label_logprobs)
        if len(set(prompt.label_ids)) != len(prompt.label_ids):
            raise ValueError(f"{where}: label_ids holds an id twice")
        _check_logprobs(f"{where}: top_logprob, second_logprob", (prompt.top_logprob, prompt.second_logprob))
        if prompt.continuation:
            if reference.kind == "classification":
                raise ValueError(f"{where}: continuation: a classifier has none")
            ids, logprobs = prompt.continuation.token_ids, prompt.continuation.logprobs
            _check_pair(where, "continuation.token_ids", ids, "continuation.logprobs", logprobs)
        if prompt.num_tokens > reference.max_model_len:
            raise ValueError(f"{where}: {prompt.num_tokens} tokens, max_model_len is {reference.max_model_len}")


def _check_pair(where: str, ids_name: str, ids: Sequence[int], logprobs_name: str, logprobs: Sequence[float]) -> None:
    _check_ids(f"{where}: {ids_name}", ids)
    if len(ids) != len(logprobs):
        raise ValueError(f"{where}: {len(ids)} {ids_name} but {len(logprobs)} {logprobs_name}")
    _check_logprobs(f"{where}: {logprobs_name}", logprobs)


def _check_ids(where: str, ids: Sequence[int]) -> None:
    if not ids:
        raise ValueError(f"{where} is empty")
    if not all(0 <= token_id < 2**31 for token_id in ids):
        raise ValueError(f"{where} holds {min(ids)} or {max(ids)}: ids are 0 to 2^31 - 1")


def _check_logprobs(where: str, logprobs: Sequence[float]) -> None:
    for value in logprobs:
        if not (math.isfinite(value) and value <= _LOGPROB_SLACK):
            raise ValueError(f"{where} holds {value}: a log-probability is finite and at most 0")
