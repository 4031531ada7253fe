"""Log-likelihoods of continuations after a context, by the convention of lm-evaluation-harness."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jprefill.errors import EngineError, InvalidRequestError
from jprefill.tasks.encoding import encode, encode_all
from jprefill.tasks.frames import to_frame
from jprefill.tasks.inputs import (
    Ids,
    Text,
    TextOrIds,
    as_ids,
    check_kinds,
    check_length,
    check_list,
    check_text,
)
from jprefill.tasks.job import Job
from jprefill.tokenization.api import Tokenizer
from jprefill.types import Item, ItemScores, ScoreRequest, ScoreResult, Timings, Usage


@dataclass(frozen=True, slots=True)
class Loglikelihood:
    """How probable one continuation is.

    Attributes:
      logprob: nats, summed over the continuation's tokens in float64; at most 0.
      is_greedy: every token of the continuation is the model's first choice.
      token_logprobs: nats, one per token of the continuation.
    """

    logprob: float
    is_greedy: bool
    num_tokens: int
    token_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Loglikelihoods:
    """The answer to a log-likelihood request; `items` in the order of the continuations."""

    items: tuple[Loglikelihood, ...]
    usage: Usage
    timings: Timings

    def to_dicts(self) -> list[dict[str, Any]]:
        """One plain record per continuation, ready for JSON."""
        return [{"item": i, **asdict(item)} for i, item in enumerate(self.items)]

    def to_pandas(self) -> Any:
        """A data frame with one row per continuation.

        Raises:
          ImportError: pandas is not installed.
        """
        return to_frame(self.to_dicts())


def loglikelihood_job(
    tokenizer: Tokenizer,
    context: TextOrIds,
    continuations: Sequence[TextOrIds] | Any,
    *,
    add_bos: bool | None = None,
    vocab_size: int | None = None,
    max_model_len: int | None = None,
    max_items: int | None = None,
    salt: Text = "",
    mark_prefix: bool = False,
    deadline_s: float | None = None,
) -> Job[Loglikelihoods]:
    """Asks for `log p(continuation | context)` of every continuation; the context is computed once.

    Text is split as lm-evaluation-harness splits it: spaces at the end of the context move to the
    continuation, context and continuation are tokenised together, and the context keeps the tokens that it
    has alone. An empty context becomes BOS, or EOS where the model has no BOS. Nothing is cut.

    Args:
      context: text or token ids; `continuations` must be of the same kind. Ids are never altered.
      continuations: not empty, each adding at least one token.
      add_bos: whether text starts with BOS; None follows the tokenizer's own rule.
      vocab_size: rows of the LM head; None takes the tokenizer's.
      max_model_len: longest context with continuation, in tokens; None leaves the check to the engine.
      max_items: likewise, continuations of one request.
      salt: separates tenants in the prefix store.
      mark_prefix: the context will come again with other continuations: its KV is kept.
      deadline_s: on the monotonic clock.

    Raises:
      InvalidRequestError: a field is malformed; `param` names it.
      ContextLengthError: a prompt is longer than `max_model_len`.

    Source: lm-evaluation-harness, `TemplateLM._encode_pair` and `TemplateLM.loglikelihood`.
    """
    continuations = check_list(continuations, "continuations", maximum=max_items)
    if check_kinds(context, "context", continuations, "continuations"):
        bos = tokenizer.adds_bos if add_bos is None else add_bos
        context_ids, targets = _split_texts(tokenizer, context, continuations, add_bos=bos)
    else:
        context_ids, targets = _check_ids(context, continuations, vocab_size or tokenizer.vocab_size)
    for i, target_ids in enumerate(targets):
        # the last token of a continuation is predicted and never read
        check_length(len(context_ids) + len(target_ids) - 1, max_model_len, f"continuations[{i}]")
    items = tuple(_item(context_ids, target_ids) for target_ids in targets)
    request = ScoreRequest(
        context_ids[:-1],
        items,
        deadline_s=deadline_s,
        salt=check_text(salt, "salt", may_be_empty=True),
        num_marked_tokens=len(context_ids) - 1 if mark_prefix else 0,
    )
    return Job((request,), lambda results: _finish(results[0], targets))


def _split_texts(
    tokenizer: Tokenizer, context: Text, continuations: Sequence[Text], *, add_bos: bool
) -> tuple[Ids, list[Ids]]:
    context = check_text(context, "context", may_be_empty=True)
    head = context.rstrip()
    spaces = context[len(head) :]
    for i, continuation in enumerate(continuations):
        check_text(continuation, f"continuations[{i}]")
    texts = [spaces + continuation for continuation in continuations]
    if not head:
        context_ids, targets = _without_context(tokenizer, texts)
    else:
        context_ids = encode(tokenizer, head, add_bos=add_bos)
        whole = encode_all(tokenizer, [head + text for text in texts], add_bos=add_bos)
        targets = [ids[len(context_ids) :] for ids in whole]
    for i, target_ids in enumerate(targets):
        if not len(target_ids):
            raise InvalidRequestError(
                f"continuations[{i}] adds no token: the tokenizer joins it with the end of the context",
                param=f"continuations[{i}]",
            )
    return context_ids, targets


def _without_context(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[Ids, list[Ids]]:
    """The first token needs something before it: BOS, else EOS."""
    start_id = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    if start_id is None:
        raise InvalidRequestError(
            "context is empty and the tokenizer has neither BOS nor EOS to stand before the continuation",
            param="context",
        )
    targets = []
    for text in texts:
        ids = encode(tokenizer, text, add_bos=False)
        targets.append(ids[1:] if len(ids) > 1 and ids[0] == start_id else ids)
    return np.array([start_id], np.int32), targets


def _check_ids(context: Any, continuations: Sequence[Any], vocab_size: int) -> tuple[Ids, list[Ids]]:
    if not len(context):
        raise InvalidRequestError(
            "context has no token: the first token needs one before it, for example BOS", param="context"
        )
    for i, continuation in enumerate(continuations):
        if not len(continuation):
            raise InvalidRequestError(f"continuations[{i}] must not be empty", param=f"continuations[{i}]")
    targets = [as_ids(ids, vocab_size, f"continuations[{i}]") for i, ids in enumerate(continuations)]
    return as_ids(context, vocab_size, "context"), targets


def _item(context_ids: Ids, target_ids: Ids) -> Item:
    """The context's last token predicts the first target, so it starts the item.

    context a b c, targets x y z    ->    prefix a b, item c x y, reading x y z
    """
    token_ids = np.concatenate([context_ids[-1:], target_ids[:-1]])
    return Item(token_ids, rows=np.arange(len(token_ids), dtype=np.int32), targets=target_ids[:, None])


def _finish(result: ScoreResult, targets: Sequence[Ids]) -> Loglikelihoods:
    items = tuple(_read(scores, ids) for scores, ids in zip(result.items, targets, strict=True))
    return Loglikelihoods(items=items, usage=result.usage, timings=result.timings)


def _read(scores: ItemScores, target_ids: Ids) -> Loglikelihood:
    logprobs = scores.logprobs[:, 0].astype(np.float64)
    if np.isnan(logprobs).any():
        raise EngineError("the model gave no finite log-probability for the continuation")
    return Loglikelihood(
        logprob=float(logprobs.sum()),
        is_greedy=bool((scores.top_ids == target_ids).all()),
        num_tokens=len(target_ids),
        token_logprobs=tuple(logprobs.tolist()),
    )
