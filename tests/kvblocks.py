"""Small KV blocks for tests: made from a number, checked against it."""

import numpy as np

from jprefill.kvstore.block_file import DTYPES, BlockForm
from jprefill.kvstore.hashing import KeyMaker

BLOCK_SIZE = 8
FINGERPRINT = bytes(range(32))


def form(fingerprint=FINGERPRINT, dtype="bfloat16", num_layers=2, block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=4):
    return BlockForm(fingerprint, (num_layers, 2, block_size, num_kv_heads, head_dim), DTYPES[dtype])


def chain(num_blocks, seed=0, fingerprint=FINGERPRINT, block_size=BLOCK_SIZE, salt=""):
    """Keys of a prompt of so many blocks."""
    token_ids = np.random.default_rng(seed).integers(0, 1000, num_blocks * block_size).astype(np.int32)
    return KeyMaker(fingerprint, block_size).keys(token_ids, salt)


def payload(key, of=None):
    """Any bytes that depend on the key alone."""
    of = of or form()
    raw = np.random.default_rng(list(key)).integers(0, 256, of.payload_bytes, np.uint8)
    return raw.view(of.dtype).reshape(of.shape)


def same(a, b):
    """Bit for bit; random bytes hold NaNs."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


class NoPool:
    """Of 64 blocks without arrays: plans and prices do not look at KV."""

    num_blocks, block_bytes = 64, 1

    def __init__(self, block_size):
        self.block_size = block_size

    def read(self, block_ids):
        raise AssertionError("nothing is evicted here")

    def write(self, block_ids, payloads):
        raise AssertionError("nothing is restored here")

    def reset(self):
        pass
