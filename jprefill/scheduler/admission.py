"""What `Engine.submit` refuses, before anything is queued or touches the device."""

import numpy as np

from jprefill.config import EngineConfig
from jprefill.errors import ContextLengthError, InvalidRequestError, UnsupportedFeatureError
from jprefill.types import ClassHead, Item, ScoreRequest


def check(
    request: ScoreRequest,
    config: EngineConfig,
    vocab_size: int,
    max_model_len: int,
    class_head: ClassHead | None = None,
) -> None:
    """Accepts a request that can run, whatever else is waiting.

    Tasks and routes check the same things earlier, in their callers' words; this is the last door.

    Raises:
      InvalidRequestError: counts, ids or rows out of range; `param` says where.
      ContextLengthError: a prompt is longer than `max_model_len`.
      UnsupportedFeatureError: it reads a head that the model does not have.
    """
    _check_head(request, class_head)
    if not request.items:
        raise InvalidRequestError("a request needs at least one item", param="items")
    if len(request.items) > config.max_items:
        raise InvalidRequestError(f"{len(request.items)} items, the limit is {config.max_items}", param="items")
    _check_ids(request.prefix, vocab_size, "prefix")
    for index, item in enumerate(request.items):
        _check_item(item, vocab_size, f"items[{index}]")
        _check_targets(item.targets, config, vocab_size, class_head, f"items[{index}]")
        num_tokens = len(request.prefix) + len(item.token_ids)
        if num_tokens > max_model_len:
            raise ContextLengthError(
                f"prompt has {num_tokens} tokens, the limit is {max_model_len}", param=f"items[{index}]"
            )


def _check_head(request: ScoreRequest, class_head: ClassHead | None) -> None:
    """A classifier has no next token, a language model has no classes; the ids alone would not show it."""
    if class_head is None and request.head == "classes":
        raise UnsupportedFeatureError("this model has no classification head: it scores next tokens")
    if class_head is not None and request.head == "tokens":
        raise UnsupportedFeatureError(
            f"this model is a classifier with {len(class_head.names)} classes: it has no next-token probabilities"
        )


def _check_item(item: Item, vocab_size: int, param: str) -> None:
    num_rows, num_targets = item.targets.shape
    if not len(item.token_ids):
        raise InvalidRequestError("an item needs at least one token", param=param)
    if not num_rows or not num_targets:
        raise InvalidRequestError("an item needs at least one target to read", param=param)
    if num_rows != len(item.rows):
        raise InvalidRequestError(f"{len(item.rows)} rows but targets for {num_rows}", param=param)
    if item.rows.min() < 0 or item.rows.max() >= len(item.token_ids):
        raise InvalidRequestError(f"rows must be 0 to {len(item.token_ids) - 1}", param=param)
    _check_ids(item.token_ids, vocab_size, param)


def _check_targets(
    targets: np.ndarray, config: EngineConfig, vocab_size: int, class_head: ClassHead | None, param: str
) -> None:
    """Ids of the head. The classes are few and known: all of them may always be read."""
    limit = config.max_labels if class_head is None else max(config.max_labels, class_head.num_targets)
    if targets.shape[1] > limit:
        raise InvalidRequestError(f"{targets.shape[1]} labels, the limit is {limit}", param=param)
    num_ids = vocab_size if class_head is None else class_head.num_targets
    _check_ids(targets, num_ids, f"{param} targets")


def _check_ids(token_ids: np.ndarray, vocab_size: int, param: str) -> None:
    """A JAX gather clamps an id that is out of range without a word; so it is checked here."""
    if token_ids.size and (token_ids.min() < 0 or token_ids.max() >= vocab_size):
        worst = token_ids.min() if token_ids.min() < 0 else token_ids.max()
        raise InvalidRequestError(f"token id {worst} is out of range: 0 to {vocab_size - 1}", param=param)
