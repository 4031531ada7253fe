"""From waiting requests to one batch: which items ride together, and the integer vectors that keep them apart."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jprefill.scheduler.queue import PendingRequest
from jprefill.types import Batch, BatchScores, Item, ItemScores


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """The items `[first_item, end_item)` of one request, with its prefix in front of them."""

    pending: PendingRequest
    first_item: int
    end_item: int

    @property
    def items(self) -> tuple[Item, ...]:
        """The items that ride in this batch."""
        return self.pending.request.items[self.first_item : self.end_item]

    @property
    def num_tokens(self) -> int:
        """Rows of the batch that the piece takes."""
        return len(self.pending.request.prefix) + sum(len(item.token_ids) for item in self.items)


def plan_batch(ordered: Iterable[PendingRequest], max_tokens: int) -> list[Piece]:
    """Takes whole requests in order while they fit.

    The first request is taken in any case: if not all its items fit, as many as do; the rest follow in later batches.
    Any single item with its prefix fits, because admission refused longer ones.
    """
    pieces: list[Piece] = []
    room = max_tokens
    for pending in ordered:
        if pending.must_run_alone and pieces:
            break
        piece = _largest_piece(pending, room)
        is_whole = piece is not None and piece.end_item == len(pending.request.items)
        if piece is None or (pieces and not is_whole):
            break
        pieces.append(piece)
        room -= piece.num_tokens
        if pending.must_run_alone or not is_whole:
            break
    return pieces


def _largest_piece(pending: PendingRequest, room: int) -> Piece | None:
    """The request's next items, as many as fit in `room` tokens behind its prefix; None if not even one does."""
    items = pending.request.items
    room -= len(pending.request.prefix)
    end = pending.next_item
    while end < len(items) and len(items[end].token_ids) <= room:
        room -= len(items[end].token_ids)
        end += 1
    return Piece(pending, pending.next_item, end) if end > pending.next_item else None


def pack(pieces: Sequence[Piece], bucket: int) -> Batch:
    """Lays the pieces out in one buffer of `bucket` rows; see `Batch` for the picture."""
    packed = _Buffer(bucket)
    for piece in pieces:
        prefix = piece.pending.request.prefix
        prefix_lo = packed.add_segment(prefix, first_position=0, prefix=(0, 0))
        for item in piece.items:
            start = packed.add_segment(
                item.token_ids, first_position=len(prefix), prefix=(prefix_lo, prefix_lo + len(prefix))
            )
            packed.add_reads(item, start)
    return packed.finish()


class _Buffer:
    """The vectors of a `Batch` while they are being filled."""

    def __init__(self, bucket: int):
        def full(value: int) -> np.ndarray:
            return np.full(bucket, value, np.int32)

        self.token_ids, self.positions = full(0), full(0)
        self.prefix_lo, self.prefix_hi, self.self_lo, self.self_pos = full(0), full(0), full(0), full(-1)
        self.num_tokens = 0
        self.rows: list[np.ndarray] = []
        self.pair_rows: list[np.ndarray] = []
        self.pair_ids: list[np.ndarray] = []
        self.num_rows = 0

    def add_segment(self, token_ids: np.ndarray, *, first_position: int, prefix: tuple[int, int]) -> int:
        """Appends tokens that see `prefix` and, causally, each other; returns their first row."""
        start, end = self.num_tokens, self.num_tokens + len(token_ids)
        here = slice(start, end)
        self.token_ids[here] = token_ids
        self.positions[here] = np.arange(first_position, first_position + len(token_ids), dtype=np.int32)
        self.prefix_lo[here], self.prefix_hi[here] = prefix
        self.self_lo[here] = start
        self.self_pos[here] = np.arange(start, end, dtype=np.int32)
        self.num_tokens = end
        return start

    def add_reads(self, item: Item, start: int) -> None:
        """Asks for the item's rows, shifted to where the item lies."""
        num_rows, num_targets = item.targets.shape
        self.rows.append(item.rows + np.int32(start))
        self.pair_rows.append(np.repeat(np.arange(num_rows, dtype=np.int32), num_targets) + np.int32(self.num_rows))
        self.pair_ids.append(item.targets.reshape(-1))
        self.num_rows += num_rows

    def finish(self) -> Batch:
        """The batch, padded to the bucket."""
        return Batch(
            token_ids=self.token_ids,
            positions=self.positions,
            prefix_lo=self.prefix_lo,
            prefix_hi=self.prefix_hi,
            self_lo=self.self_lo,
            self_pos=self.self_pos,
            num_tokens=self.num_tokens,
            read_rows=np.concatenate(self.rows),
            pair_rows=np.concatenate(self.pair_rows),
            pair_ids=np.concatenate(self.pair_ids),
        )


def unpack(pieces: Sequence[Piece], scores: BatchScores) -> list[list[ItemScores]]:
    """Cuts a pass's flat scores into items, one list per piece, in the order of `pack`."""
    row = pair = 0
    cut: list[list[ItemScores]] = []
    for piece in pieces:
        here = []
        for item in piece.items:
            num_rows, num_targets = item.targets.shape
            num_pairs = num_rows * num_targets
            here.append(
                ItemScores(
                    logprobs=scores.pair_logprobs[pair : pair + num_pairs].reshape(num_rows, num_targets),
                    top_ids=scores.top_ids[row : row + num_rows],
                    top_logprobs=scores.top_logprobs[row : row + num_rows],
                )
            )
            row, pair = row + num_rows, pair + num_pairs
        cut.append(here)
    return cut
