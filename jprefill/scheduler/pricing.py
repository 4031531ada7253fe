"""`PriceBook`: what every waiting request costs now, and in which order they go. Pure Python and NumPy.

A request's price depends on the store by one number, how many of its leading blocks are cached, and that number can
change only with one of two blocks:

    blocks of a prompt | cached | cached | last | next | not cached | not cached |
                                            |      └ committed: there may be more
                                            └ evicted: there are fewer (leaves are evicted first)

So the book watches two keys per request and asks the store which keys changed since the last pass. Everything else is
arithmetic over columns: prices follow the job completion model as it learns, and scores follow the clock.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from jprefill.kvstore.hashing import BlockKeys
from jprefill.scheduler.company import Companies
from jprefill.scheduler.features import Amounts, ChunkWalk, Features, Load, load_of
from jprefill.scheduler.jct import JctModel
from jprefill.scheduler.pieces import num_cacheable_blocks
from jprefill.scheduler.policy import Keys, Rule, Waiting, smallest_first
from jprefill.scheduler.queue import PendingRequest

_NO_ENTRIES: set["_Entry"] = set()

_COLUMNS = {
    "number": np.int64,  # of arrival
    "submitted_s": np.float64,
    "due_s": np.float64,
    "priority": np.int64,
    "deadline_s": np.float64,
    "num_front_tokens": np.int64,
    "num_item_tokens": np.int64,
    "item_area": np.float64,
    "num_device_blocks": np.int64,
    "num_lower_blocks": np.int64,  # after them, in lower tiers
    "num_shared_tokens": np.int64,  # that others have too and the store may hold
    "company": np.int64,  # the number of those others
    "num_chunks": np.float64,
    "attention_area": np.float64,
    "own_chunks": np.float64,  # if all that others have too were cached
    "own_area": np.float64,
    "whole_chunks": np.float64,  # if nothing were
    "whole_area": np.float64,
    "arrival_jct_s": np.float64,
}

_NOW, _OWN, _WHOLE = ("num_chunks", "attention_area"), ("own_chunks", "own_area"), ("whole_chunks", "whole_area")


@dataclass(eq=False, slots=True)
class _Entry:
    """A waiting request: where it stands in the columns, and its leading blocks.

    Attributes:
      limit: blocks that may come from the store.
      num_device: of them, those on the device.
    """

    pending: PendingRequest
    slot: int
    limit: int
    num_device: int = 0


@runtime_checkable
class PriceSource(Protocol):
    """What the book needs of a store."""

    block_size: int

    def num_cached(self, keys: BlockKeys, limit: int) -> int:
        """Leading blocks, at most `limit`, that some tier holds now."""
        ...

    def num_on_device(self, keys: BlockKeys, limit: int) -> int:
        """Those of them that the device holds."""
        ...

    def changes(self) -> Mapping[bytes, bool] | None:
        """Keys of blocks that came to the device or left it since the last call, and whether they are there now.

        None: anything may have changed.
        """
        ...


class PriceBook:
    """The waiting requests with their prices. Only the engine thread uses it.

    Invariant: after `reprice`, each request's count of device blocks is what the store would say.

    Attributes:
      num_repriced: requests that the last `reprice` looked at.
      total_jct_s: of all that wait, each alone, at the last decision; any thread may read it.

    Args:
      block_bytes: of KV, for the price of what lies in lower tiers.
      num_refreshed: requests that are looked up again at each decision, in turns: lower tiers do not tell of changes.
        0: there are no lower tiers.
    """

    def __init__(
        self,
        store: PriceSource,
        model: JctModel,
        walk: ChunkWalk,
        rule: Rule,
        *,
        block_bytes: int = 0,
        num_refreshed: int = 0,
    ):
        self.model = model
        self._store, self._walk, self._rule = store, walk, rule
        self._block_bytes, self._num_refreshed = block_bytes, num_refreshed
        self._columns: dict[str, np.ndarray] = {name: np.zeros(64, kind) for name, kind in _COLUMNS.items()}
        self._entries: list[_Entry] = []  # by slot; dense: the last one fills a gap
        self._by_pending: dict[PendingRequest, _Entry] = {}
        self._watched: dict[bytes, set[_Entry]] = {}
        self._companies = Companies[_Entry]()
        self._num_priced = 0  # entries from here on are new
        self._num_arrived = self._next_refresh = 0
        self.total_jct_s = 0.0
        self.num_repriced = 0

    def __len__(self) -> int:
        """Number of waiting requests."""
        return len(self._entries)

    # ---- who waits ------------------------------------------------------------------------------------------------

    def __contains__(self, pending: PendingRequest) -> bool:
        """Whether a request waits here."""
        return pending in self._by_pending

    def add(self, pending: PendingRequest) -> None:
        """A request waits from now on, or again: then its items that are done cost nothing more.

        It is priced with all others that came by the next `reprice`: one by one would cost ten times as much.
        """
        slot, columns = len(self._entries), self._columns
        if slot == len(columns["number"]):
            self._columns = columns = {name: np.concatenate([column, column]) for name, column in columns.items()}
        entry = _Entry(pending, slot, self._limit(pending))
        self._entries.append(entry)
        self._by_pending[pending] = entry
        self._num_arrived += 1
        request, priority = pending.request, pending.request.priority
        columns["number"][slot] = self._num_arrived
        columns["submitted_s"][slot] = pending.submitted_s
        columns["due_s"][slot] = self._rule.due_s(pending.submitted_s, priority)
        columns["priority"][slot] = priority
        columns["deadline_s"][slot] = np.inf if request.deadline_s is None else request.deadline_s
        columns["num_lower_blocks"][slot] = 0
        columns["num_shared_tokens"][slot] = min(pending.num_shared_blocks, entry.limit) * self._store.block_size
        columns["company"][slot] = self._companies.join(pending.group, entry)
        for name, value in zip(Load._fields, load_of(request, pending.next_item), strict=True):
            columns[name][slot] = value

    def remove(self, chosen: Iterable[PendingRequest]) -> None:
        """Requests wait no more."""
        self.reprice()  # so that the new ones, which stand last, are new no more
        for pending in chosen:
            entry = self._by_pending.pop(pending)
            self._unwatch(entry)
            self._companies.leave(pending.group, entry)
            last = self._entries.pop()
            if last is not entry:
                for column in self._columns.values():
                    column[entry.slot] = column[last.slot]
                last.slot = entry.slot
                self._entries[last.slot] = last
        self._num_priced = len(self._entries)

    def late(self, now_s: float) -> list[PendingRequest]:
        """Requests whose deadline has passed."""
        slots = np.flatnonzero(self._columns["deadline_s"][: len(self._entries)] < now_s)
        return [self._entries[slot].pending for slot in slots.tolist()]

    # ---- what it costs --------------------------------------------------------------------------------------------

    def reprice(self) -> int:
        """Brings prices up to what the store holds now; returns how many requests were looked at."""
        changes = self._store.changes()
        if changes is None:
            moved = self._entries[: self._num_priced]
            for entry in moved:
                self._look_up(entry)
        else:
            watched = self._watched
            moved = list({entry for key in changes if key in watched for entry in watched[key]})
            for entry in moved:
                self._follow(entry, changes)
        new = self._entries[self._num_priced :]
        for entry in new:
            self._look_up(entry)
        self._num_priced = len(self._entries)
        self._appraise(moved + new)
        if new:
            arrived = slice(new[0].slot, len(self._entries))
            self._columns["arrival_jct_s"][arrived] = self._jct_s(arrived)
        self.num_repriced = len(moved) + len(new)
        return self.num_repriced

    def features(self, pending: PendingRequest) -> Features:
        """What a waiting request costs if it runs alone, as of the last `reprice`."""
        slot, columns = self._by_pending[pending].slot, self._columns
        num_bytes = float(columns["num_lower_blocks"][slot] * self._block_bytes)
        return Features(float(columns["num_chunks"][slot]), float(columns["attention_area"][slot]), num_bytes)

    def _limit(self, pending: PendingRequest) -> int:
        if pending.must_run_alone:
            return 0
        return min(len(pending.keys), num_cacheable_blocks(pending, self._store.block_size, 1))

    def _look_up(self, entry: _Entry) -> None:
        """Asks the store how much of a request is cached, and watches the blocks where that may change."""
        keys, limit = entry.pending.keys, entry.limit
        self._unwatch(entry)
        entry.num_device = self._store.num_on_device(keys, limit) if limit else 0
        self._watch(entry)
        self._columns["num_device_blocks"][entry.slot] = entry.num_device
        if self._num_refreshed:
            num_cached = self._store.num_cached(keys, limit) if entry.num_device < limit else limit
            self._columns["num_lower_blocks"][entry.slot] = num_cached - entry.num_device

    def _follow(self, entry: _Entry, changes: Mapping[bytes, bool]) -> None:
        """Applies changes to the count of device blocks; what is cached is always a front part of the prompt."""
        hashes, limit, old = entry.pending.keys.hashes, entry.limit, entry.num_device
        if old and changes.get(hashes[old - 1]) is False:
            new = bisect_left(range(old), True, key=lambda i: changes.get(hashes[i]) is False)
        elif old < limit and changes.get(hashes[old]):
            new = bisect_left(range(limit), True, lo=old, key=lambda i: not changes.get(hashes[i]))
        else:
            return
        self._unwatch(entry)
        entry.num_device = new
        self._watch(entry)
        self._columns["num_device_blocks"][entry.slot] = new
        if self._num_refreshed:  # what leaves the device goes down, what comes was below: until it is looked up again
            num_lower = self._columns["num_lower_blocks"]
            num_lower[entry.slot] = max(0, old + num_lower[entry.slot] - new)

    def _watch(self, entry: _Entry) -> None:
        for key in _edges(entry):
            members = self._watched.get(key)
            if members is None:
                self._watched[key] = {entry}
            else:
                members.add(entry)

    def _unwatch(self, entry: _Entry) -> None:
        for key in _edges(entry):
            members = self._watched.get(key, _NO_ENTRIES)
            if len(members) > 1:
                members.discard(entry)
            elif entry in members:
                del self._watched[key]

    def _appraise(self, entries: Sequence[_Entry]) -> None:
        """Computes what the work that is left is made of."""
        if not entries:
            return
        chosen = np.fromiter((entry.slot for entry in entries), np.int64, len(entries))
        load = Load._make(self._columns[name][chosen] for name in Load._fields)
        num_cached = self._num_cached_tokens(chosen)
        num_shared = np.maximum(num_cached, self._columns["num_shared_tokens"][chosen])
        for work, num_there in ((_NOW, num_cached), (_OWN, num_shared), (_WHOLE, np.zeros_like(num_cached))):
            for name, values in zip(work, self._walk.features(load, num_there), strict=True):
                self._columns[name][chosen] = values

    def _num_cached_tokens(self, chosen: "np.ndarray | slice") -> np.ndarray:
        columns = self._columns
        return (columns["num_device_blocks"][chosen] + columns["num_lower_blocks"][chosen]) * self._store.block_size

    def _jct_s(self, chosen: slice) -> Amounts:
        return self._predict(_NOW, chosen, self._columns["num_lower_blocks"][chosen] * np.float64(self._block_bytes))

    def _shared_jct_s(self, jct_s: Amounts, chosen: slice) -> Amounts:
        """Where several wait for one prefix, each pays its share of it."""
        own_s = self._predict(_OWN, chosen, np.zeros_like(jct_s))
        return own_s + (jct_s - own_s) / self._companies.sizes[self._columns["company"][chosen]]

    def _saved_s(self, jct_s: Amounts, chosen: slice) -> Amounts:
        """What the store saves now."""
        return np.maximum(0.0, self._predict(_WHOLE, chosen, np.zeros_like(jct_s)) - jct_s)

    def _predict(self, work: tuple[str, str], chosen: slice, restore_bytes: Amounts) -> Amounts:
        num_chunks, area = (self._columns[name][chosen] for name in work)
        return self.model.predict_all(num_chunks, area, restore_bytes)

    # ---- who goes first -------------------------------------------------------------------------------------------

    def num_new_tokens(self, pending: PendingRequest) -> int:
        """Of a waiting request, those that no tier holds."""
        slot, columns = self._by_pending[pending].slot, self._columns
        one = slice(slot, slot + 1)
        return int(
            (columns["num_front_tokens"][one] + columns["num_item_tokens"][one] - self._num_cached_tokens(one))[0]
        )

    def order(self, now_s: float, at_most_s: float = np.inf) -> Iterator[PendingRequest]:
        """The waiting requests as the next pass should take them; nothing may be added or removed meanwhile.

        Requests with one prefix come together, where the first of them stands: it is there once for all. Whoever is
        first stays first. Sorted only as far as it is asked for: a decision looks at ten thousand requests and takes a
        handful.

        Args:
          at_most_s: requests that take longer are left out.
        """
        self.reprice()
        self._refresh()
        every, columns = slice(len(self._entries)), self._columns
        num_cached = self._num_cached_tokens(every)
        jct_s, due_s = self._jct_s(every), columns["due_s"][every]
        self.total_jct_s = float(jct_s.sum())
        waiting = Waiting(
            waited_s=now_s - columns["submitted_s"][every],
            jct_s=jct_s,
            shared_jct_s=self._shared_jct_s(jct_s, every),
            saved_s=self._saved_s(jct_s, every),
            arrival_jct_s=columns["arrival_jct_s"][every],
            num_cached_tokens=num_cached,
            num_new_tokens=columns["num_front_tokens"][every] + columns["num_item_tokens"][every] - num_cached,
        )
        keys = (
            np.where(due_s <= now_s, due_s, np.inf),
            columns["priority"],
            self._rule.scores(waiting),
            columns["deadline_s"],
            columns["number"],
        )
        come: set[int] = set()
        chosen = jct_s <= at_most_s
        for slot in smallest_first(np.flatnonzero(chosen), keys):
            if slot not in come:
                for one in (slot, *self._companions(slot, keys, chosen)):
                    come.add(one)
                    yield self._entries[one].pending

    def _companions(self, slot: int, keys: Sequence[Keys], chosen: np.ndarray) -> Iterator[int]:
        """The other chosen ones that have the prefix of this one, in order."""
        members = self._companies.of(self._entries[slot].pending.group) if self._rule.brings_together else _NO_ENTRIES
        others = np.array([entry.slot for entry in members if entry.slot != slot and chosen[entry.slot]], np.int64)
        return smallest_first(others, keys)

    def _refresh(self) -> None:
        """Looks a few requests up again, the next ones each time."""
        num_waiting = len(self._entries)
        slots = [(self._next_refresh + i) % num_waiting for i in range(min(self._num_refreshed, num_waiting))]
        chosen = [self._entries[slot] for slot in slots]
        for entry in chosen:
            self._look_up(entry)
        self._appraise(chosen)
        self._next_refresh = (slots[-1] + 1) % num_waiting if slots else 0


def _edges(entry: _Entry) -> tuple[bytes, ...]:
    """Keys of the last block that the device holds and of the next one."""
    first, end = entry.num_device - 1, entry.num_device + 1
    return entry.pending.keys.hashes[first if first > 0 else 0 : end if end < entry.limit else entry.limit]
