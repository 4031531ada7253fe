"""`Piece`: what a request brings to one pass, and where its tokens lie. Pure Python and NumPy.

A request with one item is one segment: whatever of its prompt is not cached. A request with several is its prefix, then
its items, each of which sees the prefix:

    prompt        | prefix                          | item |        p = cached tokens, c = where the prefix is cut
    one item      | cached p |        segment              |        c = p
    several       | cached p |  segment      c |tail| item |        the tail rides with every item

A prompt may also begin with rows that another piece of the pass computes (its host); that is as if they were cached.

Without batch invariance the prefix is never cut: c is its length and there is no tail. With it, c falls on the grid of
key blocks on which attention sums (`grid` rows), as do cached prefixes and the starts of segments: so every query meets
the same blocks of keys in the same order, whatever is cached and whoever rides along.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jprefill.kvstore.contract import Lease
from jprefill.scheduler.queue import PendingRequest
from jprefill.types import Item, TokenIds


class Segment(NamedTuple):
    """Tokens that are computed in one run.

    Attributes:
      first_position: of its first token in the prompt.
      item: whose rows are read here; None: the prefix.
      shift: what to add to the item's rows to get rows of the segment.
    """

    token_ids: TokenIds
    first_position: int
    item: Item | None = None
    shift: int = 0


@dataclass(eq=False, slots=True)
class Piece:
    """The items `[first_item, end_item)` of one request, the prefix in front of them, and its lease on the store.

    Attributes:
      host: an earlier piece of the pass whose rows begin with the same tokens: they are seen there, not computed again.
    """

    pending: PendingRequest
    first_item: int
    end_item: int
    lease: Lease
    block_size: int
    grid: int = 1
    host: "Piece | None" = None

    @property
    def items(self) -> tuple[Item, ...]:
        """The items that ride in this batch."""
        return self.pending.request.items[self.first_item : self.end_item]

    @property
    def num_cached(self) -> int:
        """Leading tokens of the prompt that come from the store or lie in the rows of the host."""
        return max(len(self.lease.cached), self.lease.num_borrowed) * self.block_size

    @property
    def is_one_segment(self) -> bool:
        """Whether prefix and item are one run of tokens."""
        return len(self.pending.request.items) == 1

    @property
    def cut(self) -> int:
        """How many leading tokens all segments of the piece see as their prefix."""
        return self.num_cached if self.is_one_segment else floor(len(self.pending.request.prefix), self.grid)

    def segments(self) -> Iterator[Segment]:
        """In the order of the batch's rows."""
        prefix, cached = self.pending.request.prefix, self.num_cached
        if self.is_one_segment:
            [item] = self.items
            whole = np.concatenate([prefix, item.token_ids])
            yield Segment(whole[cached:], cached, item, len(prefix) - cached)
            return
        cut = self.cut
        if cached < cut:
            yield Segment(prefix[cached:cut], cached)
        tail = prefix[cut:]
        for item in self.items:
            yield Segment(np.concatenate([tail, item.token_ids]), cut, item, len(tail))

    @property
    def tail(self) -> int:
        """Tokens between the cut and the item, which every segment of an item starts with.

        Negative where a single item is cached in part.
        """
        return len(self.pending.request.prefix) - self.cut

    @property
    def num_tokens(self) -> int:
        """Token rows of the batch that the piece takes: what must be computed."""
        return self.cut - self.num_cached + sum(self.tail + len(item.token_ids) for item in self.items)

    @property
    def num_prompt_tokens(self) -> int:
        """As its caller counts them: the prefix once per item."""
        return sum(len(self.pending.request.prefix) + len(item.token_ids) for item in self.items)

    @property
    def num_saved_tokens(self) -> int:
        """Prompt tokens that were not computed, as far as the caller may know.

        Blocks of the shared prompt say what other tenants did, so a salted request does not count them.
        """
        num_saved = self.num_prompt_tokens - self.num_tokens
        if self.pending.request.salt:
            num_saved -= min(self.num_cached, self.lease.keys.num_shared * self.block_size)
        return max(0, num_saved)

    @property
    def num_kept_tokens(self) -> int:
        """Tokens whose KV the pass adds to the store."""
        return 0 if self.lease.reservation is None else len(self.lease.reservation.blocks) * self.block_size

    @property
    def needs_own_region(self) -> bool:
        """Whether new rows of the prefix must follow the cached ones: only then are they one range."""
        return self.num_cached < self.cut


def floor(number: int, grid: int) -> int:
    """The largest multiple of `grid` that is not above."""
    return number - number % grid


def ceil(number: int, grid: int) -> int:
    """The smallest multiple of `grid` that is not below."""
    return number + -number % grid


def num_cacheable_blocks(pending: PendingRequest, block_size: int, grid: int) -> int:
    """Leading blocks that may come from the store: rows that are read, and one token at least, must be computed."""
    request = pending.request
    num_tokens = len(request.prefix)
    if len(request.items) == 1:
        num_tokens += int(request.items[0].rows.min())
    return floor(num_tokens, max(grid, block_size)) // block_size
