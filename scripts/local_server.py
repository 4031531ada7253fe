"""A `jprefill serve` child process that never outlives the script that started it."""

import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn, Self

import httpx

ROOT = Path(__file__).resolve().parent.parent
MODEL = "checkpoints/smollm2-135m-instruct"
START_TIMEOUT_S = 300.0  # the first start compiles, on however few cores
STOP_TIMEOUT_S = 40.0  # longer than the server's own drain
_LISTENING = re.compile(r"listening on (http://\S+?),")


class ServerError(Exception):
    """The server did not do what it should; the message ends with its last log lines."""


class LocalServer:
    """Starts on `with`, is ready inside the block, stops by SIGTERM at its end.

    It runs in a session of its own, so that a Ctrl-C in the terminal reaches it only through this class: a
    second signal would make the server leave without answering what it accepted.
    """

    def __init__(self, port: int = 0, *, is_verbose: bool = False):
        self.url = ""
        self._port = port
        self._is_verbose = is_verbose
        self._log: deque[str] = deque(maxlen=30)
        self._is_listening = threading.Event()

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _leave)
        self._start_s = time.monotonic()
        command = [sys.executable, "-m", "jprefill", "serve", MODEL, "--port", str(self._port)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
        )
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        exit_code = self._stop()
        if exit_code != 0 and kind is None:
            raise self.failure(f"the server left with exit code {exit_code}")

    def wait(self) -> int:
        """Waits until the server leaves by itself; its exit code."""
        return self._process.wait()

    def failure(self, what: str) -> ServerError:
        """An error that carries the server's last log lines, unless they stand on the terminal already."""
        if self._is_verbose:
            return ServerError(what)
        log = "".join(f"  {line}\n" for line in self._log)
        return ServerError(f"{what}. Its last log lines:\n{log.rstrip()}")

    def _wait_until_ready(self) -> None:
        while time.monotonic() < self._start_s + START_TIMEOUT_S:
            if self._process.poll() is not None:
                self._reader.join(timeout=1.0)
                raise self.failure(f"the server left with exit code {self._process.returncode} while starting")
            if self._is_listening.is_set() and self._is_ready():
                return
            time.sleep(0.05)
        raise self.failure(f"the server was not ready after {START_TIMEOUT_S:.0f} s")

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", trust_env=False, timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False

    def _read_log(self) -> None:
        for line in self._process.stderr or ():
            self._log.append(line.rstrip("\n"))
            if self._is_verbose:
                sys.stderr.write(line)
            if (found := _LISTENING.search(line)) and not self._is_listening.is_set():
                self.url = found.group(1)
                self._is_listening.set()

    def _stop(self) -> int:
        self._process.terminate()
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        except BaseException:  # a second Ctrl-C, or it hangs
            self._process.kill()
            self._process.wait()
            raise
        finally:
            self._reader.join(timeout=1.0)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """A signal becomes an exception, so that `with LocalServer()` stops its child."""
    sys.exit(128 + number)
