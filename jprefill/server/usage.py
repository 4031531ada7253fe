"""Token counts as the replies give them, for callers who may know what was stored and for those who may not."""

from typing import Any

from jprefill.types import Usage


def decisions_usage(usage: Usage, num_answers: int, *, tells_cached: bool) -> dict[str, Any]:
    """OpenAI's `usage` of decisions. Its client requires every key, so what is not told is 0.

    Args:
      tells_cached: `ServerConfig.report_cached_tokens`.
    """
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.num_cached_tokens if tells_cached else 0,
            "cache_write_tokens": usage.num_kept_tokens if tells_cached else 0,
        },
        "output_tokens": num_answers,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.num_prompt_tokens + num_answers,
    }


def score_usage(usage: Usage, *, tells_cached: bool) -> dict[str, Any]:
    """`usage` of scores, in the shape of completions; the details are optional and left out if not told."""
    counts: dict[str, Any] = {"prompt_tokens": usage.num_prompt_tokens, "total_tokens": usage.num_prompt_tokens}
    if tells_cached:
        counts["prompt_tokens_details"] = {"cached_tokens": usage.num_cached_tokens}
    return counts
