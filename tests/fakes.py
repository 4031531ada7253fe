"""Stand-ins for a tokenizer and an engine: exact, fast, and no JAX anywhere.

`ByteTokenizer` has one token per UTF-8 byte and a few special tokens. `FakeEngine` answers from a hash of
the tokens that a row sees, so two requests agree exactly where they ask about the same context, however
the tokens are split into prefix and items.
"""

import hashlib
import re
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import numpy as np

from jprefill.errors import ContextLengthError, InvalidRequestError, NotReadyError
from jprefill.types import (
    ClassHead,
    EngineStats,
    Item,
    ItemScores,
    ScoreRequest,
    ScoreResult,
    TierStats,
    Timings,
    Usage,
)

SPECIALS = ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
BOS_ID, EOS_ID = 256, 257
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class ByteTokenizer:
    """One token per byte; ids 256 and up are `SPECIALS`, then spare ids that no text reaches.

    `merges` are pieces of text with a token of their own, longest match first, as a real vocabulary has;
    they make the tokens of a joined text differ from the joined tokens of its parts.
    """

    def __init__(
        self,
        *,
        adds_bos: bool = True,
        chat_template: str | None = CHAT_TEMPLATE,
        merges: Sequence[str] = (),
        has_bos: bool = True,
        has_eos: bool = True,
    ):
        pieces = [*SPECIALS, *merges]
        self._ids = {text: 256 + i for i, text in enumerate(pieces)}
        self._texts = {token_id: text for text, token_id in self._ids.items()}
        longest_first = sorted(pieces, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self.vocab_size = 256 + len(pieces) + 2
        self.bos_id = BOS_ID if has_bos else None
        self.eos_id = EOS_ID if has_eos else None
        self.adds_bos = adds_bos and has_bos
        self.chat_template = chat_template
        self.special_tokens = {"bos_token": "<s>", "eos_token": "</s>"}
        self.boundary_texts = SPECIALS

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        """Bytes and special tokens; exactly one BOS in front if asked."""
        token_ids: list[int] = []
        for piece in self._pattern.split(text):
            try:
                token_ids += [self._ids[piece]] if piece in self._ids else piece.encode()
            except UnicodeEncodeError:
                raise InvalidRequestError("the text holds a lone surrogate: send valid Unicode") from None
        if add_bos and self.bos_id is not None and token_ids[:1] != [self.bos_id]:
            token_ids.insert(0, self.bos_id)
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD."""
        parts = [self._texts[i].encode() if i in self._texts else bytes([i]) for i in token_ids]
        return b"".join(parts).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        """One token as a person would read it."""
        return self.decode([token_id])


class FakeEngine:
    """Answers every request from a hash of its tokens, in a thread, after `delay_s`.

    It stores nothing, but says in `usage` that it kept what was marked.

    Attributes:
      requests: every accepted request, in order.
      raise_error: set on the futures instead of an answer.
      submit_error: raised by `submit` at once.
      class_head: set, it answers as a classifier; the first ids of the vocabulary stand for the classes.
      shared_tokens: of the last `set_shared_tokens`.
      tiers: shown in `stats`.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 264,
        max_model_len: int = 100_000,
        model_name: str = "fake",
        delay_s: float = 0.0,
        raise_error: BaseException | None = None,
        submit_error: BaseException | None = None,
        class_head: ClassHead | None = None,
    ):
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.model_name = model_name
        self.delay_s = delay_s
        self.raise_error = raise_error
        self.submit_error = submit_error
        self.class_head = class_head
        self.is_alive = True
        self.requests: list[ScoreRequest] = []
        self.num_finished = 0
        self.num_prompt_tokens = self.num_cached_tokens = self.num_kept_tokens = 0
        self.shared_tokens: np.ndarray | None = None
        self.tiers: dict[str, TierStats] = {}
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fake-engine")

    def submit(self, request: ScoreRequest) -> "Future[ScoreResult]":
        """Checks lengths and ids as the real engine does, then answers in the thread."""
        if self.submit_error is not None:
            raise self.submit_error
        if not self.is_alive:
            raise NotReadyError("the engine is closed")
        for item in request.items:
            num_tokens = len(request.prefix) + len(item.token_ids)
            if num_tokens > self.max_model_len:
                raise ContextLengthError(f"prompt has {num_tokens} tokens, the limit is {self.max_model_len}")
        self.requests.append(request)
        return self._pool.submit(self._answer, request, time.monotonic())

    def _answer(self, request: ScoreRequest, submitted_s: float) -> ScoreResult:
        queue_s = time.monotonic() - submitted_s
        time.sleep(self.delay_s)
        if self.raise_error is not None:
            raise self.raise_error
        items = tuple(item_scores(request.prefix, item, self.vocab_size) for item in request.items)
        self.num_finished += 1
        num_kept = request.num_marked_tokens if request.uses_store else 0
        usage = Usage(request.num_prompt_tokens, len(request.prefix) * (len(request.items) - 1), num_kept)
        self.num_prompt_tokens += usage.num_prompt_tokens
        self.num_cached_tokens += usage.num_cached_tokens
        self.num_kept_tokens += usage.num_kept_tokens
        timings = Timings(queue_s=queue_s, device_s=self.delay_s, total_s=time.monotonic() - submitted_s)
        return ScoreResult(items=items, usage=usage, timings=timings)

    def set_shared_tokens(self, token_ids: np.ndarray) -> None:
        """Remembers them."""
        self.shared_tokens = token_ids

    def stats(self) -> EngineStats:
        """Counts of requests and tokens, and `tiers`; the rest is zero."""
        return EngineStats(
            num_waiting=len(self.requests) - self.num_finished,
            num_finished=self.num_finished,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_kept_tokens=self.num_kept_tokens,
            tiers=self.tiers,
        )

    def close(self, timeout_s: float = 0.0) -> None:
        """Refuses new requests; waits for the running ones."""
        self.is_alive = False
        self._pool.shutdown(wait=True, cancel_futures=timeout_s == 0.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def next_token_logprobs(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """Float64 log-probabilities of the token after `token_ids`: what `FakeEngine` thinks of this context."""
    digest = hashlib.sha256(np.asarray(token_ids, np.int32).tobytes()).digest()
    logits = np.random.default_rng(int.from_bytes(digest[:8], "little")).standard_normal(vocab_size)
    return logits - np.log(np.exp(logits).sum())


def item_scores(prefix: np.ndarray, item: Item, vocab_size: int) -> ItemScores:
    """What the rows of one item say, each from exactly the tokens it may see."""
    rows = [
        next_token_logprobs([*prefix, *item.token_ids[: row + 1]], vocab_size).astype(np.float32) for row in item.rows
    ]
    logprobs = [row[targets] for row, targets in zip(rows, item.targets, strict=True)]
    return ItemScores(
        logprobs=np.asarray(logprobs, np.float32).reshape(item.targets.shape),
        top_ids=np.asarray([row.argmax() for row in rows], np.int32),
        top_logprobs=np.asarray([row.max() for row in rows], np.float32),
    )
