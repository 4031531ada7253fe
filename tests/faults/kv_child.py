"""Uses a disk tier in a process of its own, which the parent then kills, starves or locks out.

kv_child.py write FOLDER SEED     puts blocks until it is killed; says "ready" once it writes
kv_child.py put FOLDER            puts a few blocks; prints what became of it as JSON
"""

import json
import logging
import os
import resource
import sys
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvblocks import chain, form, payload

from jprefill.kvstore.disk_tier import DiskTier

FORM = form(num_layers=16, num_kv_heads=4, head_dim=64)  # 128 KiB: a write takes long enough to be hit
NUM_CHAINS, CHAIN_BLOCKS, NUM_KEPT = 10, 8, 30


def main(what: str, folder: str, *rest: str) -> None:
    if what == "write":
        write(folder, int(rest[0]))
    else:
        put(folder, *rest)


def write(folder: str, seed: int) -> None:
    tier = DiskTier(folder, NUM_KEPT * FORM.file_bytes, FORM)
    for number in count(seed):
        keys = chain(CHAIN_BLOCKS, seed=number % NUM_CHAINS)
        for key, tokens in zip(keys.hashes, keys.tokens, strict=True):
            tier.put(key, tokens, payload(key, FORM))
        if number == seed:
            print("ready", flush=True)


def put(folder: str, limit: str = "") -> None:
    keys = chain(4 if limit else 20)
    payloads = [payload(key, FORM) for key in keys.hashes]  # NumPy loads parts late, which nobody may not read
    if limit == "file-size":
        resource.setrlimit(resource.RLIMIT_FSIZE, (FORM.file_bytes // 2, FORM.file_bytes // 2))
    if limit == "nobody":
        os.seteuid(65534)
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("jprefill.kvstore").addHandler(handler)
    tier = DiskTier(folder, 100 * FORM.file_bytes, FORM)
    done = [tier.put(*block) for block in zip(keys.hashes, keys.tokens, payloads, strict=True)]
    temporary = [path.name for path in Path(folder).glob("*/*/*.tmp")]
    record = {"done": done, "is_on": tier.is_on, "num_errors": tier.stats().num_errors}
    print(json.dumps(record | {"warnings": warnings, "temporary": temporary}))


if __name__ == "__main__":
    main(*sys.argv[1:])
