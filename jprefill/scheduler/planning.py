"""Which waiting requests ride in the next pass, given what the store holds now. Pure Python and NumPy."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jprefill.kvstore.contract import Store
from jprefill.scheduler.filling import Filling
from jprefill.scheduler.pieces import Piece, ceil, floor, num_cacheable_blocks
from jprefill.scheduler.queue import PendingRequest

# A request waits one pass for blocks that the pass computes anyway if that saves so much.
MIN_SHARED_TOKENS = 64
MAX_PASSED_OVER = 8  # requests that may not join, until nobody else is asked


@dataclass(frozen=True, slots=True)
class Room:
    """What one pass holds.

    Attributes:
      num_tokens: token rows: of the last bucket.
      num_kv_rows: of the KV buffer, cached blocks included.
      grid: see `pieces`.
    """

    num_tokens: int
    num_kv_rows: int
    grid: int = 1


def plan_batch(
    ordered: Iterable[PendingRequest],
    room: Room,
    store: Store,
    *,
    filling: Filling | None = None,
    suspended: Sequence[Piece] = (),
) -> list[Piece]:
    """Takes whole requests in order while they fit, each with a lease that the caller must release.

    Args:
      filling: who may join the first request; None: as many as there is room for.
      suspended: a pass that goes on after this one. Whoever needs blocks that it keeps waits for it.

    The first request is taken in any case: if not all its items fit, as many as do; the rest follow in later batches.
    Any single item with its prefix fits, because admission refused longer ones. Equal prefixes are computed once: who
    comes after the first sees its rows, or, where that cannot be, is left for the next pass if this one keeps them.
    """
    plan = _Plan(room, store, filling or Filling(room.num_tokens, room.num_tokens))
    num_passed_over = 0
    promised = {key for piece in suspended for key in _kept_keys(piece)}
    for pending in ordered:
        if pending.must_run_alone and plan.pieces:
            break
        loan = plan.loan(pending)
        if loan is None and plan.is_served_better_later(pending):
            continue
        if promised and plan.continues(pending, promised):
            continue
        if plan.pieces and not plan.may_join(pending, loan):
            num_passed_over += 1
            if num_passed_over > MAX_PASSED_OVER or not plan.takes_others:
                break
            continue
        if not plan.add(pending, loan):
            break
        if pending.must_run_alone:
            break
    return plan.pieces


def _kept_keys(piece: Piece) -> Sequence[bytes]:
    """Of the blocks that the piece's pass adds to the store."""
    return () if piece.lease.reservation is None else piece.lease.reservation.hashes


class _Loan(NamedTuple):
    """Leading blocks of a request that lie in the rows of a piece."""

    host: Piece
    num_blocks: int


class _Plan:
    """One batch while it is being filled."""

    def __init__(self, room: Room, store: Store, filling: Filling):
        self.pieces: list[Piece] = []
        self._room, self._store, self._filling = room, store, filling
        self._num_tokens = self._num_kv_rows = 0
        self._loaded: set[int] = set()  # last blocks of the prefixes that are in the batch, and all before them
        self._computed: set[bytes] = set()  # keys of blocks that the batch keeps
        self._hosts: dict[bytes, Piece] = {}  # keys of blocks that lie in rows without a gap before them

    def is_served_better_later(self, pending: PendingRequest) -> bool:
        """Whether the batch keeps enough of the blocks that the request would compute once more."""
        keys = pending.keys
        if not self._computed or pending.must_run_alone:
            return False
        limit = self._limit(pending)
        first = self._store.num_cached(keys, limit)
        num_shared = 0
        while first + num_shared < limit and keys.hashes[first + num_shared] in self._computed:
            num_shared += 1
        return num_shared * self._store.block_size >= MIN_SHARED_TOKENS

    def continues(self, pending: PendingRequest, promised: Set[bytes]) -> bool:
        """Whether the first block of the request that the device lacks is promised."""
        keys = pending.keys
        first = self._store.num_on_device(keys, len(keys))
        return first < len(keys) and keys.hashes[first] in promised

    def loan(self, pending: PendingRequest) -> _Loan | None:
        """What the request can see in rows of the batch, if that is worth more than what the store holds."""
        if not self._hosts or pending.must_run_alone:
            return None
        keys, limit, block_size = pending.keys, self._limit(pending), self._store.block_size
        num_found = bisect_left(keys.hashes[:limit], True, key=lambda key: key not in self._hosts)
        num_blocks = floor(num_found * block_size, self._room.grid) // block_size
        if not num_blocks:
            return None
        if len(pending.request.items) > 1 and num_blocks * block_size < floor(
            len(pending.request.prefix), self._room.grid
        ):
            return None  # the rest of the prefix would have to follow in the rows of the host
        num_gained = num_blocks - self._store.num_cached(keys, limit)
        host = self._hosts[keys.hashes[num_blocks - 1]]
        is_same = np.array_equal(host.pending.keys.tokens[:num_blocks], keys.tokens[:num_blocks])
        return _Loan(host, num_blocks) if is_same and num_gained * block_size >= MIN_SHARED_TOKENS else None

    @property
    def takes_others(self) -> bool:
        """Whether anybody may join at all."""
        return self._filling.budget > 0

    def may_join(self, pending: PendingRequest, loan: _Loan | None) -> bool:
        """Whether a request may ride with those that do, as far as is known without its lease."""
        limit = self._limit(pending)
        num_known = loan.num_blocks if loan else self._store.num_cached(pending.keys, limit)
        num_tokens = len(pending.request.prefix) + sum(
            len(item.token_ids) for item in pending.request.items[pending.next_item :]
        )
        return self._may_join(pending, num_tokens - num_known * self._store.block_size)

    def _may_join(self, pending: PendingRequest, num_new: int) -> bool:
        """Who shares a prefix with the first one may double the pass: apart, its time would be spent on the prefix."""
        filling, first = self._filling, self.pieces[0]
        if filling.may_join(num_new, self._num_tokens, len(self.pieces)):
            return True
        is_companion = pending.group is not None and pending.group == first.pending.group
        num_tokens = self._num_tokens + num_new
        return is_companion and self.takes_others and num_tokens <= min(2 * first.num_tokens, self._room.num_tokens)

    def add(self, pending: PendingRequest, loan: _Loan | None = None) -> bool:
        """Adds as much of a request as may come; False if the batch ends before it, or in the middle of it."""
        lease = self._store.lease(pending.keys, 0 if loan else self._limit(pending))
        piece = Piece(pending, pending.next_item, pending.next_item, lease, self._store.block_size, self._room.grid)
        if loan is not None:
            lease.num_borrowed, piece.host = loan.num_blocks, loan.host
        self._drop_off_grid(piece)
        num_tokens, num_kv_rows = self._take_items(piece)
        is_whole = piece.end_item == len(pending.request.items)
        if self.pieces and not (is_whole and self._may_join(pending, num_tokens - self._num_tokens)):
            self._store.release(lease, is_good=False)
            return False
        if piece.end_item == piece.first_item:
            self._store.release(lease, is_good=False)
            return False
        self._store.keep(lease, pending.request, self._keep_limit(pending))
        self._num_tokens, self._num_kv_rows = num_tokens, num_kv_rows
        if self._owns_region(piece):
            self._hosts |= dict.fromkeys(pending.keys.hashes[: self._keep_limit(pending)], piece)
        self._loaded.update(lease.cached)
        if lease.reservation is not None:
            self._computed.update(_kept_keys(piece))
        self.pieces.append(piece)
        return is_whole

    def _take_items(self, piece: Piece) -> tuple[int, int]:
        """Moves the end of the piece over all items that fit; the batch's token and KV rows with them.

        Rows are counted as `pack` lays them out.
        """
        grid = piece.grid
        num_tokens, row = self._num_tokens, self._num_kv_rows
        if self._owns_region(piece):
            row = ceil(row, grid) + piece.num_cached
        if piece.needs_own_region:
            num_tokens, row = (count + piece.cut - piece.num_cached for count in (num_tokens, row))
        tail = piece.tail
        for item in piece.pending.request.items[piece.first_item :]:
            length = tail + len(item.token_ids)
            next_row = ceil(row, grid) + length
            if num_tokens + length > self._room.num_tokens or next_row > self._room.num_kv_rows:
                break
            num_tokens, row = num_tokens + length, next_row
            piece.end_item += 1
        return num_tokens, row

    def _owns_region(self, piece: Piece) -> bool:
        """Whether the rows of the prompt's front are its own: not its host's, nor loaded for another before it."""
        cached = piece.lease.cached
        return piece.host is None and (piece.needs_own_region or not cached or cached[-1] not in self._loaded)

    def _limit(self, pending: PendingRequest) -> int:
        return 0 if pending.must_run_alone else num_cacheable_blocks(pending, self._store.block_size, self._room.grid)

    def _keep_limit(self, pending: PendingRequest) -> int:
        """Blocks that the pass computes whole and in one run."""
        if pending.must_run_alone:
            return 0
        if len(pending.request.items) == 1:
            return len(pending.keys)
        return floor(len(pending.request.prefix), self._room.grid) // self._store.block_size

    def _drop_off_grid(self, piece: Piece) -> None:
        """Gives back cached blocks beyond the last whole step of the grid: a lease may be shorter than was asked."""
        lease, num_blocks = piece.lease, floor(piece.num_cached, piece.grid) // piece.block_size
        if num_blocks < len(lease.cached):
            self._store.shorten(lease, num_blocks)
