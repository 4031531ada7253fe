"""Label scoring: how probable is each label as the next token after query and item?"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jprefill.errors import InvalidRequestError, LabelError
from jprefill.tasks.encoding import encode_all, num_settled_tokens
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
from jprefill.tasks.probabilities import check_temperature, label_mass, softmax
from jprefill.tasks.sharing import split_prefix
from jprefill.tokenization.api import Tokenizer
from jprefill.tokenization.checks import check_token_ids
from jprefill.tokenization.labels import resolve_labels
from jprefill.types import Item, ItemScores, ScoreRequest, ScoreResult, Timings, Usage

Labels = tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class ItemLabels:
    """What the model answers after one item. Tuples are in the order of the labels.

    Attributes:
      probabilities: softmax over the labels alone; they sum to 1.
      logprobs: natural logarithms over the full vocabulary, before any temperature.
      label_mass: probability over the full vocabulary that the answer is any label, 0 to 1.
      top_id: the most probable next token of all.
      is_top_label: whether that token is one of the labels.
    """

    probabilities: tuple[float, ...]
    logprobs: tuple[float, ...]
    label_mass: float
    top_id: int
    is_top_label: bool


@dataclass(frozen=True, slots=True)
class LabelScores:
    """The answer to a label scoring request; `items` in the request's order.

    Attributes:
      labels: as sent; None where the labels were sent as token ids.
      label_ids: one tuple of token ids per item.
    """

    labels: Labels
    label_ids: tuple[tuple[int, ...], ...]
    items: tuple[ItemLabels, ...]
    usage: Usage
    timings: Timings

    def to_dicts(self) -> list[dict[str, Any]]:
        """One plain record per item, ready for JSON."""
        return [
            {"item": i, "labels": list(self._names(i)), "label_ids": list(ids), **asdict(item)}
            for i, (ids, item) in enumerate(zip(self.label_ids, self.items, strict=True))
        ]

    def to_pandas(self) -> Any:
        """A data frame: a row per item, a `probability.LABEL` and a `logprob.LABEL` column per label.

        Raises:
          ImportError: pandas is not installed.
        """
        return to_frame([self._flat(i) for i in range(len(self.items))])

    def _names(self, i: int) -> tuple[str, ...]:
        return self.labels or tuple(map(str, self.label_ids[i]))

    def _flat(self, i: int) -> dict[str, Any]:
        item, names = self.items[i], self._names(i)
        return {
            "item": i,
            **{f"probability.{name}": p for name, p in zip(names, item.probabilities, strict=True)},
            **{f"logprob.{name}": value for name, value in zip(names, item.logprobs, strict=True)},
            "label_mass": item.label_mass,
            "top_id": item.top_id,
            "is_top_label": item.is_top_label,
        }


def score_job(
    tokenizer: Tokenizer,
    query: TextOrIds,
    items: Sequence[TextOrIds] | Any,
    labels: Sequence[str] | Any = None,
    label_ids: Sequence[int] | Sequence[Sequence[int]] | Any = None,
    *,
    add_bos: bool | None = None,
    item_first: bool = False,
    temperature: float | Any = 1.0,
    vocab_size: int | None = None,
    max_model_len: int | None = None,
    max_items: int | None = None,
    salt: Text = "",
    mark_prefix: bool = False,
    deadline_s: float | None = None,
) -> Job[LabelScores]:
    """Asks for the probabilities of the labels after `query + item`, for every item.

    Text is joined and tokenised whole, exactly as if the caller had sent the full prompt; the tokens that
    all prompts start with are computed once. Token ids are joined as they are and never altered.

    Args:
      query: text or token ids; `items` must be of the same kind. Either may be empty, not both.
      items: what is scored, in any order; item + query if `item_first`.
      labels: allowed answers as text, each one token after every prompt. Text queries only.
      label_ids: allowed answers as token ids: one list for all items or one list per item.
      add_bos: whether text starts with BOS; None follows the tokenizer's own rule.
      temperature: divides the log-probabilities before the softmax; `logprobs` and `label_mass` stay raw.
      vocab_size: rows of the LM head; None takes the tokenizer's.
      max_model_len: longest prompt in tokens; None leaves the check to the engine.
      max_items: likewise, items of one request.
      salt: separates tenants in the prefix store.
      mark_prefix: the query will come again with other items: its KV is kept. Without effect where items come first.
      deadline_s: on the monotonic clock.

    Raises:
      InvalidRequestError: a field is malformed; `param` names it.
      LabelError: a label is not one token, is there twice, or differs between items.
      ContextLengthError: a prompt is longer than `max_model_len`.
    """
    temperature = check_temperature(temperature)
    items = check_list(items, "items", maximum=max_items)
    vocab_size = vocab_size or tokenizer.vocab_size
    is_text = check_kinds(query, "query", items, "items")
    _check_labels_given(labels, label_ids, is_text=is_text)
    if is_text:
        texts = _join_texts(query, items, item_first=item_first)
        bos = tokenizer.adds_bos if add_bos is None else add_bos
        prompts = encode_all(tokenizer, texts, add_bos=bos)
        num_query = num_settled_tokens(tokenizer, texts[0], prompts[0], len(query), add_bos=bos)
    else:
        texts = []  # no labels as text either: refused above
        prompts = _join_ids(query, items, vocab_size, item_first=item_first)
        num_query = len(query)
    for i, prompt in enumerate(prompts):
        check_length(len(prompt), max_model_len, f"items[{i}]")
    if labels is not None:
        names = _check_label_texts(labels)
        targets = [_shared_label_ids(tokenizer, names, texts)] * len(items)
    else:
        names = None
        targets = _label_ids_per_item(label_ids, len(items), vocab_size)
    num_query = 0 if item_first else num_query
    request = _request(
        prompts,
        targets,
        num_query,
        deadline_s=deadline_s,
        salt=check_text(salt, "salt", may_be_empty=True),
        num_marked_tokens=num_query if mark_prefix else 0,
    )
    return Job((request,), lambda results: _finish(results[0], names, targets, temperature))


def _check_labels_given(labels: Any, label_ids: Any, *, is_text: bool) -> None:
    if (labels is None) == (label_ids is None):
        raise InvalidRequestError(
            "send labels (texts) or label_ids (token ids), one of the two",
            param="labels" if labels is None else "label_ids",
        )
    if labels is not None and not is_text:
        raise InvalidRequestError(
            "labels are texts and query is token ids: send label_ids, because a label's token depends on the "
            "text before it",
            param="labels",
        )


def _join_texts(query: Text, items: Sequence[Text], *, item_first: bool) -> list[str]:
    query = check_text(query, "query", may_be_empty=True)
    texts = []
    for i, item in enumerate(items):
        item = check_text(item, f"items[{i}]", may_be_empty=True)
        if not (query or item):
            raise InvalidRequestError(f"query and items[{i}] are both empty", param=f"items[{i}]")
        texts.append(item + query if item_first else query + item)
    return texts


def _join_ids(query: Any, items: Sequence[Any], vocab_size: int, *, item_first: bool) -> list[Ids]:
    query_ids = as_ids(query, vocab_size, "query")
    prompts = []
    for i, item in enumerate(items):
        item_ids = as_ids(item, vocab_size, f"items[{i}]")
        if not len(query_ids) + len(item_ids):
            raise InvalidRequestError(f"query and items[{i}] are both empty", param=f"items[{i}]")
        prompts.append(np.concatenate([item_ids, query_ids] if item_first else [query_ids, item_ids]))
    return prompts


def _check_label_texts(labels: Any) -> tuple[str, ...]:
    return tuple(check_text(label, f"labels[{i}]") for i, label in enumerate(check_list(labels, "labels")))


def _shared_label_ids(tokenizer: Tokenizer, labels: tuple[str, ...], texts: Sequence[str]) -> Ids:
    """The labels' ids after every prompt; a tokenizer may join a label with the item's last characters."""
    first: Ids | None = None
    for i, text in enumerate(texts):
        try:
            ids = np.asarray(resolve_labels(tokenizer, labels, text, param="labels"), np.int32)
        except LabelError as error:
            param = error.param if first is None else f"items[{i}]"
            raise LabelError(f"after items[{i}]: {error.message}", param=param) from None
        if first is None:
            first = ids
        elif (ids != first).any():
            j = int((ids != first).argmax())
            raise LabelError(
                f"label {labels[j]!r} is token {first[j]} after items[0] and token {ids[j]} after "
                f"items[{i}]: end all items alike, or send label_ids",
                param=f"items[{i}]",
            )
    assert first is not None  # `items` is not empty
    return first


def _label_ids_per_item(label_ids: Any, num_items: int, vocab_size: int) -> list[Ids]:
    label_ids = check_list(label_ids, "label_ids")
    if not isinstance(label_ids[0], list | tuple | np.ndarray):
        return [_distinct_ids(label_ids, vocab_size, "label_ids")] * num_items
    if len(label_ids) != num_items:
        raise InvalidRequestError(
            f"label_ids has {len(label_ids)} lists for {num_items} items: send one list for all items "
            "or one list per item",
            param="label_ids",
        )
    return [_distinct_ids(ids, vocab_size, f"label_ids[{i}]") for i, ids in enumerate(label_ids)]


def _distinct_ids(ids: Any, vocab_size: int, param: str) -> Ids:
    checked = check_token_ids(check_list(ids, param), vocab_size, param)
    values, counts = np.unique(checked, return_counts=True)
    if (counts > 1).any():
        raise LabelError(f"{param} holds token {values[counts > 1][0]} twice", param=param)
    return checked


def _request(prompts: Sequence[Ids], targets: Sequence[Ids], num_reusable: int, **options: Any) -> ScoreRequest:
    """Reads the last row of each prompt: it predicts the token that follows."""
    prefix, suffixes = split_prefix(prompts, num_reusable)
    items = tuple(
        Item(token_ids=ids, rows=np.array([len(ids) - 1], np.int32), targets=target_ids[None])
        for ids, target_ids in zip(suffixes, targets, strict=True)
    )
    return ScoreRequest(prefix, items, **options)


def _finish(result: ScoreResult, labels: Labels, targets: Sequence[Ids], temperature: float) -> LabelScores:
    pairs = zip(result.items, targets, strict=True)
    return LabelScores(
        labels=labels,
        label_ids=tuple(tuple(ids.tolist()) for ids in targets),
        items=tuple(read_labels(scores, ids, temperature) for scores, ids in pairs),
        usage=result.usage,
        timings=result.timings,
    )


def read_labels(scores: ItemScores, label_ids: Ids, temperature: float = 1.0) -> ItemLabels:
    """Label probabilities from the one row that was read of an item.

    Raises:
      EngineError: the model gave no finite number.
    """
    logprobs = tuple(scores.logprobs[0].tolist())
    top_id = int(scores.top_ids[0])
    return ItemLabels(
        probabilities=softmax(logprobs, temperature),
        logprobs=logprobs,
        label_mass=label_mass(logprobs),
        top_id=top_id,
        is_top_label=bool((label_ids == top_id).any()),
    )
