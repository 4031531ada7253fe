"""Requests without text: only lengths count, and which blocks are equal."""

import hashlib
from concurrent.futures import Future
from functools import lru_cache

import numpy as np

from jprefill.bench.workloads import Arrival, Part
from jprefill.kvstore.hashing import BlockKeys
from jprefill.scheduler.queue import PendingRequest
from jprefill.types import Item, ScoreRequest

_MAX_CHAINS = 65_536  # runs of keys that are remembered: a profile is hashed once
_TOKENS = np.zeros(2**20, np.int32)  # of every prompt; keys tell blocks apart
_TARGETS = np.zeros((1, 1), np.int32)


class PromptMaker:
    """Turns arrivals into requests. Blocks are equal if all parts up to their end are."""

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._blocks = np.zeros((len(_TOKENS) // block_size, block_size), np.int32)
        self._chain = lru_cache(_MAX_CHAINS)(self._make_chain)

    def pending(self, arrival: Arrival) -> PendingRequest:
        """The request as it waits, since `arrival.at_s`."""
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
            chain, parent = self._chain(parent, part, start % self._block_size)
            hashes += chain
            start += part.num_tokens
        return BlockKeys(tuple(hashes), self._blocks[: len(hashes)])

    def _make_chain(self, parent: bytes, part: Part, offset: int) -> tuple[tuple[bytes, ...], bytes]:
        """Keys of the blocks that end in a part, and what the next part hangs on.

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
        return tuple(keys), whole.digest()
