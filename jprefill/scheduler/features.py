"""What a pass costs is counted in: chunks walked, keys looked at, bytes brought up. Pure Python and NumPy."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from jprefill.scheduler.pieces import Piece
from jprefill.types import ScoreRequest

ATTENTION_TILE = 256  # query rows that attention takes at once, at most: a tile costs the same with fewer tokens in it

Counts = Int64[np.ndarray, " _"]
Amounts = Float64[np.ndarray, " _"]


@dataclass(frozen=True, slots=True)
class Features:
    """Of one pass.

    Attributes:
      num_chunks: token rows that are walked, padding included, over the chunk size: half a chunk is 0.5.
      attention_area: sum over new tokens of the keys that each sees; padding in the last tile sees as much.
      restore_bytes: KV that comes from lower tiers.
    """

    num_chunks: float
    attention_area: float
    restore_bytes: float = 0.0


class Load(NamedTuple):
    """Work that is left of requests, one entry each; see `load_of` for the parts.

    Attributes:
      num_front_tokens: computed once, cached ones included.
      num_item_tokens: each sees the whole front.
      item_area: sum over items of the keys of the item itself.
    """

    num_front_tokens: Counts
    num_item_tokens: Counts
    item_area: Amounts


def load_of(request: ScoreRequest, first_item: int = 0) -> tuple[int, int, float]:
    """`Load` of the items of one request from number `first_item` on; a single item is all front."""
    if len(request.items) == 1:
        return len(request.prefix) + len(request.items[0].token_ids), 0, 0.0
    lengths = [len(item.token_ids) for item in request.items[first_item:]]
    return len(request.prefix), sum(lengths), sum(length * (length + 1) / 2 for length in lengths)


@dataclass(frozen=True)
class ChunkWalk:
    """How the runner walks token rows: whole chunks, or the bucket where that is shorter.

    Attributes:
      chunk_size: tokens.
      buckets: ascending; more tokens than the last one holds take several passes.
    """

    chunk_size: int
    buckets: tuple[int, ...]

    def rows(self, num_tokens: Counts, tile: int | None = None) -> Counts:
        """Token rows that are walked for so many tokens, in steps of a chunk, or of a `tile` that is shorter."""
        last = self.buckets[-1]
        whole, rest = num_tokens // last * last, num_tokens % last
        buckets = np.asarray(self.buckets, np.int64)
        steps = np.minimum(buckets, self.chunk_size if tile is None else min(tile, self.chunk_size))
        step = steps[np.searchsorted(buckets, rest)]
        return whole + -(-rest // step) * step

    def num_rows(self, num_tokens: int) -> int:
        """`rows` of one pass."""
        whole, rest = divmod(num_tokens, self.buckets[-1])
        step = min(self.buckets[bisect_left(self.buckets, rest)], self.chunk_size)
        return whole * self.buckets[-1] + rest + -rest % step

    def features(self, load: Load, num_cached: Counts) -> tuple[Amounts, Amounts]:
        """`num_chunks` and `attention_area` of requests that each run alone.

        Args:
          num_cached: tokens of each that come from the store.
        """
        front, item_tokens, item_area = load
        num_new = front - num_cached
        num_tokens = num_new + item_tokens
        area = num_new * (num_cached + (num_new + 1) / 2) + item_tokens * front.astype(np.float64) + item_area
        return self._padded(num_tokens, area)

    def of_pass(self, pieces: Sequence[Piece], restore_bytes: float = 0.0) -> Features:
        """What a pass over these pieces costs."""
        num_tokens, area = 0, 0.0
        for piece in pieces:
            num_tokens += piece.num_tokens
            area += _area(piece)
        chunks, areas = self._padded(np.asarray([num_tokens], np.int64), np.asarray([area], np.float64))
        return Features(float(chunks[0]), float(areas[0]), restore_bytes)

    def _padded(self, num_tokens: Counts, area: Amounts) -> tuple[Amounts, Amounts]:
        padding = self.rows(num_tokens, ATTENTION_TILE) / np.maximum(num_tokens, 1)
        return self.rows(num_tokens) / np.float64(self.chunk_size), area * padding


def _area(piece: Piece) -> float:
    """Keys that the new tokens of a piece see."""
    if piece.is_one_segment:
        runs = [(piece.num_tokens, piece.num_cached)]
    else:
        runs = [(piece.cut - piece.num_cached, piece.num_cached)]
        runs += [(piece.tail + len(item.token_ids), piece.cut) for item in piece.items]
    return sum(num_new * (num_seen + (num_new + 1) / 2) for num_new, num_seen in runs)
