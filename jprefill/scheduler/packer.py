"""From pieces to one batch: the integer vectors that keep them apart, and which blocks move where.

    KV rows     | cached A          | new A | item 0 | item 1 | cached B | item of B | another item of B |
    token rows  | new A | item 0 | item 1 | item of B | another item of B |

Cached blocks that several pieces share are loaded once; what one computes at its front, others see there. Segments and
cached prefixes start on the grid (see `pieces`).
"""

from collections.abc import Sequence

import numpy as np

from jprefill.scheduler.pieces import Piece, Segment, ceil
from jprefill.types import Batch, BatchScores, BlockMoves, ItemScores


def pack(pieces: Sequence[Piece], bucket: int) -> Batch:
    """Lays the pieces out in a batch of `bucket` token rows; see `Batch` for the picture."""
    packed = _Buffer(bucket)
    for piece in pieces:
        packed.add(piece)
    return packed.finish()


class _Buffer:
    """The vectors of a `Batch` while they are being filled."""

    def __init__(self, bucket: int):
        def full(value: int) -> np.ndarray:
            return np.full(bucket, value, np.int32)

        self.token_ids, self.positions = full(0), full(0)
        self.prefix_lo, self.prefix_hi, self.self_lo, self.self_pos = full(0), full(0), full(0), full(-1)
        self.num_tokens = 0
        self.num_kv_rows = 0
        self.regions: dict[int, int] = {}  # a block that is loaded -> the first KV row of its prompt's prefix
        self.origins: dict[Piece, int] = {}  # where token 0 of its prompt lies, or would lie
        self.loads: list[tuple[int, int]] = []
        self.keeps: list[tuple[int, int]] = []
        self.rows: list[np.ndarray] = []
        self.pair_rows: list[np.ndarray] = []
        self.pair_ids: list[np.ndarray] = []
        self.num_rows = 0

    def add(self, piece: Piece) -> None:
        """The piece's cached prefix, then its segments."""
        region = self._region(piece)
        segments = list(piece.segments())
        if piece.needs_own_region:  # new rows of the prefix follow the cached ones without a gap
            self._place(segments.pop(0), (region, region + piece.num_cached), region + piece.num_cached)
        for segment in segments:
            start = ceil(self.num_kv_rows, piece.grid)
            row = self._place(segment, (region, region + piece.cut), start)
            self._add_reads(segment, row)
        first = segments[0] if piece.is_one_segment else None
        origin = region if first is None else self.num_kv_rows - len(first.token_ids) - piece.num_cached
        self.origins[piece] = origin
        self._add_keeps(piece, origin)

    def _region(self, piece: Piece) -> int:
        """The first KV row of the piece's prefix, whose cached blocks are loaded unless another piece did."""
        if piece.host is not None:
            return self.origins[piece.host]
        blocks = piece.lease.cached
        if blocks and not piece.needs_own_region and blocks[-1] in self.regions:
            return self.regions[blocks[-1]]
        region = ceil(self.num_kv_rows, piece.grid)
        self.loads += [(block, region + i * piece.block_size) for i, block in enumerate(blocks)]
        self.regions |= dict.fromkeys(blocks, region)
        self.num_kv_rows = region + piece.num_cached
        return region

    def _place(self, segment: Segment, prefix: tuple[int, int], start: int) -> int:
        """Appends tokens that see `prefix` and, causally, each other; returns their first token row.

        Args:
          start: their first KV row.
        """
        num_tokens = len(segment.token_ids)
        first_row = self.num_tokens
        here = slice(first_row, first_row + num_tokens)
        self.token_ids[here] = segment.token_ids
        self.positions[here] = np.arange(segment.first_position, segment.first_position + num_tokens, dtype=np.int32)
        self.prefix_lo[here], self.prefix_hi[here] = prefix
        self.self_lo[here] = start
        self.self_pos[here] = np.arange(start, start + num_tokens, dtype=np.int32)
        self.num_tokens += num_tokens
        self.num_kv_rows = start + num_tokens
        return first_row

    def _add_reads(self, segment: Segment, row: int) -> None:
        """Asks for the rows of the segment's item, shifted to where they lie."""
        item = segment.item
        if item is None:
            return
        num_rows, num_targets = item.targets.shape
        self.rows.append(item.rows + np.int32(row + segment.shift))
        self.pair_rows.append(np.repeat(np.arange(num_rows, dtype=np.int32), num_targets) + np.int32(self.num_rows))
        self.pair_ids.append(item.targets.reshape(-1))
        self.num_rows += num_rows

    def _add_keeps(self, piece: Piece, origin: int) -> None:
        """Blocks that are kept lie in rows that were computed; `origin` is where the prompt's token 0 would lie."""
        kept = piece.lease.reservation
        if kept is not None:
            self.keeps += [
                (block, origin + (kept.first + i) * piece.block_size) for i, block in enumerate(kept.blocks.tolist())
            ]

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
            loads=_moves(self.loads),
            keeps=_moves(self.keeps),
        )


def _moves(pairs: Sequence[tuple[int, int]]) -> BlockMoves:
    blocks, rows = np.asarray(pairs, np.int32).reshape(-1, 2).T
    return BlockMoves(blocks.copy(), rows.copy())


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
