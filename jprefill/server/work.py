"""Runs one scoring request from body to bytes, while watching whether its client is still there."""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from jprefill.errors import EngineError, InvalidRequestError, NotReadyError, RequestCancelledError
from jprefill.scorer import Scorer
from jprefill.server.auth import sent_key
from jprefill.server.body import decode_body, read_body
from jprefill.server.record import SCOPE_KEY, RequestRecord, header
from jprefill.server.replies import json_response
from jprefill.server.salts import join_salts
from jprefill.server.state import ServerState, state_of
from jprefill.tasks.job import Job
from jprefill.types import ScoreRequest, ScoreResult

# Above this many log-probabilities, building the answer would hold up the event loop for milliseconds.
_MANY_LOGPROBS = 10_000
_MAX_TIMEOUT_MS = 7 * 24 * 3600 * 1000


@dataclass(frozen=True, eq=False)
class Plan:
    """What a route makes of a body.

    Attributes:
      job: its token requests.
      reply: turns the job's answer into the reply's content; `Job.finish` has run by then.
      model: the name that is echoed.
      salts: parts of the salt that is put on every request of the job, as the caller named them.
    """

    job: Job[Any]
    reply: Callable[[Any], Any]
    model: str
    salts: tuple[str | None, ...]
    priority: int = 0


async def run_in_pool[T](state: ServerState, function: Callable[..., T], *args: Any) -> T:
    """Calls `function` in the tokenizer pool. A panic inside a native tokenizer becomes an `EngineError`."""

    def call() -> T:
        try:
            return function(*args)
        except Exception:
            raise
        except BaseException as error:  # Rust panics are no Exception; here they would end the loop
            raise EngineError("the tokenizer failed on this request") from error

    return await asyncio.get_running_loop().run_in_executor(state.pool, call)


async def read_request_body(request: Request) -> bytes:
    """The decoded body of `request`, within the limits of its server."""
    state = state_of(request)
    max_bytes = state.config.max_body_bytes
    body = await read_body(request.scope, request.receive, max_bytes, state.limits)
    encoding = header(request.scope, b"content-encoding")
    return await run_in_pool(state, decode_body, body, encoding, max_bytes) if encoding else body


async def answer(request: Request, build: Callable[[ServerState, Scorer, bytes], Plan]) -> Response:
    """Answers a scoring request: read, `build` in the pool, submit, await, encode.

    Raises:
      RequestCancelledError: the client left first; its queued requests were dropped.
      JPrefillError: whatever `build` or the engine says.
    """
    state = state_of(request)
    record: RequestRecord = request.scope[SCOPE_KEY]
    deadline_s = _deadline_s(header(request.scope, b"x-request-timeout-ms"), record, state)
    key = sent_key(request.scope) if state.config.default_salt_per_api_key else None
    state.scorer()  # not ready: say so before the body is read
    body = await read_request_body(request)
    with state.holding(len(body)):
        return await until_gone(request.receive, _work(state, record, body, build, key, deadline_s))


async def until_gone[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, or cancels it when the client disconnects.

    Raises:
      RequestCancelledError: the client left.
      NotReadyError: the work was cancelled from inside, as an engine does that is shut down.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RequestCancelledError("the client left")
        if task.cancelled():
            raise NotReadyError("the request was dropped while the server stopped")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _work(
    state: ServerState,
    record: RequestRecord,
    body: bytes,
    build: Callable[[ServerState, Scorer, bytes], Plan],
    key: str | None,
    deadline_s: float | None,
) -> Response:
    scorer = state.loaded_scorer()  # a drain that began while the body came in does not turn this request away
    started_s = time.monotonic()
    plan = await run_in_pool(state, build, state, scorer, body)
    record.tokenize_s = time.monotonic() - started_s
    record.model = plan.model
    salt = join_salts(key, *plan.salts)
    requests = [replace(r, deadline_s=deadline_s, salt=salt, priority=plan.priority) for r in plan.job.requests]
    results = await _submit_all(scorer, requests)
    _note(record, requests, results)
    record.tells_cached = state.config.report_cached_tokens

    def finish() -> Response:
        return json_response(plan.reply(plan.job.finish(results)))

    num_logprobs = sum(item.targets.size for request in requests for item in request.items)
    return finish() if num_logprobs < _MANY_LOGPROBS else await run_in_pool(state, finish)


async def _submit_all(scorer: Scorer, requests: Sequence[ScoreRequest]) -> list[ScoreResult]:
    """All results in order, or the first error; then the other requests are dropped from the queue."""
    futures: list[Future[ScoreResult]] = []
    try:
        for request in requests:
            futures.append(scorer.engine.submit(request))
        return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))
    finally:
        for future in futures:
            future.cancel()  # no effect on those that are done


def _note(record: RequestRecord, requests: Sequence[ScoreRequest], results: Sequence[ScoreResult]) -> None:
    """The longest wait and the longest pass stand for a job whose requests ran together."""
    record.num_items = sum(len(request.items) for request in requests)
    record.num_prompt_tokens = sum(result.usage.num_prompt_tokens for result in results)
    record.num_cached_tokens = sum(result.usage.num_cached_tokens for result in results)
    record.num_kept_tokens = sum(result.usage.num_kept_tokens for result in results)
    record.queue_s = max(result.timings.queue_s for result in results)
    record.device_s = max(result.timings.device_s for result in results)


def _deadline_s(sent: str | None, record: RequestRecord, state: ServerState) -> float | None:
    """When the request expires on the monotonic clock: by its own header, else by the server's setting."""
    timeout_s = state.config.request_timeout_s
    if sent is not None:
        try:
            timeout_ms = float(sent)
        except ValueError:
            timeout_ms = math.nan
        if not 0 < timeout_ms <= _MAX_TIMEOUT_MS:
            raise InvalidRequestError(
                f"X-Request-Timeout-Ms must be a number above 0 and at most {_MAX_TIMEOUT_MS}",
                param="X-Request-Timeout-Ms",
            )
        timeout_s = timeout_ms / 1e3
    return None if timeout_s is None else record.started_s + timeout_s
