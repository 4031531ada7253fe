"""`ServerState`: the one object that the door and the routes share."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Literal

from starlette.requests import Request

from jprefill.config import ServerConfig
from jprefill.errors import ModelNotFoundError, NotReadyError, QueueFullError
from jprefill.scorer import Scorer
from jprefill.server.limits import Limits
from jprefill.server.metrics import Metrics
from jprefill.types import EngineStats

Phase = Literal["loading", "ready", "draining", "failed"]


class ServerState:
    """Phase, scorer, pools and counters of one server.

    Invariant: `num_accepted - num_answered` requests are inside; it is 0 when the server is idle. All
    fields belong to the event loop, except that the loading thread calls `loaded` or `load_failed` once.
    """

    def __init__(self, config: ServerConfig, limits: Limits):
        self.config = config
        self.limits = limits
        self.phase: Phase = "loading"
        self.load_error: str | None = None
        self.created_s = int(time.time())
        self.num_accepted = 0
        self.num_answered = 0
        self.num_held_bytes = 0
        self.pool = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="jprefill-tokenize")
        self.metrics = Metrics(self.engine_stats, lambda: self.num_open)
        self._scorer: Scorer | None = None
        self._is_closed = False

    @property
    def num_open(self) -> int:
        """Requests inside the server now."""
        return self.num_accepted - self.num_answered

    @property
    def is_loader_done(self) -> bool:
        """Whether the loading thread has ended, one way or the other."""
        return self._scorer is not None or self.load_error is not None

    @property
    def is_alive(self) -> bool:
        """Liveness: the engine is up; it stays true while draining."""
        return self._scorer is not None and self._scorer.engine.is_alive

    @property
    def is_ready(self) -> bool:
        """Readiness: requests are welcome here."""
        return self.phase == "ready" and self.is_alive

    def engine_stats(self) -> EngineStats | None:
        """One look at the engine's counters; None before it is loaded."""
        return self._scorer and self._scorer.engine.stats()

    def scorer(self) -> Scorer:
        """The scorer, for new work.

        Raises:
          NotReadyError: loading, failed, or draining.
        """
        scorer = self.loaded_scorer()
        if self.phase != "ready":
            raise NotReadyError("the server is shutting down: ask another replica")
        return scorer

    def loaded_scorer(self) -> Scorer:
        """The scorer, for work that is inside already and for questions about the model; also while draining.

        Raises:
          NotReadyError: loading or failed.
        """
        if self._scorer is None:
            raise NotReadyError("the model is not loaded yet: try again or ask another replica")
        return self._scorer

    def loaded(self, scorer: Scorer) -> None:
        """Called once by the loading thread; a stop that came meanwhile stays a stop."""
        self._scorer = scorer
        if self.phase == "loading":
            self.phase = "ready"

    def load_failed(self, message: str) -> None:
        """Called once by the loading thread instead of `loaded`."""
        self.load_error = message
        self.phase = "failed"

    def start_draining(self) -> None:
        """New work gets 503 from now on; what is inside goes on."""
        self.phase = "draining"

    def close(self, timeout_s: float) -> None:
        """Stops the engine and the pool, once; blocks up to `timeout_s` for requests that still run."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._scorer is not None:
            self._scorer.engine.close(timeout_s)
        self.pool.shutdown(wait=False, cancel_futures=True)

    def model_names(self) -> tuple[str, ...]:
        """Names that requests may use; the first is echoed."""
        return self.config.served_model_names or (self.loaded_scorer().engine.model_name,)

    def check_model(self, name: str) -> str:
        """Returns the name to echo.

        Raises:
          ModelNotFoundError: the model is not served here.
        """
        if name not in (names := self.model_names()):
            raise ModelNotFoundError(f"the model {name[:100]!r} is not served here: use {names[0]!r}", param="model")
        return names[0]

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """Counts a decoded body against `Limits.max_held_bytes` while it is inside.

        Raises:
          QueueFullError: the bodies inside are too many bytes already.
        """
        if self.num_held_bytes and self.num_held_bytes + num_bytes > self.limits.max_held_bytes:
            raise QueueFullError("the server holds too many bytes of requests", retry_after_s=1.0)
        self.num_held_bytes += num_bytes
        try:
            yield
        finally:
            self.num_held_bytes -= num_bytes


def state_of(request: Request) -> ServerState:
    """The state of the app that serves `request`."""
    return request.app.state.server
