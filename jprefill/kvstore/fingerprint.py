"""`fingerprint`: 32 bytes over everything but tokens and salt that stored KV depends on.

Two stores with one fingerprint may exchange blocks; whatever would make their KV differ must change it.

Each weight is read once, where it lies, and gives a digest; SHA-256 takes the digests, names and settings. In host
memory the digest is xxh3-128. On an accelerator, whose memory is fast and far away, it is 64 bits: the bits of each
element are mixed with its place by a function that is one-to-one in the bits, and the results are summed modulo 2^32,
with two mixings. One changed element therefore changes both sums for certain; any other change goes unseen by chance
only, once in 2^64.

That is protection against accidents: another checkpoint, another revision, a fine-tune, a fault of the disk. It is none
against somebody who chooses the weights, nor need it be: whoever can do that decides the scores anyway. What a tenant
chooses, tokens and salt, goes through SHA-256 only.
"""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax import lax
from jaxtyping import UInt32

from jprefill.config import EngineConfig
from jprefill.kvstore.block_file import FORMAT_VERSION
from jprefill.model.config import ModelConfig

LAYOUT_VERSION = 1
"""Raise it when the same weights and tokens give other KV, or the same KV in another order."""

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
_SEEDS = (0x9E3779B9, 0x7FEB352D)


def fingerprint(config: ModelConfig, weights: Mapping[str, jax.Array], settings: EngineConfig) -> bytes:
    """Identity of the KV that a model makes, 32 bytes.

    On an accelerator one small program per shape and dtype of the weights is compiled, and they stay where they are.
    A model has another fingerprint on a CPU than on accelerators, which share theirs.

    Args:
      config: rope included.
      weights: by name; as they run, so dtype and quantisation show.
      settings: dtype and block size count. With `batch_invariant` so does what the bits depend on beyond the numbers:
        kernels, chunks, the kind of device, the version of JAX. A restored block has then the bits it would be
        computed with; without, an H100 takes blocks from an L4.
    """
    facts = {
        "format": [FORMAT_VERSION, LAYOUT_VERSION],
        "model": asdict(config),
        "dtype": settings.dtype,
        "block_size": settings.block_size,
        "weights": [[name, weights[name].shape, weights[name].dtype.name] for name in sorted(weights)],
        "bits": _bits(settings) if settings.batch_invariant else None,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    leaves = [weights[name] for name in sorted(weights)]
    if all(device.platform == "cpu" for leaf in leaves for device in leaf.devices()):
        with ThreadPoolExecutor(4) as pool:
            digests = list(pool.map(_digest_bytes, leaves))
    else:
        sums = [digest_bits(leaf) for leaf in leaves]  # all are started before the first is awaited
        digests = [np.asarray(words, "<u4").tobytes() for words in jax.device_get(sums)]
    for one in digests:
        digest.update(one)
    return digest.digest()


def _digest_bytes(leaf: jax.Array) -> bytes:
    return xxhash.xxh3_128_digest(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8))


@jax.jit
def digest_bits(leaf: jax.Array) -> UInt32[jax.Array, "2"]:
    """Two sums over the mixed bits of an array, read once. Compiles once per shape and dtype.

    The same on every device and however the array is cut over devices: sums of integers know no order.
    """
    bits = lax.bitcast_convert_type(leaf, _UNSIGNED[leaf.dtype.itemsize]).astype(jnp.uint32)
    place = _places(leaf.shape)
    return jnp.stack([jnp.sum(_mix(bits, place, np.uint32(seed)), dtype=jnp.uint32) for seed in _SEEDS])


def _places(shape: tuple[int, ...]) -> jax.Array:
    """0, 1, 2, ... in row-major order, modulo 2^32; computed on the fly, never stored."""
    place = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        step = np.uint32(stride % 2**32)
        place = place + lax.broadcasted_iota(jnp.uint32, shape, axis) * step
        stride *= shape[axis]
    return place


def _mix(bits: jax.Array, place: jax.Array, seed: np.uint32) -> jax.Array:
    """One-to-one in `bits` for any place: xor, odd factors and shifts can be undone one by one.

    Source: the finaliser of MurmurHash3, over the sum of bits and scaled place.
    """
    word = bits + (place ^ seed) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> np.uint32(16))) * np.uint32(0xC2B2AE35)
    word = (word ^ (word >> np.uint32(13))) * seed
    return word ^ (word >> np.uint32(16))


def _bits(settings: EngineConfig) -> list[str | int | None]:
    device = jax.devices()[0]
    kernels = [settings.layout, settings.attention, settings.chunk_size]
    return [*kernels, device.platform, device.device_kind, jax.__version__]
