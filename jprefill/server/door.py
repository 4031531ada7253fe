"""`Door`: the pure ASGI middleware that every request passes once, in and out."""

import asyncio
import logging
import traceback

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jprefill.errors import EngineError, JPrefillError, QueueFullError, RequestCancelledError
from jprefill.server.auth import OPEN_PATHS, Keys
from jprefill.server.record import RequestRecord
from jprefill.server.replies import error_response
from jprefill.server.state import ServerState

logger = logging.getLogger("jprefill.server")
access_logger = logging.getLogger("jprefill.access")
_QUIET_ROUTES = OPEN_PATHS | {"/metrics"}


class Door:
    """Identity, key, admission, errors, timing headers, metrics and the access line of a request.

    Invariant: every accepted request is counted as answered exactly once, and gets at most one answer:
    none only if its client left.
    """

    def __init__(self, app: ASGIApp, state: ServerState):
        self.app = app
        self.state = state
        self._keys = Keys(state.config.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection event: HTTP passes, the lifespan passes by, websockets are refused."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003, "reason": "no websockets here"})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = RequestRecord.begin(scope)
        reply = _Reply(record, send)
        self.state.num_accepted += 1
        try:
            await self._answer(scope, receive, reply)
        except asyncio.CancelledError:
            record.status, record.reason = record.status or 499, "cancelled"
            raise
        finally:
            self.state.num_answered += 1
            record.route = getattr(scope.get("route"), "path", "other")
            self.state.metrics.observe(record)
            level = logging.DEBUG if record.route in _QUIET_ROUTES else logging.INFO
            access_logger.log(level, "request", extra={"fields": record.log_fields()})

    async def _answer(self, scope: Scope, receive: Receive, reply: "_Reply") -> None:
        """Runs the app; whatever it raises becomes the one error envelope."""
        try:
            self._admit(scope)
            await self.app(scope, receive, reply.send)
        except RequestCancelledError as error:
            reply.record.status, reply.record.reason = error.status, error.code
        except JPrefillError as error:
            await self._refuse(error, scope, receive, reply)
        except Exception as error:  # the edge: a bug in one request must not reach another
            _log_bug(error, reply.record)
            message = f"internal error, request id {reply.record.request_id}"
            await self._refuse(EngineError(message), scope, receive, reply)

    def _admit(self, scope: Scope) -> None:
        self._keys.check(scope)
        if self.state.num_open > self.state.limits.max_open_requests and scope["path"] not in _QUIET_ROUTES:
            raise QueueFullError("too many requests are open", retry_after_s=1.0)

    async def _refuse(self, error: JPrefillError, scope: Scope, receive: Receive, reply: "_Reply") -> None:
        reply.record.reason = error.code
        if reply.is_started:
            raise error  # half an answer is out: the connection is cut, a second answer never sent
        response: Response = error_response(error, self.state.limits.retry_after_s)
        await response(scope, receive, reply.send)


class _Reply:
    """Passes the answer on, with the record's headers added."""

    def __init__(self, record: RequestRecord, send: Send):
        self.record = record
        self.is_started = False
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.is_started = True
            self.record.status = message["status"]
            message["headers"] = [*message.get("headers", []), *self.record.headers()]
        await self._send(message)


def _log_bug(error: Exception, record: RequestRecord) -> None:
    """Type and place only: an exception's text may quote the prompt. The text appears at level debug."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    place = " <- ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(frames))
    fields = {"request_id": record.request_id, "reason": f"{type(error).__name__} at {place}"}
    logger.error("internal error", extra={"fields": fields})
    logger.debug("internal error", exc_info=error)
