"""`serve`: one process that listens, loads, answers, drains and leaves."""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields

import uvicorn

import jprefill
from jprefill.config import EngineConfig, ServerConfig
from jprefill.scorer import Scorer
from jprefill.server.app import create_app
from jprefill.server.limits import Limits
from jprefill.server.logs import set_up_logs
from jprefill.server.protocol import guarded
from jprefill.server.state import ServerState

logger = logging.getLogger("jprefill.server")
EXIT_OK, EXIT_LOAD_FAILED, EXIT_PORT_BUSY = 0, 1, 2
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_CLOSE_TIMEOUT_S = 5  # for clients to read their last answers


def serve(model: str, engine: EngineConfig, server: ServerConfig) -> int:
    """Serves a checkpoint until SIGTERM or SIGINT.

    Args:
      model: path or name, as `Scorer.load` takes it.

    Returns:
      The exit code: 0 after a clean stop, 1 if loading failed, 2 if the port is not to be had.
    """
    set_up_logs(server.log_format, server.log_level)
    logger.info("jprefill %s, model %s", jprefill.__version__, model)
    logger.info("settings other than the defaults: %s", {**_changed(engine), **_changed(server)})
    return serve_scorer(lambda: Scorer.from_config(model, engine), server)


def serve_scorer(load: Callable[[], Scorer], config: ServerConfig, limits: Limits | None = None) -> int:
    """Serves whatever scorer `load` makes; the port is taken before loading starts, so a clash shows at once.

    Returns:
      As `serve`.
    """
    limits = limits or Limits()
    try:
        listener = listen(config.host, config.port)
    except OSError as error:
        reason = error.strerror or str(error)
        logger.error("cannot listen on %s port %d: %s", config.host, config.port, reason)
        return EXIT_PORT_BUSY
    url = _url(config.host, listener.getsockname()[1])
    logger.info("listening on %s, loading the model", url)
    app = create_app(load, config, limits)
    state: ServerState = app.state.server
    uvicorn_config = uvicorn.Config(
        app,
        http=guarded(limits),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=limits.keep_alive_s,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
    )
    DrainingServer(uvicorn_config, state, url).run(sockets=[listener])
    if not state.is_loader_done:
        # A thread inside the compiler cannot be stopped; a normal exit would pull memory from under it.
        logging.shutdown()
        os._exit(EXIT_OK)
    return EXIT_LOAD_FAILED if state.load_error is not None else EXIT_OK


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Binding alone would not keep a second server off the port.

    Raises:
      OSError: the port is busy or the host unknown.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


class DrainingServer(uvicorn.Server):
    """uvicorn, with our own way to stop.

    First SIGTERM or SIGINT: readiness falls and new work gets 503 at once, what is inside goes on for up to
    `shutdown_timeout_s`, the rest is answered with 503, then the listener closes. Second signal: exit now.
    """

    def __init__(self, config: uvicorn.Config, state: ServerState, url: str):
        super().__init__(config)
        self._state = state
        self._url = url
        self._is_announced = False
        self._drain: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs our handlers on the loop; uvicorn's would stop at once."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: says when the server is ready, and leaves if loading failed."""
        if self._state.phase == "failed":
            logger.error("cannot load the model: %s", self._state.load_error)
            return True
        if self._state.phase == "ready" and not self._is_announced:
            self._is_announced = True
            logger.info("Jprefill is ready: %s", self._url)
            logger.info("The server is fired up and ready to roll!")  # the words that scripts for SGLang wait for
        return await super().on_tick(counter)

    def _on_signal(self, number: int) -> None:
        if self._drain is not None:
            logger.warning("second signal: leaving now")
            logging.shutdown()
            os._exit(128 + number)
        logger.info("signal %s: draining %d requests", signal.Signals(number).name, self._state.num_open)
        self._state.start_draining()
        self._drain = asyncio.get_running_loop().create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        deadline_s = time.monotonic() + self._state.config.shutdown_timeout_s
        while self._state.num_open and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        if self._state.num_open:
            logger.warning("%d requests did not finish in time", self._state.num_open)
        await asyncio.to_thread(self._state.close, 0.0)
        self.should_exit = True


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _changed(config: EngineConfig | ServerConfig) -> dict[str, object]:
    """Settings that differ from their defaults; fields that are kept out of `repr` (keys) show as ***."""
    default = type(config)()
    changed = [f for f in fields(config) if getattr(config, f.name) != getattr(default, f.name)]
    return {f.name: getattr(config, f.name) if f.repr else "***" for f in changed}
