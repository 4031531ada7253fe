"""`Scorer`: the Python face. One object, four questions, plain records back."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from jprefill.config import EngineConfig, from_mapping
from jprefill.errors import ConfigError, InvalidRequestError
from jprefill.tasks.classify import Classifications, classify_job
from jprefill.tasks.decide import Decisions, decide_job
from jprefill.tasks.encoding import encode
from jprefill.tasks.inputs import Ids, Text, TextOrIds
from jprefill.tasks.job import Job
from jprefill.tasks.loglikelihood import Loglikelihoods, loglikelihood_job
from jprefill.tasks.questions import Question
from jprefill.tasks.score import LabelScores, score_job
from jprefill.tokenization.api import Tokenizer
from jprefill.tokenization.chat import ChatTemplate
from jprefill.types import ClassHead, EngineStats, ScoreRequest, ScoreResult

MAX_IN_FLIGHT = 64
"""Requests that `decide_many` keeps waiting: enough to fill passes, far below any queue limit."""


@runtime_checkable
class EngineLike(Protocol):
    """What a scorer needs of an engine."""

    @property
    def model_name(self) -> str:
        """What its checkpoint is called."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt that it takes."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        ...

    @property
    def class_head(self) -> ClassHead | None:
        """The classes of a sequence classifier; None: it scores next tokens."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether it takes requests."""
        ...

    def submit(self, request: ScoreRequest) -> "Future[ScoreResult]":
        """Queues a request, or raises a typed error at once."""
        ...

    def stats(self) -> EngineStats:
        """One look at the counters."""
        ...

    def close(self, timeout_s: float = 0.0) -> None:
        """Stops the engine."""
        ...


class Scorer:
    """Asks one engine and waits for the answers.

    Invariant: holds no state of its own, so any number of threads may call it at once; their requests are
    packed together. Ctrl-C while waiting cancels what was asked.

        with Scorer.load("checkpoints/smollm2") as scorer:
            answer = scorer.decide("The parcel is late.", [Predicate("The customer is happy.")])
            print(answer.answers[0].probability)
    """

    def __init__(self, engine: EngineLike, tokenizer: Tokenizer, chat_template: ChatTemplate | None = None):
        self.engine = engine
        self.tokenizer = tokenizer
        self.chat_template = chat_template

    @classmethod
    def load(cls, path: str | Path, **settings: Any) -> "Scorer":
        """Loads a checkpoint and its tokenizer, compiles, and starts the engine.

            scorer = Scorer.load("checkpoints/smollm2", dtype="float32", max_model_len=4096)
            print(scorer)
            scorer.close()

        Args:
          path: a converted checkpoint, a Hugging Face folder or a GGUF file.
          settings: fields of `EngineConfig`.

        Raises:
          ConfigError: an unknown or impossible setting.
          CheckpointError: the files cannot be used; the message names the file.
        """
        return cls.from_config(path, from_mapping(EngineConfig, settings))

    @classmethod
    def from_config(cls, path: str | Path, config: EngineConfig) -> "Scorer":
        """As `load`, with the settings in one record."""
        # here: they import JAX, and whoever brings an engine of their own needs none of it
        from jprefill.engine import Engine
        from jprefill.model import checkpoints
        from jprefill.tokenization.load import load_tokenizer

        checkpoint = checkpoints.load(path, dtype=config.dtype, quantization=config.quantization, progress=True)
        tokenizer = load_tokenizer(checkpoint.tokenizer_path)
        shared_tokens = _shared_tokens(tokenizer, config)  # before the engine, which takes long and a thread
        engine = Engine.from_checkpoint(checkpoint, config, progress=True)
        if shared_tokens is not None:
            engine.set_shared_tokens(shared_tokens)
        return cls(engine, tokenizer, ChatTemplate.from_tokenizer(tokenizer))

    def score(
        self,
        query: TextOrIds,
        items: Sequence[TextOrIds] | Any,
        labels: Sequence[str] | Any = None,
        label_ids: Sequence[int] | Sequence[Sequence[int]] | Any = None,
        **options: Any,
    ) -> LabelScores:
        """Probabilities of the labels as the next token after `query + item`, for every item.

            scores = scorer.score("Review: ", ["great food", "cold soup"], labels=[" good", " bad"])
            print(scores.items[0].probabilities)
            print(scores.to_pandas())

        Args:
          query: text or token ids, shared by all items and computed once.
          items: of the same kind as `query`.
          labels: allowed answers as text, each one token there.
          label_ids: instead of labels: one list of token ids, or one list per item.
          options: `add_bos`, `item_first`, `temperature`, `salt`, `mark_prefix`, `deadline_s`, as in `score_job`.

        Raises:
          InvalidRequestError: a field is malformed; `param` names it.
          QueueFullError: the engine has too much to do; nothing was queued.
        """
        job = score_job(self.tokenizer, query, items, labels, label_ids, **self._limits(), **options)
        return self._wait(job)

    def decide(
        self,
        input: Text | Sequence[Mapping[str, Any]],
        questions: Sequence[Question | Mapping[str, Any]] | Any,
        **options: Any,
    ) -> Decisions:
        """Answers predicates, choices and ratings about one text, which is computed once.

            questions = [Choice("Which team?", ["billing", "delivery"], name="team")]
            decisions = scorer.decide("Order 1042 is five days late.", questions)
            print(decisions["team"].choice, decisions["team"].probabilities)

        Args:
          input: a text, or user messages with text parts.
          questions: records, or mappings in OpenAI's shape.
          options: `return_prompt_token_ids`, `prompt_format_version`, `salt`, `mark_prefix`, `cache_mode`,
            `deadline_s`: see `decide_job`.

        Raises:
          InvalidRequestError: a field is malformed; `param` names it, like `questions[2].choices`.
          UnsupportedFeatureError: the model has no chat template.
          QueueFullError: the engine has too much to do; nothing was queued.
        """
        return self._wait(self._decide_job(input, questions, options))

    def decide_many(
        self,
        inputs: Iterable[Text | Sequence[Mapping[str, Any]]],
        questions: Sequence[Question | Mapping[str, Any]] | Any,
        **options: Any,
    ) -> Iterator[Decisions]:
        """Asks the same questions about many texts; answers come in their order, as they are ready.

            for decisions in scorer.decide_many(reviews, [Predicate("The guest will come back.")]):
                print(decisions.answers[0].probability)

        Args:
          inputs: read as fast as they are answered, so a generator may be endless.
          questions: as in `decide`.
          options: as in `decide`.

        Raises:
          InvalidRequestError: when its input is reached; what was asked before is cancelled.
        """
        waiting: deque[tuple[Job[Decisions], list[Future[ScoreResult]]]] = deque()
        try:
            for input in inputs:
                job = self._decide_job(input, questions, options)
                waiting.append((job, self._submit(job)))
                if len(waiting) >= MAX_IN_FLIGHT:
                    yield _finish(*waiting.popleft())
            while waiting:
                yield _finish(*waiting.popleft())
        finally:
            _cancel([future for _, futures in waiting for future in futures])

    def loglikelihood(
        self, context: TextOrIds, continuations: Sequence[TextOrIds] | Any, **options: Any
    ) -> Loglikelihoods:
        """`log p(continuation | context)` in nats, by the convention of lm-evaluation-harness.

            result = scorer.loglikelihood("The sky is", [" blue", " green"])
            print(result.items[0].logprob, result.items[0].is_greedy)
            print(result.to_pandas())

        Args:
          context: text or token ids, shared by all continuations and computed once.
          continuations: of the same kind as `context`.
          options: `add_bos`, `salt`, `mark_prefix`, `deadline_s`, as in `loglikelihood_job`.

        Raises:
          InvalidRequestError: a field is malformed; `param` names it.
          QueueFullError: the engine has too much to do; nothing was queued.
        """
        job = loglikelihood_job(self.tokenizer, context, continuations, **self._limits(), **options)
        return self._wait(job)

    def classify(self, texts: Sequence[TextOrIds] | Any, **options: Any) -> Classifications:
        """Class probabilities of each text, from a `...ForSequenceClassification` checkpoint.

            result = scorer.classify(["great food", "cold soup"])
            print(result.class_names, result.items[0].probabilities, result.items[0].top_class)

        Args:
          texts: all texts, or all lists of token ids; a start that they share is computed once.
          options: `add_bos`, `salt`, `deadline_s`, as in `classify_job`.

        Raises:
          InvalidRequestError: a field is malformed; `param` names it.
          UnsupportedFeatureError: the model has no classification head.
          QueueFullError: the engine has too much to do; nothing was queued.
        """
        return self._wait(classify_job(self.tokenizer, self.engine.class_head, texts, **self._limits(), **options))

    def stats(self) -> EngineStats:
        """One look at the engine's counters."""
        return self.engine.stats()

    def close(self, timeout_s: float = 0.0) -> None:
        """Stops the engine; requests that wait may run for `timeout_s` more. Closing twice is fine."""
        self.engine.close(timeout_s)

    def _decide_job(self, input: Any, questions: Any, options: Mapping[str, Any]) -> Job[Decisions]:
        limit = self.engine.max_model_len
        return decide_job(self.tokenizer, self.chat_template, input, questions, max_model_len=limit, **options)

    def _limits(self) -> dict[str, int]:
        return {"vocab_size": self.engine.vocab_size, "max_model_len": self.engine.max_model_len}

    def _wait[T](self, job: Job[T]) -> T:
        return _finish(job, self._submit(job))

    def _submit(self, job: Job[Any]) -> list[Future[ScoreResult]]:
        futures: list[Future[ScoreResult]] = []
        try:
            for request in job.requests:
                futures.append(self.engine.submit(request))
        except BaseException:
            _cancel(futures)
            raise
        return futures

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "alive" if self.engine.is_alive else "closed"
        return f"Scorer(model={self.engine.model_name!r}, max_model_len={self.engine.max_model_len}, {state})"


def _shared_tokens(tokenizer: Tokenizer, config: EngineConfig) -> Ids | None:
    """`EngineConfig.shared_prompt` as text prompts start with it: with BOS by the tokenizer's own rule."""
    if not config.shared_prompt:
        return None
    try:
        return encode(tokenizer, config.shared_prompt, add_bos=tokenizer.adds_bos)
    except InvalidRequestError as error:
        raise ConfigError(f"shared_prompt: {error.message}") from None


def _finish[T](job: Job[T], futures: Sequence[Future[ScoreResult]]) -> T:
    try:
        return job.finish([future.result() for future in futures])
    except BaseException:  # Ctrl-C too: nobody waits for the rest
        _cancel(futures)
        raise


def _cancel(futures: Sequence[Future[ScoreResult]]) -> None:
    for future in futures:
        future.cancel()
