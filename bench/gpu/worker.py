"""The child's half of the pipe: one JSON line out for each JSON line in, until the input ends."""

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TextIO

MAX_ERROR_LENGTH = 600  # a compiler error can hold a whole program


def serve(commands: Mapping[str, Callable[..., object]], is_healthy: Callable[[], bool]) -> int:
    """Answers `{"call": name, "args": {...}}` with `{"result": ...}` or `{"error": text, "is_dead": bool}`.

    After an error `is_healthy` decides whether the device still works: a kernel that read a bad address leaves a
    process in which every later call fails, so such a process ends itself.
    """
    replies = _claim_stdout()
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer: dict[str, Any] = {"result": commands[question["call"]](**question["args"])}
        except Exception as error:  # the loop's edge: whatever it was, the parent gets an answer
            traceback.print_exc()
            answer = {"error": _text(error), "is_dead": not is_healthy()}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()
        if answer.get("is_dead"):
            return 1
    return 0


def _claim_stdout() -> TextIO:
    """Keeps stdout for the protocol: whatever a library prints goes to stderr."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _text(error: Exception) -> str:
    """What happened and where: the innermost line of this repository, since the rest is a library's own."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    where = f" [{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}]" if frames else ""
    return f"{type(error).__name__}: {str(error)[:MAX_ERROR_LENGTH]}{where}"
