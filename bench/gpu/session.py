"""What steps share: the two children, the clock, and what earlier steps found out."""

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from bench.gpu.child import Child, ChildError
from bench.gpu.sizes import ModelShape, Sizes

MAX_WAIT_S = 180.0  # for one answer; a compiler that hangs must not take the whole run


class Session:
    """One run. Used by one thread.

    Attributes:
      peer: the PyTorch side; None where it is not installed.
      machine: what `describe` answered on our side.
      ceiling_tflops: fastest matrix product of either side; None before it was measured.
      right: attention implementations that agree with the reference; None before they were compared.
      attention_s: implementation -> seconds for the longest prompt, of those that were timed.
      attention: the one that passes use; None leaves it to jprefill.
      is_attention_fixed: the caller named it; measurements do not change it.
      peer_backend: likewise for the peer.
      planned: bucket -> planned bytes of a pass with the weights, once the model is loaded.
      weights_bytes: of our side.
    """

    def __init__(self, sizes: Sizes, ours: Child, peer: Child | None, *, limit_s: float, attention: str | None):
        self.sizes, self.ours, self.peer = sizes, ours, peer
        self.started = time.monotonic()
        self.limit_s = limit_s
        self.machine: dict[str, Any] = {}
        self.ceiling_tflops: float | None = None
        self.right: set[str] | None = None
        self.attention_s: dict[str, float] = {}
        self.attention = attention
        self.is_attention_fixed = attention is not None
        self.peer_backend: str | None = None
        self.planned: dict[str, int] = {}
        self.weights_bytes = 0
        self._loaded: dict[str, int] = {}

    @property
    def elapsed_s(self) -> float:
        """Since the run began."""
        return time.monotonic() - self.started

    @property
    def left_s(self) -> float:
        """Until the run must end."""
        return self.limit_s - self.elapsed_s

    @property
    def sides(self) -> Iterator[Child]:
        """Ours, then the peer if there is one."""
        yield self.ours
        if self.peer is not None:
            yield self.peer

    def ask(self, child: Child, call: str, **args: object) -> Any:
        """One command of a worker.

        Raises:
          ChildError: it failed, or no time is left.
        """
        if self.left_s <= 0:
            raise ChildError("no time is left")
        return child.ask(call, timeout_s=min(self.left_s, MAX_WAIT_S), **args)

    def attempt(self, child: Child, call: str, **args: object) -> dict[str, Any]:
        """As `ask` for commands that answer with an object; a failure is `{"error": text}`."""
        try:
            return self.ask(child, call, **args)
        except ChildError as error:
            return {"error": str(error)}

    def load(self, child: Child) -> dict[str, Any] | None:
        """Loads the model unless this process holds it already; what the worker says about it, or None.

        Raises:
          ChildError: it does not load.
        """
        if self._loaded.get(child.name) == child.generation:
            return None
        answer = self._load_ours() if child is self.ours else self._load_peer(child)
        self._loaded[child.name] = child.generation
        return answer

    def _load_ours(self) -> dict[str, Any]:
        sizes = {"model": asdict(self.sizes.model), "chunk_size": self.sizes.chunk_size, "buckets": self.sizes.buckets}
        try:
            answer = self.ask(self.ours, "load", attention=self.attention, is_cached=True, **sizes)
        except ChildError as error:
            # The compilation cache is the only part of this that a real start can do without.
            answer = self.ask(self.ours, "load", attention=self.attention, is_cached=False, **sizes)
            answer["note"] = f"loaded without a compilation cache, after: {error}"
        self.planned, self.weights_bytes = answer["planned"], answer["weights_bytes"]
        return answer

    def _load_peer(self, child: Child) -> dict[str, Any]:
        return self.ask(child, "load", model=asdict(self.sizes.model), backend=self.peer_backend)

    @property
    def timing(self) -> dict[str, Any]:
        """Arguments of every timed command."""
        return {"repeats": self.sizes.repeats, "target_s": self.sizes.target_s}


def heads_of(model: ModelShape) -> dict[str, int]:
    """Arguments of attention commands."""
    return {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
