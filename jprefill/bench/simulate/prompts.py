"""Requests without text: only lengths count, and which blocks are equal."""

import hashlib
from collections import OrderedDict
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from jprefill.bench.workloads import Arrival, Part
from jprefill.errors import ConfigError
from jprefill.kvstore.hashing import BlockKeys
from jprefill.scheduler.queue import PendingRequest
from jprefill.types import Item, ScoreRequest

_MAX_KEYS = 2**20  # that are remembered in runs: a profile is hashed once
_TOKENS = np.zeros(2**20, np.int32)  # of every prompt; keys tell blocks apart
_TARGETS = np.zeros((1, 1), np.int32)


class _Chain(NamedTuple):
    """Keys of the blocks that end in a part, and what the next part hangs on."""

    hashes: tuple[bytes, ...]
    end: bytes


class PromptMaker:
    """Turns arrivals into requests. Blocks are equal if all parts up to their end are.

    Invariant: what is remembered is at most `max_keys` keys, and one run more.
    """

    def __init__(self, block_size: int, max_keys: int = _MAX_KEYS):
        self._block_size, self._max_keys = block_size, max_keys
        self._blocks = np.zeros((len(_TOKENS) // block_size, block_size), np.int32)
        self._chains: OrderedDict[tuple[bytes, Part, int], _Chain] = OrderedDict()
        self._num_keys = 0

    def pending(self, arrival: Arrival) -> PendingRequest:
        """The request as it waits, since `arrival.at_s`.

        Raises:
          ConfigError: the prompt is longer than any that is simulated.
        """
        if arrival.num_tokens > len(_TOKENS):
            raise ConfigError(f"a prompt has {arrival.num_tokens} tokens: at most {len(_TOKENS)} are simulated")
        first, *rest = arrival.prompt
        num_prefix, num_item = (first.num_tokens, sum(p.num_tokens for p in rest)) if rest else (0, first.num_tokens)
        item = Item(_TOKENS[:num_item], np.array([num_item - 1], np.int32), _TARGETS)
        request = ScoreRequest(_TOKENS[:num_prefix], (item,), priority=arrival.priority)
        return PendingRequest(request, Future(), self.keys(arrival.prompt), submitted_s=arrival.at_s)

    def keys(self, prompt: tuple[Part, ...]) -> BlockKeys:
        """Of the whole blocks."""
        hashes: list[bytes] = []
        parent, start = b"", 0
        for part in prompt:
            chain = self._chain(parent, part, start % self._block_size)
            hashes += chain.hashes
            parent, start = chain.end, start + part.num_tokens
        return BlockKeys(tuple(hashes), self._blocks[: len(hashes)])

    def _chain(self, parent: bytes, part: Part, offset: int) -> _Chain:
        """`_make_chain`, remembered; what was not asked for longest is forgotten first."""
        place = (parent, part, offset)
        chain = self._chains.get(place)
        if chain is not None:
            self._chains.move_to_end(place)
            return chain
        chain = self._chains[place] = self._make_chain(parent, part, offset)
        self._num_keys += 1 + len(chain.hashes)
        while self._num_keys > self._max_keys and len(self._chains) > 1:
            _, old = self._chains.popitem(last=False)
            self._num_keys -= 1 + len(old.hashes)
        return chain

    def _make_chain(self, parent: bytes, part: Part, offset: int) -> _Chain:
        """Hashes the blocks that end in a part.

        Args:
          parent: stands for everything before the part.
          offset: of its first token in a block.
        """
        num_ends = (offset + part.num_tokens) // self._block_size
        whole = hashlib.sha256(parent + f"{part.source} {offset}".encode())
        keys = []
        for number in range(num_ends):
            key = whole.copy()
            key.update(number.to_bytes(4, "big"))
            keys.append(key.digest())
        whole.update(f"end {part.num_tokens}".encode())
        return _Chain(tuple(keys), whole.digest())
