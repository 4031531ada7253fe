"""Classification: the class probabilities that a sequence classifier gives a text."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jprefill.errors import InvalidRequestError, UnsupportedFeatureError
from jprefill.tasks.encoding import encode_all
from jprefill.tasks.frames import to_frame
from jprefill.tasks.inputs import Ids, Text, TextOrIds, as_ids, check_kinds, check_length, check_list, check_text
from jprefill.tasks.job import Job
from jprefill.tasks.probabilities import softmax
from jprefill.tasks.sharing import split_prefix
from jprefill.tokenization.api import Tokenizer
from jprefill.types import ClassHead, Item, ItemScores, ScoreRequest, ScoreResult, Timings, Usage


@dataclass(frozen=True, slots=True)
class ItemClasses:
    """What the classifier says about one text. Tuples are in the order of the classes.

    Attributes:
      probabilities: softmax over the classes; of a head whose classes are not exclusive (or that has one class
        only) the sigmoid of each logit.
      logits: the head's own numbers; of a reward model or reranker the score.
      top_class: name of the class with the largest logit.
    """

    probabilities: tuple[float, ...]
    logits: tuple[float, ...]
    top_class: str


@dataclass(frozen=True, slots=True)
class Classifications:
    """The answer to a classification request; `items` in the order of the texts."""

    class_names: tuple[str, ...]
    items: tuple[ItemClasses, ...]
    usage: Usage
    timings: Timings

    def to_dicts(self) -> list[dict[str, Any]]:
        """One plain record per text, ready for JSON."""
        return [{"item": i, "class_names": list(self.class_names), **asdict(item)} for i, item in enumerate(self.items)]

    def to_pandas(self) -> Any:
        """A data frame: a row per text, a `probability.CLASS` and a `logit.CLASS` column per class.

        Raises:
          ImportError: pandas is not installed.
        """
        return to_frame([self._flat(i, item) for i, item in enumerate(self.items)])

    def _flat(self, i: int, item: ItemClasses) -> dict[str, Any]:
        return {
            "item": i,
            **{f"probability.{name}": p for name, p in zip(self.class_names, item.probabilities, strict=True)},
            **{f"logit.{name}": value for name, value in zip(self.class_names, item.logits, strict=True)},
            "top_class": item.top_class,
        }


def classify_job(
    tokenizer: Tokenizer,
    head: ClassHead | None,
    texts: Sequence[TextOrIds] | Any,
    *,
    add_bos: bool | None = None,
    vocab_size: int | None = None,
    max_model_len: int | None = None,
    max_items: int | None = None,
    salt: Text = "",
    deadline_s: float | None = None,
) -> Job[Classifications]:
    """Asks for the classes of every text. The head reads its last token, padding left out.

    Args:
      head: of the model; None where it has none.
      texts: all texts, or all lists of token ids. What they start with alike is computed once.
      add_bos: whether text starts with BOS; None follows the tokenizer's own rule.
      vocab_size: rows of the embedding; None takes the tokenizer's.
      max_model_len: longest text in tokens; None leaves the check to the engine.
      max_items: likewise, texts of one request.
      salt: separates tenants in the prefix store.
      deadline_s: on the monotonic clock.

    Raises:
      UnsupportedFeatureError: the model has no classification head.
      InvalidRequestError: a field is malformed; `param` names it.
      ContextLengthError: a text is longer than `max_model_len`.
    """
    if head is None:
        raise UnsupportedFeatureError("this model has no classification head: it scores next tokens")
    texts = check_list(texts, "texts", maximum=max_items)
    if check_kinds(texts[0], "texts[0]", texts, "texts"):
        checked = [check_text(text, f"texts[{i}]", may_be_empty=True) for i, text in enumerate(texts)]
        prompts = encode_all(tokenizer, checked, add_bos=tokenizer.adds_bos if add_bos is None else add_bos)
    else:
        limit = vocab_size or tokenizer.vocab_size
        prompts = [as_ids(ids, limit, f"texts[{i}]") for i, ids in enumerate(texts)]
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise InvalidRequestError(f"texts[{i}] has no token", param=f"texts[{i}]")
        check_length(len(prompt), max_model_len, f"texts[{i}]")
    salt = check_text(salt, "salt", may_be_empty=True)
    request = _request([_without_padding(prompt, head.pad_id) for prompt in prompts], head, salt, deadline_s)
    return Job((request,), lambda results: _finish(results[0], head))


def _without_padding(prompt: Ids, pad_id: int | None) -> Ids:
    """Cut after the last token that is not padding; where all are, the first stays.

    A model may be trained with its end of text as padding; transformers then reads the token before it, and so
    must we.
    Source: transformers `GenericForSequenceClassification.forward`.
    """
    if pad_id is None:
        return prompt
    real = np.flatnonzero(prompt != pad_id)
    return prompt[: real[-1] + 1 if len(real) else 1]


def _request(prompts: Sequence[Ids], head: ClassHead, salt: str, deadline_s: float | None) -> ScoreRequest:
    """Reads all classes, and the zero logit that they are measured from, at each prompt's last token."""
    prefix, suffixes = split_prefix(prompts)
    targets = np.arange(head.num_targets, dtype=np.int32)[None]
    items = tuple(Item(token_ids=ids, rows=np.array([len(ids) - 1], np.int32), targets=targets) for ids in suffixes)
    return ScoreRequest(prefix, items, deadline_s=deadline_s, salt=salt, head="classes")


def _finish(result: ScoreResult, head: ClassHead) -> Classifications:
    return Classifications(
        class_names=head.names,
        items=tuple(read_classes(scores, head) for scores in result.items),
        usage=result.usage,
        timings=result.timings,
    )


def read_classes(scores: ItemScores, head: ClassHead) -> ItemClasses:
    """Logits and probabilities from the one row that was read of a text.

    Raises:
      EngineError: the model gave no finite number.
    """
    logprobs = scores.logprobs[0].astype(np.float64)
    logits = tuple((logprobs[: head.zero_id] - logprobs[head.zero_id]).tolist())
    return ItemClasses(_probabilities(logits, head), logits, head.names[int(np.argmax(logits))])


def _probabilities(logits: tuple[float, ...], head: ClassHead) -> tuple[float, ...]:
    if head.is_exclusive:
        return softmax(logits)
    return tuple(softmax((logit, 0.0))[0] for logit in logits)  # the sigmoid of z is the softmax of z and 0
