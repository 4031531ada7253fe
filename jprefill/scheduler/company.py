"""Who waits with the same prefix. Pure Python and NumPy."""

from collections.abc import Set

import numpy as np

NOBODY = 0  # the number of those who share nothing


class Companies[Member]:
    """Sets of members, each under the key of the last block that its members share.

    Invariant: `sizes[number]` is how many members the company of that number has; `sizes[NOBODY]` is 1.

    Attributes:
      sizes: by number, so that a column of numbers becomes a column of sizes at once.
    """

    def __init__(self) -> None:
        """Nobody is here."""
        self.sizes = np.ones(64, np.int64)
        self._members: dict[bytes, set[Member]] = {}
        self._numbers: dict[bytes, int] = {}
        self._free = list(range(1, len(self.sizes)))

    def __len__(self) -> int:
        """Number of companies."""
        return len(self._members)

    def join(self, key: bytes | None, member: Member) -> int:
        """Adds a member; the number of its company."""
        if key is None:
            return NOBODY
        members = self._members.setdefault(key, set())
        if not members:
            self._numbers[key] = self._new_number()
        members.add(member)
        number = self._numbers[key]
        self.sizes[number] = len(members)
        return number

    def leave(self, key: bytes | None, member: Member) -> None:
        """Takes a member out."""
        if key is None:
            return
        members, number = self._members[key], self._numbers[key]
        members.discard(member)
        self.sizes[number] = len(members)
        if not members:
            del self._members[key], self._numbers[key]
            self._free.append(number)

    def of(self, key: bytes | None) -> Set[Member]:
        """The members under a key."""
        return self._members.get(key, frozenset()) if key is not None else frozenset()

    def _new_number(self) -> int:
        if not self._free:
            num_old = len(self.sizes)
            self.sizes = np.concatenate([self.sizes, np.ones(num_old, np.int64)])
            self._free = list(range(num_old, 2 * num_old))
        return self._free.pop()
