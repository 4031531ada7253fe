"""One line every few seconds about what the engine does, while it does something."""

import logging
from asyncio import sleep
from collections.abc import Callable
from time import monotonic

from jprefill.types import EngineStats

logger = logging.getLogger("jprefill.server")


async def log_traffic(stats: Callable[[], EngineStats | None], interval_s: float) -> None:
    """Logs `traffic_line` again and again, until it is cancelled."""
    before, before_s = stats() or EngineStats(), monotonic()
    while True:
        await sleep(interval_s)
        after, after_s = stats() or EngineStats(), monotonic()
        line = traffic_line(before, after, after_s - before_s)
        if line is not None:
            logger.info(line)
        before, before_s = after, after_s


def traffic_line(before: EngineStats, after: EngineStats, elapsed_s: float) -> str | None:
    """What happened between two looks at an engine, in vLLM's words; None if nothing did.

    Throughput and hit rate count the prompt tokens of requests that were answered in between.
    """
    num_answered = after.num_finished + after.num_failed - before.num_finished - before.num_failed
    if not (num_answered or after.num_running or after.num_waiting):
        return None
    num_prompt_tokens = after.num_prompt_tokens - before.num_prompt_tokens
    num_cached_tokens = after.num_cached_tokens - before.num_cached_tokens
    pool = after.tiers.get("device")
    return (
        f"Avg prompt throughput: {_ratio(num_prompt_tokens, elapsed_s):.1f} tokens/s, "
        f"Running: {after.num_running} reqs, Waiting: {after.num_waiting} reqs, "
        f"KV cache usage: {_ratio(pool.num_bytes, pool.max_bytes) if pool else 0.0:.1%}, "
        f"Prefix cache hit rate: {_ratio(num_cached_tokens, num_prompt_tokens):.1%}"
    )


def _ratio(part: float | int, whole: float | int) -> float:
    return part / whole if whole else 0.0
