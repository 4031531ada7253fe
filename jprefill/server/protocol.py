"""`GuardedProtocol`: uvicorn's HTTP protocol with bounds on headers and on silence.

uvicorn bounds neither the size nor the time of a header, nor a client that never reads its reply; the app
sees a request only when its headers are complete, so these bounds live here. The body's are in `body.py`.
"""

import asyncio
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jprefill.server.limits import Limits


class GuardedProtocol(HttpToolsProtocol):
    """One connection. Invariant: while a header is awaited or a full buffer is not read, one timer runs."""

    def __init__(self, *args: Any, limits: Limits, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._num_headers = 0
        self._num_header_bytes = 0
        self._num_unparsed_bytes = 0
        self._is_reading_header = True
        self._is_message_complete = True
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Starts the header clock: a connection that says nothing is closed too."""
        super().connection_made(transport)
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the clocks."""
        self._stop_header_timer()
        self._stop_linger_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses; bytes that have not completed a header by then count as header bytes."""
        if self._is_reading_header and self._header_timer is None:
            self._start_header_timer()  # the next request of a kept connection
        self._num_unparsed_bytes += len(data)
        super().data_received(data)
        is_too_long = self._is_reading_header and self._num_unparsed_bytes > self._limits.max_header_bytes
        if is_too_long and not self.transport.is_closing():
            self.send_400_response("The request header is too large.")

    def on_message_begin(self) -> None:
        """A new request starts."""
        self._num_headers = self._num_header_bytes = 0
        self._is_reading_header, self._is_message_complete = True, False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts one header; an error here makes the parser refuse the request."""
        self._num_headers += 1
        self._num_header_bytes += len(name) + len(value)
        if self._num_headers > self._limits.max_headers or self._num_header_bytes > self._limits.max_header_bytes:
            raise ValueError("too many or too large headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stops the header clock; from here the app's own clock for the body runs."""
        self._is_reading_header = False
        self._num_unparsed_bytes = 0
        self._stop_header_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The next byte, if any, starts another header."""
        super().on_message_complete()
        self._is_reading_header = self._is_message_complete = True
        self._num_unparsed_bytes = 0
        self._stop_linger_timer()

    def on_response_complete(self) -> None:
        """An early answer (401, 413) leaves the client a moment to read it, then the rest of its body is cut.

        Closing at once would reset the connection, and the client would lose the answer.
        """
        super().on_response_complete()
        if not self._is_message_complete and not self.transport.is_closing():
            self._linger_timer = self.loop.call_later(self._limits.linger_s, self.transport.abort)

    def pause_writing(self) -> None:
        """The reply does not fit into the buffers: the client has to read now."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(self._limits.header_timeout_s, self.transport.abort)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_linger_timer(self) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None


def guarded(limits: Limits) -> Any:
    """What uvicorn's `http` setting takes: a maker of protocols with these limits."""
    return partial(GuardedProtocol, limits=limits)
