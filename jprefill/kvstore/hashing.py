"""Keys of prefix blocks: a chain of SHA-256 digests. No JAX.

    root  = H(tag, block size, fingerprint)
    key_i = H(key_{i-1}, tokens of block i)

A key covers everything that the KV of its block depends on: the model, and every token before and in the block.
A salt enters the chain once, before the first block that is not wholly inside the shared prompt:

    tokens | shared prompt      | a user's text ...        |
    blocks |  0  |  1  |  2  |  3  |  4  |  5  | (part of a block: no key)
    chain  | root ----------> | salt -----------> |

So tenants share the blocks of the shared prompt and cannot even ask for one another's other blocks.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from jprefill.types import TokenIds

KEY_BYTES = hashlib.sha256().digest_size
_ROOT_TAG = b"jprefill block keys 1\0"
_SALT_TAG = b"jprefill salt 1\0"
_NO_TOKENS = np.zeros(0, np.int32)


@dataclass(frozen=True, eq=False, slots=True)
class BlockKeys:
    """The whole blocks at the front of one prompt. Never changed; any thread may read it.

    Attributes:
      hashes: one 32-byte key per block.
      tokens: the same blocks, to be compared on a hit.
      num_shared: leading blocks whose keys are the same for every salt.
    """

    hashes: tuple[bytes, ...]
    tokens: Int32[np.ndarray, "num_blocks block_size"]
    num_shared: int = 0

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.hashes)

    def head(self, num_blocks: int) -> "BlockKeys":
        """The leading blocks alone."""
        return BlockKeys(self.hashes[:num_blocks], self.tokens[:num_blocks], min(self.num_shared, num_blocks))


class KeyMaker:
    """Makes the keys of one engine. Immutable: any thread may call it.

    Args:
      fingerprint: everything but tokens that KV depends on: weights, dtype, rope, layout, format.
      block_size: tokens per block; part of the root, so stores with another size never mix.
      shared_token_ids: leading tokens that salts do not separate.
    """

    def __init__(self, fingerprint: bytes, block_size: int, shared_token_ids: TokenIds = _NO_TOKENS):
        self.block_size = block_size
        self._root = hashlib.sha256(_ROOT_TAG + block_size.to_bytes(4, "little") + fingerprint).digest()
        self._shared = shared_token_ids.copy()

    def keys(self, token_ids: TokenIds, salt: str = "", num_tokens: int | None = None) -> BlockKeys:
        """Keys of the whole blocks of a prompt; a last part of a block has none.

        Args:
          token_ids: the prompt; copied.
          salt: "" is the common partition. A lone surrogate is a character like any other.
          num_tokens: leading tokens to look at; None: all.
        """
        num_blocks = len(token_ids[:num_tokens]) // self.block_size
        tokens = token_ids[: num_blocks * self.block_size].reshape(num_blocks, self.block_size).copy()
        tokens.flags.writeable = False
        num_shared = self._num_shared_blocks(token_ids[: tokens.size])
        data = tokens.astype("<i4", copy=False).tobytes()
        cut = num_shared * self.block_size * 4
        hashes = _chain(self._root, data[:cut], self.block_size)
        hashes += _chain(_salted(hashes[-1] if hashes else self._root, salt), data[cut:], self.block_size)
        return BlockKeys(tuple(hashes), tokens, num_shared)

    def _num_shared_blocks(self, token_ids: TokenIds) -> int:
        num_compared = min(len(token_ids), len(self._shared))
        differs = token_ids[:num_compared] != self._shared[:num_compared]
        num_equal = int(differs.argmax()) if differs.any() else num_compared
        return num_equal // self.block_size


def _salted(parent: bytes, salt: str) -> bytes:
    """The parent key as a tenant's first block sees it. The tag keeps it apart from the key of any block."""
    if not salt:
        return parent
    return hashlib.sha256(_SALT_TAG + parent + hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest()).digest()


def _chain(parent: bytes, data: bytes, block_size: int) -> list[bytes]:
    """Keys of consecutive blocks. `data` is their little-endian int32 tokens.

    One hash object and one concatenation per block is the fastest of the ways tried: a 60,000-token prompt has 3,750.
    """
    sha256, num_bytes = hashlib.sha256, 4 * block_size
    hashes = []
    for start in range(0, len(data), num_bytes):
        parent = sha256(parent + data[start : start + num_bytes]).digest()
        hashes.append(parent)
    return hashes
