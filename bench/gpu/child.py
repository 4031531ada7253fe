"""The parent's half of the pipe: `Child`, a worker process that is started again when it dies or hangs."""

import json
import select
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any


class ChildError(RuntimeError):
    """The worker answered with an error, died, or said nothing in time."""


class Child:
    """A worker process. Used by one thread.

    Invariant: after any `ask`, the next one finds a process that can answer; `generation` counts the processes, so
    that a caller knows when what it had loaded is gone.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]):
        """Starts the process and does not wait for it."""
        self.name = name
        self.generation = 0
        self._command, self._log, self._environment = command, log, environment
        self._start()

    def _start(self) -> None:
        self.generation += 1
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=dict(self._environment)
            )

    def ask(self, call: str, *, timeout_s: float, **args: object) -> Any:
        """Runs one command of the worker.

        Raises:
          ChildError: it failed; the message is one line.
        """
        if self._process.poll() is not None:
            self._restart()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"call": call, "args": args}).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._read(timeout_s)
        except BrokenPipeError:
            raise ChildError(f"{self.name} ended: {self._last_words()}") from None
        if "error" in answer:
            if answer.get("is_dead"):
                self._restart()
            raise ChildError(answer["error"])
        return answer["result"]

    def _read(self, timeout_s: float) -> dict[str, Any]:
        """The next line. The worker writes whole lines and one per question, so nothing hides in a buffer."""
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], max(timeout_s, 0.0))
        if not readable:
            self._restart()
            raise ChildError(f"{self.name} gave no answer in {timeout_s:.0f} s and was started again")
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise ChildError(f"{self.name} ended (exit {code}): {self._last_words()}")
        return json.loads(line)

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "its log is empty"

    def _restart(self) -> None:
        self.close(grace_s=0.0)
        self._start()

    def close(self, grace_s: float = 5.0) -> None:
        """Ends the process: at the end of its input, or killed after `grace_s`."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # it died with a question in the pipe
                    stream.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> "Child":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
