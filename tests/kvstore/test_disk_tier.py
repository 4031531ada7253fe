"""The disk tier survives restarts, keeps its limit, and refuses folders that it cannot trust."""

import os
import stat
import time

import numpy as np
import pytest
from kvblocks import FINGERPRINT, chain, form, payload, same

from jprefill.errors import ConfigError
from jprefill.kvstore.block_file import block_path
from jprefill.kvstore.disk_tier import NAME_FILE, DiskTier

SIZE = form().file_bytes
KEYS = chain(6)
OTHER = bytes(32)


def opened(root, room=10, fingerprint=FINGERPRINT, **options):
    return DiskTier(root / "kv", room * SIZE, form(fingerprint), **options)


def put(tier, *numbers):
    for i in numbers:
        assert tier.put(KEYS.hashes[i], KEYS.tokens[i], payload(KEYS.hashes[i]))


def held(tier):
    return [i for i in range(len(KEYS)) if tier.has(KEYS.hashes[i])]


def get(tier, i):
    return tier.get(KEYS.hashes[i], KEYS.tokens[i])


def files(root):
    return [path for path in (root / "kv").glob("*/*/*") if path.is_file()]


def test_a_block_is_found_again_after_a_restart(tmp_path):
    put(opened(tmp_path), 0, 1)
    again = opened(tmp_path)
    assert held(again) == [0, 1]
    assert same(get(again, 1), payload(KEYS.hashes[1]))
    assert again.stats().num_bytes == 2 * SIZE == sum(path.stat().st_size for path in files(tmp_path))


def test_the_folder_is_made_for_its_owner_only(tmp_path):
    opened(tmp_path / "deep" / "er")
    assert stat.S_IMODE((tmp_path / "deep" / "er" / "kv").stat().st_mode) == 0o700


def test_a_folder_that_everybody_may_write_to_is_refused(tmp_path):
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o777)
    with pytest.raises(ConfigError, match=r"kv_disk_path='.*/kv': mode 0777 lets everybody write"):
        opened(tmp_path)


@pytest.mark.parametrize("below", ["", "/deeper"])
def test_a_file_in_the_folders_place_is_refused(tmp_path, below):
    (tmp_path / "kv").write_text("mine")
    with pytest.raises(ConfigError, match=r"kv_disk_path='.*': is a file"):
        DiskTier(f"{tmp_path}/kv{below}", SIZE, form())


def test_the_block_unused_for_longest_goes_first(tmp_path):
    tier = opened(tmp_path, room=3)
    put(tier, 0, 1, 2)
    get(tier, 0)
    put(tier, 3)
    assert held(tier) == [0, 2, 3]
    assert len(files(tmp_path)) == 3
    assert tier.stats().num_evictions == 1


def test_the_order_of_use_survives_a_restart(tmp_path):
    tier = opened(tmp_path)
    put(tier, 0, 1, 2)
    get(tier, 0)
    tier.put(KEYS.hashes[3], KEYS.tokens[3], payload(KEYS.hashes[3]), used_ns=1)
    again = opened(tmp_path, room=5)
    put(again, 4, 5)
    assert held(again) == [0, 1, 2, 4, 5]
    assert [held(opened(tmp_path, room=room)) for room in (4, 3, 2)] == [[0, 2, 4, 5], [0, 4, 5], [4, 5]]


def test_the_limit_holds_over_all_models(tmp_path):
    other = opened(tmp_path, fingerprint=OTHER)
    put(other, 0, 1, 2)
    tier = opened(tmp_path, room=4)
    assert held(tier) == []
    put(tier, 0, 1, 2)
    assert len(files(tmp_path)) == 4
    assert held(opened(tmp_path, fingerprint=OTHER)) == [2]
    assert get(tier, 0) is not None


def test_another_model_of_the_same_folder_is_a_miss(tmp_path):
    put(opened(tmp_path, fingerprint=OTHER), 0)
    tier = opened(tmp_path)
    assert get(tier, 0) is None
    assert tier.stats().num_errors == 0


def test_a_copied_folder_of_another_model_is_a_miss_and_is_deleted(tmp_path):
    put(opened(tmp_path, fingerprint=OTHER), 0)
    (tmp_path / "kv" / OTHER.hex()).rename(tmp_path / "kv" / FINGERPRINT.hex())
    tier = opened(tmp_path)
    assert held(tier) == [0]
    assert get(tier, 0) is None
    assert tier.is_on
    assert files(tmp_path) == []


def test_a_bad_block_is_deleted_counted_and_can_be_put_again(tmp_path):
    tier = opened(tmp_path)
    put(tier, 0, 1)
    path = block_path(tier.path, FINGERPRINT, KEYS.hashes[0])
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert get(tier, 0) is None
    assert not path.exists()
    assert (tier.stats().num_errors, tier.stats().num_blocks, tier.is_on) == (1, 1, True)
    put(tier, 0)
    assert same(get(tier, 0), payload(KEYS.hashes[0]))


def test_a_block_that_another_process_evicted_is_a_miss_without_an_error(tmp_path):
    tier = opened(tmp_path)
    put(tier, 0)
    files(tmp_path)[0].unlink()
    assert get(tier, 0) is None
    assert held(tier) == []
    assert tier.stats().num_errors == 0


def test_other_tokens_under_the_key_are_a_miss(tmp_path):
    tier = opened(tmp_path)
    put(tier, 0)
    assert tier.get(KEYS.hashes[0], KEYS.tokens[1]) is None


def test_a_block_larger_than_the_limit_is_not_written(tmp_path):
    tier = DiskTier(tmp_path / "kv", SIZE - 1, form())
    assert not tier.put(KEYS.hashes[0], KEYS.tokens[0], payload(KEYS.hashes[0]))
    assert files(tmp_path) == []


def test_a_folder_that_is_removed_while_running_is_made_again(tmp_path):
    tier = opened(tmp_path)
    put(tier, 0)
    for path in [*files(tmp_path), *sorted((tmp_path / "kv").glob("**/*"), reverse=True), tmp_path / "kv"]:
        if path.exists():
            path.unlink() if path.is_file() else path.rmdir()
    assert get(tier, 0) is None
    put(tier, 0, 1)
    assert held(tier) == [0, 1]


def test_the_models_name_stands_beside_its_blocks(tmp_path):
    put(opened(tmp_path, model_name="smollm2"), 0)
    assert (tmp_path / "kv" / FINGERPRINT.hex() / NAME_FILE).read_text() == "smollm2\n"


def test_what_the_time_limit_left_is_found_later_and_nothing_is_deleted(tmp_path):
    put(opened(tmp_path), *range(6))
    tier = opened(tmp_path, scan_s=0.0)
    assert held(tier) == []
    while not tier.scan_more(0.001):
        pass
    assert held(tier) == list(range(6))
    assert tier.stats().num_bytes == 6 * SIZE


def test_a_block_that_was_put_before_the_scan_reached_it_counts_once(tmp_path):
    put(opened(tmp_path), *range(3))
    tier = opened(tmp_path, scan_s=0.0)
    put(tier, 1, 4)
    tier.scan_more(10.0)
    assert held(tier) == [0, 1, 2, 4]
    assert tier.stats().num_bytes == 4 * SIZE


def test_ten_thousand_files_are_found_at_once(tmp_path):
    root = tmp_path / "kv" / FINGERPRINT.hex()
    for i in range(10_000):
        key = np.uint64(i * 0x9E3779B97F4A7C15 & (2**64 - 1)).tobytes() * 4
        folder = root / f"{key[0]:02x}"
        if not folder.exists():
            folder.mkdir(parents=True, mode=0o700)
        os.close(os.open(folder / key.hex(), os.O_CREAT | os.O_WRONLY))
    (tmp_path / "kv").chmod(0o700)
    start = time.perf_counter()
    tier = opened(tmp_path, scan_s=30.0)
    print(f"10,000 files: {time.perf_counter() - start:.3f} s")
    assert tier.stats().num_blocks == 10_000
