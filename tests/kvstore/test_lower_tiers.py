"""Host memory and disk as one place: nothing put is lost while there is room, nobody waits who should not."""

import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from kvblocks import chain, form, payload, same

from jprefill.kvstore.disk_tier import DiskTier
from jprefill.kvstore.host_tier import HostTier
from jprefill.kvstore.lower_tiers import LowerTiers

HOST_SIZE, DISK_SIZE = form().payload_bytes, form().file_bytes


class Ready:
    """Payloads of `keys` from block `first` on; `gate` holds them back."""

    def __init__(self, keys, first=0, gate=None, error=None):
        self.payloads = np.stack([payload(key) for key in keys.hashes[first:]])
        self.gate, self.error = gate, error

    def wait(self):
        if self.gate is not None:
            self.gate.wait(10)
        if self.error is not None:
            raise self.error
        return self.payloads


@contextmanager
def tiers(root=None, host=10, disk=20, **options):
    host_tier = HostTier(host * HOST_SIZE) if host else None
    disk_tier = DiskTier(root / "kv", disk * DISK_SIZE, form()) if root else None
    lower = LowerTiers(host_tier, disk_tier, **options)
    try:
        yield lower
    finally:
        lower.close()
        assert not any(thread.is_alive() for thread in lower._threads)


def put(lower, keys, first=0, **how):
    return lower.put(list(zip(keys.hashes[first:], keys.tokens[first:], strict=True)), Ready(keys, first, **how))


def settled(lower):
    """Waits until nothing moves."""
    end = time.monotonic() + 10
    while (lower._moving or lower._num_queued) and time.monotonic() < end:
        time.sleep(0.002)
    return lower


def fetched(lower, keys, first=0, end=None):
    """Number of blocks, each checked bit for bit."""
    found = lower.fetch(keys, first, len(keys) if end is None else end)
    for got, key in zip(found, keys.hashes[first:], strict=False):
        assert same(got, payload(key))
    return len(found)


@pytest.mark.parametrize(("host", "on_disk"), [(10, False), (10, True), (2, True), (0, True)])
def test_what_was_put_is_fetched_wherever_it_went(tmp_path, host, on_disk):
    keys = chain(5)
    with tiers(tmp_path if on_disk else None, host) as lower:
        assert put(lower, keys)
        assert lower.num_found(keys, 0, 5) == 5
        assert fetched(lower, keys) == 5
        assert fetched(settled(lower), keys) == 5
        assert fetched(lower, keys, 2, 4) == 2


def test_a_block_on_its_way_is_found_and_waited_for():
    keys, gate = chain(3), threading.Event()
    with tiers() as lower:
        put(lower, keys, gate=gate)
        assert lower.has(keys.hashes[2])
        threading.Timer(0.05, gate.set).start()
        assert fetched(lower, keys) == 3


def test_blocks_that_the_device_lost_are_misses(caplog):
    keys = chain(3)
    with tiers() as lower:
        put(lower, keys, error=RuntimeError("the device is gone"))
        assert fetched(lower, keys) == 0
        assert lower.num_found(keys, 0, 3) == 0
        put(lower, keys)
        assert fetched(lower, keys) == 3
    assert "3 KV blocks were lost on their way from the device" in caplog.text


def test_a_bug_in_one_job_loses_its_blocks_and_no_thread(caplog):
    keys, other = chain(3), chain(2, seed=1)
    with tiers() as lower:
        put(lower, keys, error=ZeroDivisionError("a bug"))
        assert fetched(lower, keys) == 0
        put(lower, other)
        assert fetched(lower, other) == 2
    assert "a job of the KV writer failed" in caplog.text


def test_fewer_payloads_than_entries_lose_the_rest_only():
    keys = chain(3)
    short = Ready(keys)
    short.payloads = short.payloads[:2]
    with tiers() as lower:
        lower.put(list(zip(keys.hashes, keys.tokens, strict=True)), short)
        assert fetched(lower, keys) == 2


def test_a_full_queue_drops_and_counts_instead_of_waiting():
    one, other, gate = chain(3), chain(2, seed=1), threading.Event()
    with tiers(max_queued_blocks=4) as lower:
        assert put(lower, one, gate=gate)
        assert not put(lower, other)
        assert lower.stats()["host"].num_evictions == 2
        assert not lower.has(other.hashes[0])
        gate.set()
        assert put(settled(lower), other)


def test_a_put_larger_than_the_queue_is_taken_when_nothing_waits():
    keys = chain(5)
    with tiers(max_queued_blocks=2) as lower:
        assert put(lower, keys)
        assert fetched(lower, keys) == 5


def test_without_tiers_nothing_is_taken():
    with tiers(host=0) as lower:
        assert not put(lower, chain(1))
        assert lower.stats() == {}


def test_fetching_stops_at_the_first_missing_block():
    keys = chain(4)
    with tiers() as lower:
        put(lower, replace(keys, hashes=keys.hashes[:2], tokens=keys.tokens[:2]))
        put(lower, keys, first=3)
        assert lower.num_found(keys, 0, 4) == 2
        assert fetched(lower, keys) == 2
        assert fetched(lower, keys, 3) == 1


def test_other_tokens_under_the_same_key_are_a_miss(tmp_path):
    keys = chain(2)
    lies = replace(keys, tokens=keys.tokens + np.int32(1))
    with tiers(tmp_path, host=1) as lower:
        put(lower, keys)
        assert lower.fetch(lies, 0, 2) == []
        assert settled(lower).fetch(lies, 0, 2) == []


def test_a_bad_block_on_disk_ends_the_chain_before_it(tmp_path):
    keys = chain(4)
    with tiers(tmp_path, host=0) as lower:
        put(lower, keys)
        settled(lower)
        path = next((tmp_path / "kv").glob(f"*/*/{keys.hashes[2].hex()}"))
        path.write_bytes(path.read_bytes()[:-4] + b"oops")
        assert fetched(lower, keys) == 2
        assert lower.stats()["disk"].num_errors == 1
        assert lower.num_found(keys, 0, 4) == 2


@pytest.mark.parametrize("host", [10, 0])
def test_a_restart_finds_what_was_flushed(tmp_path, host):
    keys = chain(5)
    with tiers(tmp_path, host) as lower:
        put(lower, keys)
        assert lower.flush(10.0)
    with tiers(tmp_path, host) as lower:
        assert fetched(lower, keys) == 5


def test_a_flush_keeps_the_latest_where_the_disk_is_smaller(tmp_path):
    old, new = chain(3, seed=1), chain(3)
    with tiers(tmp_path, disk=3) as lower:
        put(lower, old)
        put(lower, new)
        assert lower.flush(10.0)
    with tiers(tmp_path, disk=3) as lower:
        assert (fetched(lower, old), fetched(lower, new)) == (0, 3)


def test_draining_makes_room_in_the_queue_again():
    one, other = chain(3), chain(3, seed=1)
    with tiers(max_queued_blocks=3) as lower:
        put(lower, one)
        assert lower.drain(10.0)
        assert put(lower, other)
        assert lower.num_found(other, 0, 3) == 3


def test_a_flush_ends_with_its_time():
    gate = threading.Event()
    with tiers() as lower:
        put(lower, chain(1), gate=gate)
        assert not lower.flush(0.01)
        gate.set()


def test_the_root_of_a_chain_outlives_its_leaves(tmp_path):
    keys, other = chain(4), chain(2, seed=1)
    with tiers(host=4) as lower:
        put(lower, keys)
        put(lower, other)
        assert fetched(lower, other) == 2
        assert fetched(settled(lower), keys) == 2


@pytest.mark.parametrize("host", [10, 0])
def test_prefetched_blocks_wait_in_memory_and_count_for_the_disk(tmp_path, host):
    keys = chain(5)
    with tiers(tmp_path, host) as lower:
        put(lower, keys)
        assert lower.flush(10.0)
    with tiers(tmp_path, host) as lower:
        lower.prefetch(keys, 0, 5)
        settled(lower)
        for path in (tmp_path / "kv").glob("*/*/*"):
            path.unlink()
        assert lower.num_found(keys, 0, 5) == 5
        assert fetched(lower, keys) == 5
        stats = lower.stats()["disk"]
        assert (stats.num_hits, stats.num_restores) == (5, 5)
        assert stats.restore_s > 0


def test_a_prefetch_fills_half_of_host_memory_at_most(tmp_path):
    keys = chain(8)
    with tiers(tmp_path, 8) as lower:
        put(lower, keys)
        assert lower.flush(10.0)
    with tiers(tmp_path, 8) as lower:
        lower.prefetch(keys, 0, 8)
        settled(lower)
        assert lower.stats()["host"].num_blocks == 4


def test_a_fetch_waits_for_a_prefetch_instead_of_reading_twice(tmp_path, monkeypatch):
    keys, reads = chain(4), []
    with tiers(tmp_path, 10) as lower:
        put(lower, keys)
        assert lower.flush(10.0)
    real = DiskTier.get

    def slow(self, key, tokens):
        reads.append(key)
        time.sleep(0.01)
        return real(self, key, tokens)

    monkeypatch.setattr(DiskTier, "get", slow)
    with tiers(tmp_path, 10) as lower:
        lower.prefetch(keys, 0, 4)
        assert fetched(lower, keys) == 4
        assert reads == list(keys.hashes)


def test_hits_and_misses_count_by_tier(tmp_path):
    keys = chain(5)
    with tiers(tmp_path, 2) as lower:
        put(lower, replace(keys, hashes=keys.hashes[:4], tokens=keys.tokens[:4]))
        settled(lower)
        assert lower.num_found(keys, 0, 5, counts=False) == 4
        assert lower.stats()["disk"].num_hits == 0
        assert lower.num_found(keys, 0, 5) == 4
        host, disk = lower.stats()["host"], lower.stats()["disk"]
        assert (host.num_hits, host.num_misses) == (2, 3)
        assert (disk.num_hits, disk.num_misses) == (2, 1)
        fetched(lower, keys)
        assert (lower.stats()["host"].num_restores, lower.stats()["disk"].num_restores) == (2, 2)


def test_after_closing_nothing_is_taken_and_nobody_hangs():
    keys, gate = chain(2), threading.Event()
    with tiers() as lower:
        put(lower, keys, gate=gate)
        threading.Timer(0.05, gate.set).start()
        lower.close()
        assert not put(lower, keys)
        assert not lower.flush(1.0)


def test_many_threads_at_once_see_right_bytes_only(tmp_path):
    chains = [chain(6, seed=seed) for seed in range(6)]
    problems = []
    with tiers(tmp_path, host=9, disk=18) as lower:

        def user(seed):
            rng = np.random.default_rng(seed)
            try:
                for _ in range(40):
                    keys = chains[rng.integers(len(chains))]
                    lower.prefetch(keys, 0, 6)
                    if fetched(lower, keys) < 6:
                        put(lower, keys)
            except AssertionError as error:
                problems.append(error)

        threads = [threading.Thread(target=user, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems
        assert not settled(lower)._moving
        host, disk = lower.stats()["host"], lower.stats()["disk"]
        assert host.num_bytes <= host.max_bytes
        assert disk.num_bytes <= disk.max_bytes
        assert disk.num_bytes == sum(path.stat().st_size for path in (tmp_path / "kv").glob("*/*/*"))
        assert disk.num_errors == 0
