"""What the engine needs of a prefix store. No JAX here.

    keys     of a prompt, by its caller's thread
    arrive   a request was seen: what its prompt shares with others is worth keeping
    lease    pin its cached blocks, bring up what lies in a lower tier, reserve room for blocks worth keeping
    release  after the pass: what was kept may be found from now on; what failed is forgotten

Everything but `keys`, `prefetch` and `stats` belongs to the engine thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jprefill.kvstore.hashing import BlockKeys
from jprefill.kvstore.index import Reservation
from jprefill.types import ScoreRequest, TierStats, TokenIds


@dataclass(eq=False, slots=True)
class Lease:
    """A prompt's blocks while a pass uses them.

    Attributes:
      cached: device blocks 0, 1, ... of the prompt: pinned.
      reservation: room for the blocks that follow, if any are worth keeping.
      num_restored: of the cached blocks, those that a lower tier held until now.
      num_borrowed: leading blocks that another request of the same pass has in its rows; the lease holds none of them.
    """

    keys: BlockKeys
    cached: tuple[int, ...] = ()
    reservation: Reservation | None = None
    num_restored: int = 0
    num_borrowed: int = 0


@runtime_checkable
class Store(Protocol):
    """See the module. `NoStore` is the naive twin.

    Attributes:
      block_size: tokens.
      block_bytes: of KV.
      has_lower_tiers: whether blocks may have to be brought to the device.
    """

    block_size: int
    block_bytes: int
    has_lower_tiers: bool

    def keys(self, request: ScoreRequest) -> BlockKeys:
        """Of the blocks of a request's prompt: of its prefix, and of its item where it has but one. Any thread."""
        ...

    def set_shared_tokens(self, token_ids: TokenIds) -> None:
        """Leading tokens that salts do not separate. Call it before the first request."""
        ...

    def prefetch(self, keys: BlockKeys) -> None:
        """Starts bringing blocks from slow tiers to faster ones; returns at once. Any thread."""
        ...

    def arrive(self, request: ScoreRequest, keys: BlockKeys) -> int:
        """Counts a request that waits from now on.

        Returns:
          How many leading blocks it shares, by its own word or with requests seen before.
        """
        ...

    def num_cached(self, keys: BlockKeys, limit: int) -> int:
        """Leading blocks, at most `limit`, that some tier holds now. Changes nothing."""
        ...

    def num_on_device(self, keys: BlockKeys, limit: int) -> int:
        """Those of them that need no restore."""
        ...

    def changes(self) -> Mapping[bytes, bool] | None:
        """Keys of blocks that came to the device or left it since the last call, and whether they are there now.

        None: anything may have changed.
        """
        ...

    def lease(self, keys: BlockKeys, limit: int) -> Lease:
        """Pins at most `limit` leading blocks on the device, after restoring those that a lower tier holds."""
        ...

    def restore(self, keys: BlockKeys) -> None:
        """Brings blocks from lower tiers to the device, where the next pass will want them."""
        ...

    def shorten(self, lease: Lease, num_blocks: int) -> None:
        """Gives back the cached blocks of a lease from number `num_blocks` on."""
        ...

    def keep(self, lease: Lease, request: ScoreRequest, limit: int) -> None:
        """The lease's blocks are used now. Reserves room for those after them that are worth keeping, below `limit`."""
        ...

    def release(self, lease: Lease, *, is_good: bool) -> None:
        """Ends a lease, once. Only if the pass was good may what it kept be found."""
        ...

    def recover(self) -> None:
        """After a failed pass: forgets what the device has lost."""
        ...

    def stats(self) -> Mapping[str, TierStats]:
        """By tier. Any thread."""
        ...

    def close(self, timeout_s: float) -> None:
        """Moves what is worth it to the disk tier, for at most that long."""
        ...
