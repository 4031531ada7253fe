"""Workloads: who asks what and when, without the text. Servers and simulators are driven by the same ones.

    prompt of a request     | instruction or profile (source 7) | post (source 123) |
    prompt of another       | instruction or profile (source 7) | another (source 124) |       shares source 7

Everything follows from the arguments and a seed. The generators let all requests arrive at once; `Workload.at_rate`
gives them arrival times. `token_ids` turns a prompt into real English.
"""

import json
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jprefill.errors import ConfigError
from jprefill.types import TokenIds

NOBODY = -1
TRACE_BLOCK_TOKENS = 512
_MAX_SOURCES = 2**32
_ALPHABET_TOKENS = 4_096  # of the prose, in which numbers are spelled


class Part(NamedTuple):
    """The first `num_tokens` tokens of an endless stream. Equal sources are equal streams."""

    source: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    Attributes:
      at_s: since the start of the workload.
      user: whose request it is, to route by; `NOBODY`: route as you like.
      prompt: its parts follow each other.
      priority: lower is more urgent.
    """

    at_s: float
    user: int
    prompt: tuple[Part, ...]
    priority: int = 0

    @property
    def num_tokens(self) -> int:
        """Of the prompt."""
        return sum(part.num_tokens for part in self.prompt)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their arrival.

    Attributes:
      seed: of what was drawn last: the requests, or their arrival times.
    """

    name: str
    seed: int
    arrivals: tuple[Arrival, ...]

    @property
    def num_tokens(self) -> int:
        """Of all prompts."""
        return sum(arrival.num_tokens for arrival in self.arrivals)

    def first(self, num_requests: int) -> "Workload":
        """The first requests only."""
        return replace(self, arrivals=self.arrivals[:num_requests])

    def at_rate(self, qps: float, seed: int) -> "Workload":
        """The same requests in the same order, as a Poisson process.

        Args:
          qps: requests per second on average; infinite: all at once. With one seed, twice the rate is the same
            pattern in half the time.

        Raises:
          ValueError: the rate is not above 0.
        """
        if not qps > 0:
            raise ValueError(f"qps={qps}: must be above 0")
        times_s = np.cumsum(_rng(seed, "arrival times").standard_exponential(len(self.arrivals))) / qps
        arrivals = [replace(one, at_s=at_s) for one, at_s in zip(self.arrivals, times_s.tolist(), strict=True)]
        return replace(self, seed=seed, arrivals=tuple(arrivals))


# ---- generators --------------------------------------------------------------------------------------------


def post_recommendation(
    seed: int = 0,
    *,
    scale: float = 1.0,
    num_users: int = 20,
    num_posts: int = 50,
    profile_mean_tokens: int = 14_000,
    profile_std_tokens: int = 3_000,
    min_profile_tokens: int = 11_000,
    max_profile_tokens: int = 17_000,
    post_tokens: int = 150,
) -> Workload:
    """Which post for which user? Every user's long profile comes with each of that user's posts, in random order.

    Args:
      scale: divides all token counts, for small machines.
      num_posts: of each user.
      profile_mean_tokens: lengths are normal, then clipped.

    Source: PrefillOnly, arXiv 2505.07203, workload 1.
    """
    rng = _rng(seed, "post_recommendation")
    lengths = rng.normal(profile_mean_tokens, profile_std_tokens, num_users)
    profiles = np.clip(lengths, min_profile_tokens, max_profile_tokens).tolist()
    post_tokens = _scaled(post_tokens, scale)
    arrivals = []
    for number in rng.permutation(num_users * num_posts).tolist():
        user = number % num_users
        arrivals.append(
            _arrival(user, Part(user, _scaled(profiles[user], scale)), Part(num_users + number, post_tokens))
        )
    return Workload("post_recommendation", seed, tuple(arrivals))


def credit_verification(
    seed: int = 0,
    *,
    scale: float = 1.0,
    num_users: int = 60,
    min_tokens: int = 40_000,
    max_tokens: int = 60_000,
) -> Workload:
    """May this person have the credit? One long history per user, asked about once; nothing is shared.

    Args:
      scale: divides all token counts.
      min_tokens: with `max_tokens` the range of the lengths, which are uniform.

    Source: PrefillOnly, arXiv 2505.07203, workload 2.
    """
    lengths = _rng(seed, "credit_verification").uniform(min_tokens, max_tokens, num_users)
    arrivals = [_arrival(user, Part(user, _scaled(length, scale))) for user, length in enumerate(lengths)]
    return Workload("credit_verification", seed, tuple(arrivals))


def short_labels(
    seed: int = 0,
    *,
    scale: float = 1.0,
    num_requests: int = 1_000,
    instruction_tokens: int = 64,
    min_tokens: int = 256,
    max_tokens: int = 2_048,
) -> Workload:
    """Short texts to label, all behind one instruction: what batching is for.

    Args:
      scale: divides all token counts.
      min_tokens: with `max_tokens` the range of whole prompts; their logarithms are uniform.
    """
    lengths = _log_uniform(_rng(seed, "short_labels"), min_tokens, max_tokens, num_requests)
    instruction = Part(0, _scaled(instruction_tokens, scale))
    arrivals = [
        _arrival(NOBODY, instruction, Part(1 + number, _scaled(length - instruction_tokens, scale)))
        for number, length in enumerate(lengths)
    ]
    return Workload("short_labels", seed, tuple(arrivals))


def mixed(
    seed: int = 0,
    *,
    scale: float = 1.0,
    num_requests: int = 1_000,
    long_share: float = 0.05,
    long_tokens: int = 8_000,
    min_tokens: int = 128,
    max_tokens: int = 512,
) -> Workload:
    """Many short prompts, and now and then a long one that they may have to wait for; nothing is shared.

    Args:
      scale: divides all token counts.
      long_share: of the requests; just so many are long, at random places.
      min_tokens: with `max_tokens` the range of the short prompts; their logarithms are uniform.
    """
    rng = _rng(seed, "mixed")
    lengths = _log_uniform(rng, min_tokens, max_tokens, num_requests)
    lengths[rng.permutation(num_requests)[: round(long_share * num_requests)]] = long_tokens
    arrivals = [_arrival(NOBODY, Part(number, _scaled(length, scale))) for number, length in enumerate(lengths)]
    return Workload("mixed", seed, tuple(arrivals))


def trace(
    path: str | Path, seed: int = 0, *, scale: float = 1.0, limit: int | None = None, time_scale: float = 1.0
) -> Workload:
    """Requests of a recorded trace, with their arrival times; the lengths of the answers are ignored.

    One JSON object a line: `timestamp` (ms), `input_length` (tokens) and `hash_ids`, one for every 512 tokens, the
    last of which may be fewer. Equal ids are equal tokens, and so are all before them.

    Args:
      seed: only noted; nothing is drawn.
      scale: divides all token counts.
      limit: requests that are read; None: all.
      time_scale: multiplies the arrival times.

    Raises:
      ConfigError: the file cannot be read or a line is not like that; the message names the line.

    Source: the traces of Mooncake, kvcache-ai/Mooncake, `FAST25-release/traces`.
    """
    arrivals: list[Arrival] = []
    try:
        with Path(path).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(arrivals) >= limit:
                    break
                arrivals.append(_recorded(line, f"{path}, line {number}", scale, time_scale))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {path}: {getattr(error, 'strerror', None) or error}") from None
    arrivals.sort(key=lambda arrival: arrival.at_s)
    return Workload(f"trace:{Path(path).stem}", seed, tuple(arrivals))


def _recorded(line: str, place: str, scale: float, time_scale: float) -> Arrival:
    try:
        record = json.loads(line)
        at_s, num_tokens = float(record["timestamp"]) / 1000 * time_scale, int(record["input_length"])
        sources = [int(source) for source in record["hash_ids"]]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"trace {place}: {error!r}; wanted are timestamp, input_length and hash_ids") from None
    if num_tokens < 1 or len(sources) != -(-num_tokens // TRACE_BLOCK_TOKENS):
        raise ConfigError(f"trace {place}: {len(sources)} hash_ids do not make an input_length of {num_tokens}")
    lengths = [TRACE_BLOCK_TOKENS] * (len(sources) - 1)
    lengths.append(num_tokens - sum(lengths))
    parts = [Part(source, _scaled(length, scale)) for source, length in zip(sources, lengths, strict=True)]
    return replace(_arrival(NOBODY, *parts), at_s=at_s)


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "post_recommendation": post_recommendation,
    "credit_verification": credit_verification,
    "short_labels": short_labels,
    "mixed": mixed,
}


def make_workload(name: str, seed: int = 0, *, num_requests: int | None = None, **options: Any) -> Workload:
    """A workload by its name in `WORKLOADS`, or `trace:FILE`.

    Args:
      num_requests: so many, or the first so many of a workload that has a size of its own; None: all.
      options: keywords of the generator, such as `scale`.

    Raises:
      ConfigError: there is no such workload, the trace cannot be read, or it has fewer requests.
    """
    if name.startswith("trace:"):
        workload = trace(name.removeprefix("trace:"), seed, limit=num_requests, **options)
    elif name not in WORKLOADS:
        raise ConfigError(f"workload {name!r}: must be one of {', '.join(WORKLOADS)}, or trace:FILE")
    elif num_requests is not None and "num_requests" in signature(WORKLOADS[name]).parameters:
        workload = WORKLOADS[name](seed, num_requests=num_requests, **options)
    else:
        workload = WORKLOADS[name](seed, **options)
    if num_requests is not None and num_requests > len(workload.arrivals):
        raise ConfigError(f"workload {name}: has {len(workload.arrivals)} requests, not {num_requests}")
    return workload.first(num_requests or len(workload.arrivals))


def _rng(seed: int, stream: str) -> np.random.Generator:
    """One stream of random numbers per purpose: with one for all, arrival times would follow the lengths."""
    return np.random.default_rng([seed, zlib.crc32(stream.encode())])


def _arrival(user: int, *parts: Part) -> Arrival:
    return Arrival(0.0, user, parts)


def _scaled(num_tokens: int | float, scale: float) -> int:
    return max(1, round(num_tokens / scale))


def _log_uniform(rng: np.random.Generator, low: int, high: int, size: int) -> np.ndarray:
    return np.exp(rng.uniform(math.log(low), math.log(high), size))


# ---- tokens ------------------------------------------------------------------------------------------------


def token_ids(workload: Workload, arrival: Arrival, prose: TokenIds, salt: int | str = 0) -> TokenIds:
    """The tokens of a prompt of the workload: each part is English from a place of its own.

    A source starts with a few tokens that spell its number, so that no two share a block of a prefix store, whatever
    the prose repeats; after them the prose goes on, round and round.

    Args:
      workload: another name or seed makes other tokens of all sources.
      prose: the English, as `bench.prose` has it, in the tokens of the model.
      salt: and so does another salt: what a run before has left in a store is of no use then.

    Raises:
      ValueError: the prose starts with one token, over and over, or a source is not a 32-bit number.
    """
    alphabet = np.unique(prose[:_ALPHABET_TOKENS])
    if len(alphabet) < 2:
        raise ValueError("the prose needs two different tokens at least")
    key = zlib.crc32(f"{workload.name} {workload.seed} {salt}".encode())
    return np.concatenate([_part_ids(part, prose, alphabet, key) for part in arrival.prompt])


def _part_ids(part: Part, prose: TokenIds, alphabet: TokenIds, key: int) -> TokenIds:
    number = _scatter(part.source, key)
    ids = prose[(number + np.arange(part.num_tokens)) % len(prose)]
    for place in range(min(part.num_tokens, math.ceil(32 / math.log2(len(alphabet))))):
        number, digit = divmod(number, len(alphabet))
        ids[place] = alphabet[digit]
    return ids


def _scatter(source: int, key: int) -> int:
    """A 32-bit number for each source; with one key no two sources have the same."""
    if not 0 <= source < _MAX_SOURCES:
        raise ValueError(f"source {source}: must be 0 to {_MAX_SOURCES - 1}")
    number = source ^ key
    for _ in range(2):  # odd factors and shifted xors can be undone, so nothing is lost
        number = (number ^ number >> 16) * 0x45D9F3B % _MAX_SOURCES
    return number ^ number >> 16
