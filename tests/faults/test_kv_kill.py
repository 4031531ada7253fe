"""kill -9 while blocks are written: whatever is found afterwards is right, and the next start is a normal one."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kvblocks import chain, payload, same

from jprefill.kvstore.disk_tier import DiskTier

sys.path.insert(0, str(Path(__file__).parent))

from kv_child import CHAIN_BLOCKS, FORM, NUM_CHAINS, NUM_KEPT

CHILD = Path(__file__).with_name("kv_child.py")
CHAINS = [chain(CHAIN_BLOCKS, seed=seed) for seed in range(NUM_CHAINS)]
PAYLOADS = {key: payload(key, FORM) for keys in CHAINS for key in keys.hashes}
STEPS = ["open", "flock", "writev", "replace", "close", "unlink"]


def check(folder):
    """Opens the folder as a start would; every block is right or a miss."""
    start = time.perf_counter()
    tier = DiskTier(folder, NUM_KEPT * FORM.file_bytes, FORM)
    start_s = time.perf_counter() - start
    assert tier.is_on
    assert list(folder.glob("*/*/*.tmp")) == []
    num_found = 0
    for keys in CHAINS:
        for key, tokens in zip(keys.hashes, keys.tokens, strict=True):
            found = tier.get(key, tokens)
            if found is not None:
                assert same(found, PAYLOADS[key])
                num_found += 1
    assert tier.stats().num_bytes <= NUM_KEPT * FORM.file_bytes
    return num_found, tier.stats().num_errors, start_s


@pytest.mark.parametrize("num_kills", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_at_random_moments(tmp_path, num_kills):
    rng = random.Random(4)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    num_found = num_bad = num_temporary = 0
    longest_s = 0.0
    for kill in range(num_kills):
        argv = [sys.executable, str(CHILD), "write", str(tmp_path / "kv"), str(kill)]
        with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0, 0.03))
            child.send_signal(signal.SIGKILL)
        num_temporary += len(list((tmp_path / "kv").glob("*/*/*.tmp")))
        found, bad, start_s = check(tmp_path / "kv")
        num_found, num_bad, longest_s = num_found + found, num_bad + bad, max(longest_s, start_s)
    print(
        f"{num_kills} kills: {num_temporary} left a temporary file, {num_found} blocks right, {num_bad} bad, "
        f"longest start {longest_s:.3f} s"
    )
    assert num_bad == 0, "the rename came before the bytes"


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("moment", ["before", "half", "after"])
def test_killed_at_every_step(tmp_path, step, moment):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    argv = [sys.executable, "-c", _KILLS_ITSELF, str(CHILD.parent), str(tmp_path / "kv"), step, moment]
    assert subprocess.run(argv, env=env, check=False).returncode == -signal.SIGKILL
    num_found, num_bad, _ = check(tmp_path / "kv")
    assert num_bad == 0
    is_done = moment == "after"
    expected = {"replace": 2 + is_done, "unlink": NUM_KEPT - is_done}
    assert num_found == expected.get(step, num_found)


_KILLS_ITSELF = """
import fcntl, os, signal, sys
folder, root, step, moment = sys.argv[1:]
sys.path.insert(0, folder)
import kv_child

module = fcntl if step == "flock" else os
real, calls = getattr(module, step), []

def kills(*args, **options):
    ours = step != "open" or str(args[0]).endswith(".tmp")
    ours = ours and (step != "close" or len(calls) > 3)
    calls.append(ours)
    if sum(calls) < (3 if step != "unlink" else 1) or not ours:
        return real(*args, **options)
    if moment == "half" and step == "writev":
        real(args[0], [memoryview(args[1][-1])[:5000]])
    if moment == "after":
        real(*args, **options)
    os.kill(os.getpid(), signal.SIGKILL)

setattr(module, step, kills)
kv_child.write(root, 0)
"""
