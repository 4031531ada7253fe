"""`Peer`: another implementation as a child process, asked one prompt at a time over JSON lines."""

import json
import select
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jprefill
from jprefill.errors import ConfigError, EngineError

DEFAULT_PYTHON = Path(".venv-peer/bin/python")
_SCRIPT = "scripts/reference/peer_hf.py"
_START_TIMEOUT_S = 300.0
_ANSWER_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """Seconds of the forward pass alone, and the natural logarithms of the labels' probabilities."""

    seconds: float
    label_logprobs: tuple[float, ...]


def hf_command(python: Path, model: Path, dtype: str, num_threads: int) -> list[str]:
    """Command line of the Hugging Face peer.

    Raises:
      ConfigError: its interpreter, its script or its model is not there.
    """
    script = Path(jprefill.__file__).parents[1] / _SCRIPT
    if not script.is_file():
        raise ConfigError(f"--peer hf: {_SCRIPT} is not here; it comes with the source tree, not with the package")
    if not python.exists():
        raise ConfigError(f"--peer-python {python}: no such file; scripts/peer_env makes {DEFAULT_PYTHON}")
    if not model.exists():
        raise ConfigError(f"--peer-model {model}: no such file or directory")
    return [str(python), str(script), str(model), "--dtype", dtype, "--threads", str(num_threads)]


class Peer:
    """A running child process. Invariant: it computes only between a question and its answer.

    Used by one thread.
    """

    def __init__(self, command: Sequence[str]):
        """Starts it and waits until its model is loaded; `description` is what it says about itself.

        Raises:
          EngineError: it ended or fell silent; the message holds the end of its stderr.
        """
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr)
        try:
            self.description = self._read(_START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def ask(self, token_ids: Sequence[int], label_ids: Sequence[int]) -> PeerAnswer:
        """Runs one prompt.

        Raises:
          EngineError: it ended, fell silent, or answered nonsense.
        """
        assert self._process.stdin is not None
        question = json.dumps({"token_ids": list(token_ids), "label_ids": list(label_ids)})
        try:
            self._process.stdin.write(question.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineError(f"the peer ended: {self._last_words()}") from None
        answer = self._read(_ANSWER_TIMEOUT_S)
        try:
            return PeerAnswer(float(answer["seconds"]), tuple(map(float, answer["label_logprobs"])))
        except (KeyError, TypeError, ValueError):
            raise EngineError(f"the peer answered {str(answer)[:200]}") from None

    def _read(self, timeout_s: float) -> dict[str, Any]:
        """The next line. The child writes whole lines and one per question, so nothing hides in a buffer."""
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        if not readable:
            raise EngineError(f"the peer said nothing for {timeout_s:.0f} s: {self._last_words()}")
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise EngineError(f"the peer ended (exit {self._process.returncode}): {self._last_words()}")
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise EngineError(f"the peer said {line[:200]!r}, which is no JSON object")
        return message

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:]) or "its stderr is empty"

    def close(self) -> None:
        """Ends the child: it stops at the end of its input, or is killed after ten seconds."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.close()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
