"""Records that travel from the door to the device and back, and the shape alphabet. No JAX here.

Shape alphabet (the first seven as in `jax.nn.dot_product_attention`):

    B  batch                T  query tokens of a batch      S  key tokens of a KV buffer
    N  query heads          K  KV heads                     H  head_dim
    G  N / K                D  embed_dim                    F  mlp_dim
    V  vocabulary           L  layers                       C  chunk_size (tokens)
    R  rows that are read   M  target ids of a row          P  (row, id) pairs read by one head call
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Float32, Int32

TokenIds = Int32[np.ndarray, " _"]
Head = Literal["tokens", "classes"]


@dataclass(frozen=True, slots=True)
class ClassHead:
    """What a sequence classifier answers with, in place of the vocabulary. Its target ids are class indices.

    One more target, `zero_id`, has the constant logit 0. With it a row's scores stay log-probabilities, and the
    raw logit of class c can be read: `logprobs[c] - logprobs[zero_id]`.

    Attributes:
      names: of the classes, by index; a reranker or a reward model has one, and one logit.
      is_exclusive: the classes share one softmax; else each has a sigmoid of its own.
      pad_id: a prompt is read at its last token that is not this one, as transformers has it.
    """

    names: tuple[str, ...]
    is_exclusive: bool
    pad_id: int | None = None

    @property
    def zero_id(self) -> int:
        """The target whose logit is 0."""
        return len(self.names)

    @property
    def num_targets(self) -> int:
        """Target ids are below it."""
        return len(self.names) + 1


@dataclass(frozen=True, eq=False, slots=True)
class Item:
    """One candidate of a request: tokens after the shared prefix, and what to read from them.

    Attributes:
      token_ids: at least one token; positions go on after the prefix.
      rows: offsets into `token_ids`; row r predicts the token after it.
      targets: ids whose log-probability is read at each row, in the caller's order.
    """

    token_ids: TokenIds
    rows: Int32[np.ndarray, " R"]
    targets: Int32[np.ndarray, "R M"]


@dataclass(frozen=True, eq=False, slots=True)
class ScoreRequest:
    """One decision request in token form. Made by `tasks/`, checked by `Engine.submit`, never changed.

    Attributes:
      prefix: tokens that all items share; may be empty.
      items: at least one; each is scored as if it alone followed the prefix.
      deadline_s: on the monotonic clock; after it the request is shed with 408. None: never.
      salt: separates tenants in the prefix store.
      head: what the targets are ids of: the vocabulary, or the classes of a `ClassHead`.
      uses_store: whether the prefix store may be read and written for it.
      num_marked_tokens: leading tokens of the prompts that the caller says will come again, so that their KV is kept;
        beyond the prefix they are those of the first item.
      priority: the lower number goes first.
    """

    prefix: TokenIds
    items: tuple[Item, ...]
    deadline_s: float | None = None
    salt: str = ""
    head: Head = "tokens"
    uses_store: bool = True
    num_marked_tokens: int = 0
    priority: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens as a caller counts them: the prefix once per item."""
        return sum(len(self.prefix) + len(item.token_ids) for item in self.items)

    @property
    def num_tokens(self) -> int:
        """Tokens a pass must hold: the prefix once."""
        return len(self.prefix) + sum(len(item.token_ids) for item in self.items)


@dataclass(frozen=True, eq=False, slots=True)
class ItemScores:
    """What one item's rows say. Natural logarithms over all ids of the head, float32.

    Attributes:
      logprobs: of `Item.targets`, same order.
      top_ids: the most probable id at each row: the next token, or a class.
      top_logprobs: and its log-probability.
    """

    logprobs: Float32[np.ndarray, "R M"]
    top_ids: Int32[np.ndarray, " R"]
    top_logprobs: Float32[np.ndarray, " R"]


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds a request spent waiting, on the device, and from submit to answer."""

    queue_s: float = 0.0
    device_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request.

    Attributes:
      num_cached_tokens: of `num_prompt_tokens`; they were not computed for this item of this request.
      num_kept_tokens: whose KV this request added to the prefix store.
    """

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_kept_tokens: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class ScoreResult:
    """The one answer to a `ScoreRequest`; `items` in the request's order."""

    items: tuple[ItemScores, ...]
    usage: Usage
    timings: Timings = field(default_factory=Timings)


@dataclass(frozen=True, eq=False, slots=True)
class BlockMoves:
    """Blocks of the prefix store and the rows of a layer's KV buffer where they lie: `block_size` rows from `rows[i]`.

    Attributes:
      blocks: numbers in the device pool.
      rows: the first KV row of each.
    """

    blocks: Int32[np.ndarray, " _"]
    rows: Int32[np.ndarray, " _"]


NO_MOVES = BlockMoves(np.zeros(0, np.int32), np.zeros(0, np.int32))


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """What one forward pass runs: token rows, packed without gaps, and the KV rows that they see.

        token rows  | new A | item 0 | item 1 | prompt 2 | padding           |  T (bucket)
        KV rows     | cached blocks of A | new A | item 0 | item 1 | prompt 2   |  S (all buckets share one buffer)

    Each token has a KV row of its own; KV rows of cached blocks have no token row: nothing is computed for them.

    Attributes:
      positions: place of each token in its own prompt; an item goes on after its prefix.
      prefix_lo: with `prefix_hi`, the half-open range of KV rows that hold the row's prefix; empty where there is none.
      self_lo: first KV row of the token's own segment.
      self_pos: its own KV row, strictly ascending; -1 on padding, which therefore sees nothing and is not stored.
      num_tokens: token rows before the padding.
      read_rows: token rows that reach the head, ascending.
      pair_rows: indices into `read_rows`, ascending: with `pair_ids` the (row, token id) pairs that are wanted.
      loads: blocks that are copied into the KV buffer before a layer runs.
      keeps: blocks that are copied out of the KV buffer after a layer ran.
    """

    token_ids: Int32[np.ndarray, " T"]
    positions: Int32[np.ndarray, " T"]
    prefix_lo: Int32[np.ndarray, " T"]
    prefix_hi: Int32[np.ndarray, " T"]
    self_lo: Int32[np.ndarray, " T"]
    self_pos: Int32[np.ndarray, " T"]
    num_tokens: int
    read_rows: Int32[np.ndarray, " R"]
    pair_rows: Int32[np.ndarray, " P"]
    pair_ids: Int32[np.ndarray, " P"]
    loads: BlockMoves = NO_MOVES
    keeps: BlockMoves = NO_MOVES


@dataclass(frozen=True, eq=False, slots=True)
class BatchScores:
    """What a pass gives back, in the order of `Batch.pair_ids` and `Batch.read_rows`. Nats, float32."""

    pair_logprobs: Float32[np.ndarray, " P"]
    top_ids: Int32[np.ndarray, " R"]
    top_logprobs: Float32[np.ndarray, " R"]


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier of the prefix store. Counts of blocks; all but the first three only grow.

    Attributes:
      num_hits: blocks found here when a request was planned.
      num_misses: blocks found neither here nor in a faster tier.
      num_restores: blocks brought from here to the device.
      is_on: False once a fault has switched the tier off.
    """

    num_blocks: int = 0
    num_bytes: int = 0
    max_bytes: int = 0
    num_hits: int = 0
    num_misses: int = 0
    num_insertions: int = 0
    num_evictions: int = 0
    num_restores: int = 0
    restore_s: float = 0.0
    num_errors: int = 0
    is_on: bool = True


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One look at an engine, for metrics and logs. Counts with `num_finished...` only grow."""

    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_running: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_shed: int = 0
    num_batches: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_kept_tokens: int = 0
    num_computed_tokens: int = 0
    num_compiles_after_start: int = 0
    device_busy_s: float = 0.0
    tiers: Mapping[str, TierStats] = field(default_factory=dict)
