"""No prefix store: the naive twin. Every prompt is computed whole."""

from collections.abc import Mapping

import numpy as np

from jprefill.kvstore.contract import Lease
from jprefill.kvstore.hashing import BlockKeys
from jprefill.types import ScoreRequest, TierStats, TokenIds


class NoStore:
    """Holds nothing and finds nothing; see `Store`."""

    block_size = 16
    block_bytes = 0
    has_lower_tiers = False

    def keys(self, request: ScoreRequest) -> BlockKeys:
        """No blocks."""
        del request
        return BlockKeys((), np.zeros((0, self.block_size), np.int32), 0)

    def set_shared_tokens(self, token_ids: TokenIds) -> None:
        """No keys, no salts."""

    def prefetch(self, keys: BlockKeys) -> None:
        """Nothing to bring."""

    def arrive(self, request: ScoreRequest, keys: BlockKeys) -> int:
        """Nothing is shared."""
        del request, keys
        return 0

    def num_cached(self, keys: BlockKeys, limit: int) -> int:
        """None."""
        del keys, limit
        return 0

    def num_on_device(self, keys: BlockKeys, limit: int) -> int:
        """None."""
        del keys, limit
        return 0

    def changes(self) -> Mapping[bytes, bool]:
        """Nothing ever changes."""
        return {}

    def lease(self, keys: BlockKeys, limit: int) -> Lease:
        """An empty lease."""
        del limit
        return Lease(keys)

    def restore(self, keys: BlockKeys) -> None:
        """Nothing to bring."""

    def shorten(self, lease: Lease, num_blocks: int) -> None:
        """Nothing to give back."""

    def keep(self, lease: Lease, request: ScoreRequest, limit: int) -> None:
        """Nothing is kept."""

    def release(self, lease: Lease, *, is_good: bool) -> None:
        """Nothing was held."""

    def recover(self) -> None:
        """Nothing was lost."""

    def stats(self) -> Mapping[str, TierStats]:
        """No tiers."""
        return {}

    def close(self, timeout_s: float) -> None:
        """Nothing to move."""
