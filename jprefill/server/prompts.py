"""Checks that come before tokenising: a text that cannot fit is refused by its length in characters."""

from collections.abc import Sequence

from jprefill.errors import ContextLengthError, InvalidRequestError
from jprefill.server.limits import Limits


def check_fits(num_chars: int, max_model_len: int, limits: Limits, param: str) -> None:
    """Refuses a prompt that is certain to be too long.

    Args:
      num_chars: characters, or token ids where the client sent those.

    Raises:
      ContextLengthError: the message names both numbers.
    """
    max_chars = max_model_len * limits.max_chars_per_token
    if num_chars > max_chars:
        raise ContextLengthError(
            f"{param} makes a prompt of {num_chars} characters, which cannot fit into {max_model_len} tokens "
            f"(the limit is {max_chars} characters)",
            param=param,
        )


def check_all_fit(shared: int, parts: Sequence[int], max_model_len: int, limits: Limits, param: str) -> None:
    """Checks every prompt of a request, and that all together do not tokenise for minutes.

    Args:
      shared: characters that every prompt has in common.
      parts: and what each prompt has of its own.
      param: the field that holds the parts.

    Raises:
      ContextLengthError: one prompt cannot fit.
      InvalidRequestError: all prompts together are too much for one request.
    """
    if len(parts) > limits.max_prompts:
        raise InvalidRequestError(f"{param} has {len(parts)} entries, the limit is {limits.max_prompts}", param=param)
    if parts:
        longest = max(range(len(parts)), key=parts.__getitem__)
        check_fits(shared + parts[longest], max_model_len, limits, f"{param}[{longest}]")
    total = shared * len(parts) + sum(parts)
    if total > limits.max_prompt_chars:
        raise InvalidRequestError(
            f"{param} makes {len(parts)} prompts of {total} characters together, the limit for one request "
            f"is {limits.max_prompt_chars}: send fewer {param}",
            param=param,
        )
