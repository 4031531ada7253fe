"""Which waiting requests ride in the next pass, given what the store holds now. Pure Python and NumPy."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from jprefill.kvstore.contract import Store
from jprefill.scheduler.pieces import Piece, ceil, floor, num_cacheable_blocks
from jprefill.scheduler.queue import PendingRequest

# A request waits one pass for blocks that the pass computes anyway if that saves so much.
MIN_SHARED_TOKENS = 64


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
    budget: int | None = None,
    suspended: Sequence[Piece] = (),
) -> list[Piece]:
    """Takes whole requests in order while they fit, each with a lease that the caller must release.

    Args:
      budget: tokens to compute beyond which others do not join the first request; None: as many as there is room for.
      suspended: a pass that goes on after this one. Whoever needs blocks that it keeps waits for it.

    The first request is taken in any case: if not all its items fit, as many as do; the rest follow in later batches.
    Any single item with its prefix fits, because admission refused longer ones. A request is left for the next pass if
    this one computes and keeps blocks that it needs too: equal prefixes are computed once.
    """
    plan = _Plan(room, store, room.num_tokens if budget is None else min(budget, room.num_tokens))
    promised = {key for piece in suspended for key in _kept_keys(piece)}
    for pending in ordered:
        if pending.must_run_alone and plan.pieces:
            break
        if plan.is_served_better_later(pending) or (promised and plan.continues(pending, promised)):
            continue
        if not plan.add(pending):
            break
        if pending.must_run_alone:
            break
    return plan.pieces


def _kept_keys(piece: Piece) -> Sequence[bytes]:
    """Of the blocks that the piece's pass adds to the store."""
    return () if piece.lease.reservation is None else piece.lease.reservation.hashes


class _Plan:
    """One batch while it is being filled."""

    def __init__(self, room: Room, store: Store, budget: int):
        self.pieces: list[Piece] = []
        self._room, self._store, self._budget = room, store, budget
        self._num_tokens = self._num_kv_rows = 0
        self._loaded: set[int] = set()  # last blocks of the prefixes that are in the batch, and all before them
        self._computed: set[bytes] = set()  # keys of blocks that the batch keeps

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

    def add(self, pending: PendingRequest) -> bool:
        """Adds as much of a request as may come; False if the batch ends before it, or in the middle of it."""
        lease = self._store.lease(pending.keys, self._limit(pending))
        piece = Piece(pending, pending.next_item, pending.next_item, lease, self._store.block_size, self._room.grid)
        self._drop_off_grid(piece)
        num_tokens, num_kv_rows = self._take_items(piece)
        is_whole = piece.end_item == len(pending.request.items)
        if piece.end_item == piece.first_item or (self.pieces and not is_whole):
            self._store.release(lease, is_good=False)
            return False
        self._store.keep(lease, pending.request, self._keep_limit(pending))
        self._num_tokens, self._num_kv_rows = num_tokens, num_kv_rows
        self._loaded.update(lease.cached)
        if lease.reservation is not None:
            self._computed.update(_kept_keys(piece))
        self.pieces.append(piece)
        return is_whole

    def _take_items(self, piece: Piece) -> tuple[int, int]:
        """Moves the end of the piece over all items that fit; the batch's token and KV rows with them.

        Rows are counted as `pack` lays them out.
        """
        cached, grid = piece.lease.cached, piece.grid
        num_tokens, row = self._num_tokens, self._num_kv_rows
        if piece.needs_own_region or not cached or cached[-1] not in self._loaded:
            row = ceil(row, grid) + piece.num_cached
        if piece.needs_own_region:
            num_tokens, row = (count + piece.cut - piece.num_cached for count in (num_tokens, row))
        tail = piece.tail
        for item in piece.pending.request.items[piece.first_item :]:
            length = tail + len(item.token_ids)
            next_row = ceil(row, grid) + length
            limit = self._budget if self.pieces else self._room.num_tokens
            if num_tokens + length > limit or next_row > self._room.num_kv_rows:
                break
            num_tokens, row = num_tokens + length, next_row
            piece.end_item += 1
        return num_tokens, row

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
