"""`create_app`: the FastAPI application around one scorer."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jprefill.config import ServerConfig
from jprefill.errors import JPrefillError
from jprefill.scorer import Scorer
from jprefill.server import routes_decisions, routes_health, routes_models, routes_score, routes_tokenize
from jprefill.server.door import Door
from jprefill.server.limits import Limits
from jprefill.server.openapi import document_bodies
from jprefill.server.replies import http_error_response
from jprefill.server.state import ServerState
from jprefill.server.traffic import log_traffic

logger = logging.getLogger("jprefill.server")
_ROUTES = (routes_decisions, routes_score, routes_models, routes_tokenize, routes_health)


def create_app(load: Callable[[], Scorer], config: ServerConfig, limits: Limits | None = None) -> FastAPI:
    """Builds the app. Its lifespan starts `load` in a thread, so probes are answered while it loads.

    Args:
      load: makes the scorer; may take minutes. Its errors end up in `ServerState.load_error`.
      limits: fixed bounds of the door; None takes the usual ones.

    Returns:
      An app whose `app.state.server` is its `ServerState`.
    """
    limits = limits or Limits()
    state = ServerState(config, limits)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        threading.Thread(target=_load, args=(load, state), name="jprefill-load", daemon=True).start()
        traffic = asyncio.create_task(log_traffic(state.engine_stats, limits.log_interval_s))
        yield
        traffic.cancel()
        with suppress(asyncio.CancelledError):
            await traffic
        state.close(timeout_s=0.0)

    # Redirects between /x and /x/ would be built from the Host header, which clients forge.
    app = FastAPI(title="jprefill", lifespan=lifespan, redirect_slashes=False)
    app.state.server = state
    for module in _ROUTES:
        app.include_router(module.router)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Door, state=state)
    document_bodies(app)
    return app


def _load(load: Callable[[], Scorer], state: ServerState) -> None:
    """Runs in its own thread; whatever happens, the state says so."""
    try:
        state.loaded(load())
    except JPrefillError as error:
        state.load_failed(error.message)
    except Exception as error:  # the edge of the thread: nobody else would see it
        logger.debug("loading failed", exc_info=error)
        state.load_failed(f"{type(error).__name__}: {error}")


async def _http_error(_: Request, error: Exception) -> Response:
    """404 and 405 of the router, in our envelope."""
    assert isinstance(error, HTTPException)
    return http_error_response(error.status_code, dict(error.headers or {}))
