"""Answers in bytes: JSON by msgspec, and the one error envelope of every route."""

import math
from typing import Any

import msgspec
from starlette.responses import Response

from jprefill.errors import JPrefillError, NotReadyError, QueueFullError

_encoder = msgspec.json.Encoder()
# Names and values that clients send may be echoed in messages; they must not make them huge.
_MAX_MESSAGE_CHARS = 500
_MAX_PARAM_CHARS = 120
_HTTP_ERRORS = {
    404: ("not_found", "no such route: see /docs for the routes of this server"),
    405: ("method_not_allowed", "this route does not take this method: see the Allow header"),
}


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer; `content` is anything that msgspec encodes."""
    return Response(_encoder.encode(content), status, headers, media_type="application/json")


def error_body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    """The OpenAI envelope: all four keys, always."""
    param = param and param[:_MAX_PARAM_CHARS]
    return {"error": {"message": message[:_MAX_MESSAGE_CHARS], "type": kind, "param": param, "code": code}}


def error_response(error: JPrefillError, retry_after_s: float) -> Response:
    """The answer to a typed error; 429 and 503 say when to come back.

    Args:
      error: its message is safe to send by contract.
      retry_after_s: for a 503; a `QueueFullError` brings its own.
    """
    headers = {}
    if isinstance(error, QueueFullError):
        headers = _retry_headers(error.retry_after_s)
    elif isinstance(error, NotReadyError):
        headers = _retry_headers(retry_after_s)
    elif error.status == 401:
        headers = {"www-authenticate": "Bearer"}
    return json_response(error_body(error.message, error.type, error.param, error.code), error.status, headers)


def http_error_response(status: int, headers: dict[str, str] | None) -> Response:
    """The answer where the router found no route or no method."""
    code, message = _HTTP_ERRORS.get(status, (None, "the request cannot be served"))
    return json_response(error_body(message, "invalid_request_error", None, code), status, headers)


def _retry_headers(retry_after_s: float) -> dict[str, str]:
    """`Retry-After` takes whole seconds; the OpenAI client prefers the finer `retry-after-ms`."""
    return {
        "retry-after": str(max(1, math.ceil(retry_after_s))),
        "retry-after-ms": str(max(1, math.ceil(retry_after_s * 1e3))),
    }
