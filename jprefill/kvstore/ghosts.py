"""`Ghosts`: keys of blocks that were seen lately, without their KV. No JAX."""

from bisect import bisect_left
from collections import OrderedDict

from jprefill.kvstore.hashing import BlockKeys


class Ghosts:
    """A bounded set of keys, the oldest out first. Only the engine thread may call it.

    Invariant: a chain fades from its end. Whoever adds a block adds the blocks before it after it, so they leave after
    it too; a block is never here without its parents, and bisection finds the end of a chain.
    """

    def __init__(self, max_keys: int):
        self._max_keys = max_keys
        # A plain dict would walk over the holes of everything deleted before to find its oldest key.
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def seen_before(self, keys: BlockKeys) -> int:
        """Number of leading blocks that were added before and are not forgotten yet."""
        return bisect_left(keys.hashes, True, key=lambda key: key not in self._keys)

    def add(self, keys: BlockKeys) -> None:
        """Remembers the blocks of a prompt; of one longer than the set, its front."""
        for key in reversed(keys.hashes[: self._max_keys]):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)
