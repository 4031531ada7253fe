"""Real English for benchmarks, without a download: the reference manual that every CPython carries."""

import re

from jprefill.errors import ConfigError
from jprefill.tokenization.api import Tokenizer


def prose() -> str:
    """About 450,000 characters of English, the same for one Python version."""
    from pydoc_data.topics import topics

    return "\n\n".join(re.sub(r"\n{3,}", "\n\n", text).strip() for _, text in sorted(topics.items()))


def prose_windows(tokenizer: Tokenizer, lengths: tuple[int, ...], num_windows: int) -> dict[int, list[list[int]]]:
    """For each length, `num_windows` runs of token ids from different places, so that no two share a prefix.

    Raises:
      ConfigError: a length is more than the prose holds.
    """
    token_ids = tokenizer.encode(prose(), add_bos=False)
    longest = len(token_ids) - num_windows
    if max(lengths) > longest:
        raise ConfigError(f"--lengths {max(lengths)}: the prose at hand has {longest} tokens")
    windows = {}
    for length in lengths:
        stride = (len(token_ids) - length) // num_windows
        windows[length] = [token_ids[i * stride : i * stride + length] for i in range(num_windows)]
    return windows
