"""Finds what the prompts of one request share, so that it is computed once."""

from collections.abc import Sequence

from jprefill.tasks.inputs import Ids


def common_prefix_length(prompts: Sequence[Ids]) -> int:
    """Tokens with which all prompts start, at most one less than the shortest prompt has."""
    first = prompts[0]
    length = min(len(prompt) for prompt in prompts) - 1
    for prompt in prompts[1:]:
        is_different = first[:length] != prompt[:length]
        if is_different.any():
            length = int(is_different.argmax())
    return max(length, 0)


def split_prefix(prompts: Sequence[Ids], num_reusable: int = 0) -> tuple[Ids, tuple[Ids, ...]]:
    """Splits prompts into the longest common prefix and what each has after it.

        prompts   a b c d     ->  prefix  a b     suffixes  c d
                  a b x                                     x

    Args:
      prompts: at least one, each with at least one token.
      num_reusable: leading tokens of a single prompt that other requests are likely to have too.

    Returns:
      The prefix and one suffix per prompt, never empty. A single prompt shares nothing with others of its request:
      its prefix is what is reusable.
    """
    length = min(num_reusable, len(prompts[0]) - 1) if len(prompts) == 1 else common_prefix_length(prompts)
    return prompts[0][:length], tuple(prompt[length:] for prompt in prompts)
