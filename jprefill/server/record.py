"""`RequestRecord`: what is known about one HTTP request, for its headers, metrics and log line."""

import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

SCOPE_KEY = "jprefill.record"
_UNSAFE_ID = re.compile(r"[^A-Za-z0-9._:-]")
_MAX_ID_CHARS = 128


@dataclass(slots=True)
class RequestRecord:
    """Filled in while the request passes; owned by its own task, so no lock.

    `request_id` is the caller's where it sent a usable one: it is echoed and logged, and never a key.
    The caller learns what was in the prefix store only if `tells_cached`; the log always does.
    """

    request_id: str
    method: str
    started_s: float = field(default_factory=time.monotonic)
    route: str = "other"
    status: int = 0
    reason: str | None = None
    model: str | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_kept_tokens: int | None = None
    tells_cached: bool = False
    num_items: int | None = None
    queue_s: float = 0.0
    tokenize_s: float = 0.0
    device_s: float = 0.0

    @classmethod
    def begin(cls, scope: Scope) -> "RequestRecord":
        """Starts the record of a request and hangs it into `scope`."""
        record = cls(request_id=_request_id(header(scope, b"x-request-id")), method=scope["method"])
        scope[SCOPE_KEY] = record
        return record

    @property
    def total_s(self) -> float:
        """Seconds since the headers came."""
        return time.monotonic() - self.started_s

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Response headers: the id, and the timings in milliseconds under the names that TEI uses."""
        pairs = {"x-request-id": self.request_id, "x-total-time": _ms(self.total_s)}
        if self.num_prompt_tokens is not None:
            pairs |= {
                "x-queue-time": _ms(self.queue_s),
                "x-inference-time": _ms(self.device_s),
                "x-tokenization-time": _ms(self.tokenize_s),
                "x-prompt-tokens": str(self.num_prompt_tokens),
            }
            if self.tells_cached:
                pairs["x-cached-tokens"] = str(self.num_cached_tokens or 0)
        return [(name.encode(), value.encode()) for name, value in pairs.items()]

    def log_fields(self) -> dict[str, Any]:
        """Keys of the access line. No prompt, no header value but the cleaned request id."""
        return {
            "request_id": self.request_id,
            "route": self.route,
            "status": self.status,
            "model": self.model,
            "n_prompt": self.num_prompt_tokens,
            "n_cached": self.num_cached_tokens,
            "n_kept": self.num_kept_tokens,
            "n_items": self.num_items,
            "queue_ms": round(self.queue_s * 1e3, 3),
            "tok_ms": round(self.tokenize_s * 1e3, 3),
            "device_ms": round(self.device_s * 1e3, 3),
            "total_ms": round(self.total_s * 1e3, 3),
            "reason": self.reason,
        }


def header(scope: Scope, name: bytes) -> str | None:
    """First value of a header, or None."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def _request_id(sent: str | None) -> str:
    """The caller's id, cleaned and cut, or a fresh one."""
    return _UNSAFE_ID.sub("", sent or "")[:_MAX_ID_CHARS] or uuid.uuid4().hex


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
