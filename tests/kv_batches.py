"""Hand-made batches: every segment says which KV rows it sees and takes."""

from dataclasses import dataclass

import numpy as np

from jprefill.types import NO_MOVES, Batch, BlockMoves


@dataclass(frozen=True, eq=False)
class Segment:
    """New tokens of one prompt.

    Attributes:
      kv_row: of the first token.
      position: of the first token, in its prompt.
      self_lo: first KV row of the causal range; None: `kv_row`.
      prefix: KV rows that every token sees besides.
      is_read: the last token is.
    """

    token_ids: np.ndarray
    kv_row: int
    position: int = 0
    self_lo: int | None = None
    prefix: tuple[int, int] = (0, 0)
    is_read: bool = True


def moves(blocks, rows):
    return BlockMoves(np.asarray(blocks, np.int32), np.asarray(rows, np.int32))


def make_batch(segments, bucket, *, loads=NO_MOVES, keeps=NO_MOVES, ids=(5, 17, 250)):
    vectors = {name: np.zeros(bucket, np.int32) for name in ("token_ids", "positions", "lo", "hi", "self_lo")}
    self_pos = np.full(bucket, -1, np.int32)
    row, reads = 0, []
    for segment in segments:
        here, offsets = slice(row, row + len(segment.token_ids)), np.arange(len(segment.token_ids))
        vectors["token_ids"][here] = segment.token_ids
        vectors["positions"][here] = segment.position + offsets
        vectors["lo"][here], vectors["hi"][here] = segment.prefix
        vectors["self_lo"][here] = segment.kv_row if segment.self_lo is None else segment.self_lo
        self_pos[here] = segment.kv_row + offsets
        row = here.stop
        reads += [row - 1] if segment.is_read else []
    pair_rows = np.repeat(np.arange(len(reads), dtype=np.int32), len(ids))
    pair_ids = np.tile(np.asarray(ids, np.int32), len(reads))
    read_rows = np.asarray(reads, np.int32)
    return Batch(*vectors.values(), self_pos, row, read_rows, pair_rows, pair_ids, loads, keeps)
