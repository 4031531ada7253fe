"""Timing of asynchronous device work, the same for both sides."""

import statistics
import time
from collections.abc import Callable
from typing import Any

MAX_CALLS = 20


def measure(call: Callable[[], Any], wait: Callable[[Any], object], repeats: int, target_s: float) -> dict[str, Any]:
    """Times `call` after a warm-up.

    Several calls are queued before the device is awaited, so that the host's share hides behind the device's as it
    does in a real pass: as many as fill `target_s`, at most `MAX_CALLS`.

    Args:
      call: starts the work and returns what `wait` can wait for.
      wait: blocks until the device has finished.

    Returns:
      `median_s` and `best_s` of one call, `spread` = (slowest - best) / median, and `num_calls` of each repeat.
    """
    wait(call())
    started = time.perf_counter()
    wait(call())
    once = time.perf_counter() - started
    num_calls = max(1, min(MAX_CALLS, int(target_s / max(once, 1e-6))))
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(num_calls - 1):
            call()
        wait(call())  # a device runs in order: the last one done, all are
        seconds.append((time.perf_counter() - started) / num_calls)
    median, best = statistics.median(seconds), min(seconds)
    return {"median_s": median, "best_s": best, "spread": (max(seconds) - best) / median, "num_calls": num_calls}
