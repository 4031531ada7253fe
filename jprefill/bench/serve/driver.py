"""Open-loop load: every request is sent at its own time, whatever became of those before it.

    intended time    |    |  |      |          from the workload, never moved by an answer
    sent             |    |  . |    |          `lag_s`: the client was busy for a moment
    latency             <---------->           from the intended time to the end of the answer

A client that waits for answers sends less while the server is slow, and so leaves out the requests that would have
waited longest. Measuring from the intended time leaves out nothing ("coordinated omission", Gil Tene).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

OK, TIMEOUT = "200", "timeout"


class Answer(NamedTuple):
    """What a server said.

    Attributes:
      status: HTTP status, or what went wrong in a word or two; `OK` only for an answer that can be used.
      num_prompt_tokens: as the server counts them; None if it does not tell.
      num_cached_tokens: likewise, those of them that it did not compute.
    """

    status: str
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None


Send = Callable[[bytes], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request.

    Attributes:
      intended_s: when it was to be sent, since the start of the run.
      lag_s: how much later it was sent.
      latency_s: from the intended time to the end of the answer, or of the attempt.
    """

    intended_s: float
    lag_s: float
    latency_s: float
    answer: Answer

    @property
    def is_ok(self) -> bool:
        """Whether there is an answer that can be used."""
        return self.answer.status == OK


async def drive(send: Send, bodies: Sequence[bytes], times_s: Sequence[float], timeout_s: float) -> list[Outcome]:
    """Sends each body at its time and waits for all answers.

    Args:
      send: must turn its own errors into an `Answer`.
      times_s: since now, ascending.
      timeout_s: from the intended time; a request without an answer by then is given up.

    Returns:
      In the order of `bodies`.
    """
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for body, at_s in zip(bodies, times_s, strict=True):
            await asyncio.sleep(max(0.0, started_s + at_s - loop.time()))
            tasks.append(group.create_task(_one(send, body, at_s, started_s, timeout_s)))
    return [task.result() for task in tasks]


async def _one(send: Send, body: bytes, at_s: float, started_s: float, timeout_s: float) -> Outcome:
    loop = asyncio.get_running_loop()
    intended_s = started_s + at_s
    lag_s = max(0.0, loop.time() - intended_s)
    try:
        async with asyncio.timeout_at(intended_s + timeout_s):
            answer = await send(body)
    except TimeoutError:
        answer = Answer(TIMEOUT)
    return Outcome(at_s, lag_s, loop.time() - intended_s, answer)
