"""The arithmetic of a comparison: how far two sets of log-probabilities lie apart. No JAX."""

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from tqdm import tqdm

from jprefill.bench.reference_format import ReferencePrompt
from jprefill.types import Head, Item, ItemScores, ScoreRequest, ScoreResult


@runtime_checkable
class Scorer(Protocol):
    """The part of an engine that a comparison needs."""

    def submit(self, request: ScoreRequest) -> Future[ScoreResult]:
        """Queues one request; the future holds its one answer."""
        ...


@dataclass(frozen=True, slots=True)
class PromptScores:
    """What one side says about one prompt; natural logarithms."""

    label_logprobs: tuple[float, ...]
    top_id: int
    top_logprob: float
    continuation_logprobs: tuple[float, ...] = ()

    @property
    def top_label(self) -> int:
        """Index of the most probable label."""
        return int(np.argmax(self.label_logprobs))


@dataclass(frozen=True, slots=True)
class PromptDifference:
    """Two sides on one prompt.

    Attributes:
      label_delta: largest |difference| in nats over the labels and the top token; infinite for a NaN.
      continuation_delta: likewise over the continuation; 0 where there is none.
      is_same_top: same most probable label, and same most probable token.
      is_flip: one of the two differs although the reference holds it ahead by more than the margin.
    """

    name: str
    num_tokens: int
    label_delta: float
    continuation_delta: float
    is_same_top: bool
    is_flip: bool

    @property
    def severity(self) -> tuple[bool, float]:
        """To sort by, worst last: flips above all, then the larger difference."""
        return self.is_flip, max(self.label_delta, self.continuation_delta)


@dataclass(frozen=True, slots=True)
class Summary:
    """A whole comparison."""

    num_prompts: int
    max_label_delta: float
    max_continuation_delta: float
    num_different_tops: int
    num_flips: int

    @classmethod
    def of(cls, differences: Sequence[PromptDifference]) -> "Summary":
        """Sums up at least one prompt."""
        return cls(
            num_prompts=len(differences),
            max_label_delta=max(d.label_delta for d in differences),
            max_continuation_delta=max(d.continuation_delta for d in differences),
            num_different_tops=sum(not d.is_same_top for d in differences),
            num_flips=sum(d.is_flip for d in differences),
        )

    @property
    def severity(self) -> tuple[int, float]:
        """To sort by, worst last: flips above all, then the largest difference."""
        return self.num_flips, max(self.max_label_delta, self.max_continuation_delta)

    def is_within(self, tolerance: float) -> bool:
        """No flip, and nothing further apart than `tolerance` nats."""
        return self.num_flips == 0 and self.severity[1] <= tolerance


def reference_scores(prompt: ReferencePrompt) -> PromptScores:
    """The numbers in the reference file, as one side of a comparison."""
    continuation = prompt.continuation.logprobs if prompt.continuation else ()
    return PromptScores(prompt.label_logprobs, prompt.top_id, prompt.top_logprob, continuation)


def compare_prompt(
    prompt: ReferencePrompt, expected: PromptScores, actual: PromptScores, margin: float
) -> PromptDifference:
    """How far `actual` lies from `expected`; the margins come from the reference file in any case."""
    is_same_label = expected.top_label == actual.top_label
    is_same_token = expected.top_id == actual.top_id
    is_flip = (not is_same_label and prompt.label_margin > margin) or (not is_same_token and prompt.top_margin > margin)
    label_delta = max(
        _max_delta(expected.label_logprobs, actual.label_logprobs),
        _max_delta((expected.top_logprob,), (actual.top_logprob,)),
    )
    return PromptDifference(
        name=prompt.name,
        num_tokens=prompt.num_tokens,
        label_delta=label_delta,
        continuation_delta=_max_delta(expected.continuation_logprobs, actual.continuation_logprobs),
        is_same_top=is_same_label and is_same_token,
        is_flip=is_flip,
    )


def _max_delta(expected: Sequence[float], actual: Sequence[float]) -> float:
    """0 for nothing. A NaN counts as infinitely far: `nan > tolerance` is False and would pass."""
    deltas = [abs(a - b) for a, b in zip(expected, actual, strict=True)]
    return max((delta if math.isfinite(delta) else math.inf for delta in deltas), default=0.0)


def score_request(prompt: ReferencePrompt, head: Head = "tokens") -> ScoreRequest:
    """The labels after the prompt and, where there is one, the continuation as a second item.

    Without a continuation the whole prompt is one item, so that both ways through an engine are compared.
    """
    token_ids = np.asarray(prompt.token_ids, np.int32)
    if prompt.continuation is None:
        item = _item(token_ids, [len(token_ids) - 1], [prompt.label_ids])
        return ScoreRequest(prefix=np.zeros(0, np.int32), items=(item,), head=head)
    following = np.asarray(prompt.continuation.token_ids, np.int32)
    suffix = np.concatenate([token_ids[-1:], following[:-1]])
    items = (
        _item(token_ids[-1:], [0], [prompt.label_ids]),
        _item(suffix, range(len(following)), following[:, None]),
    )
    return ScoreRequest(prefix=token_ids[:-1], items=items, head=head)


def _item(token_ids: np.ndarray, rows: Sequence[int], targets: Sequence[Sequence[int]] | np.ndarray) -> Item:
    return Item(token_ids, np.asarray(rows, np.int32), np.asarray(targets, np.int32))


def score_prompts(
    engine: Scorer, prompts: Sequence[ReferencePrompt], *, is_packed: bool, title: str, head: Head = "tokens"
) -> list[PromptScores]:
    """Runs every prompt through `engine`, in order.

    Args:
      is_packed: submit all at once, so that the engine packs them; else one after the other, each alone.
      title: shown by the progress bar, which appears on a terminal only.
      head: of the reference that the prompts are from.
    """
    requests = [score_request(prompt, head) for prompt in prompts]
    futures = [engine.submit(request) for request in requests] if is_packed else []
    scores = []
    for number, request in enumerate(tqdm(requests, desc=title, unit="prompt", disable=None)):
        future = futures[number] if is_packed else engine.submit(request)
        scores.append(_prompt_scores(future.result().items))
    return scores


def _prompt_scores(items: Sequence[ItemScores]) -> PromptScores:
    labels, *continuation = items
    return PromptScores(
        label_logprobs=tuple(labels.logprobs[0].tolist()),
        top_id=int(labels.top_ids[0]),
        top_logprob=float(labels.top_logprobs[0]),
        continuation_logprobs=tuple(continuation[0].logprobs[:, 0].tolist()) if continuation else (),
    )
