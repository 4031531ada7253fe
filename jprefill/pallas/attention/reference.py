"""Dense attention in float32: the definition that every other implementation is tested against."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jprefill.pallas.attention.contract import KeyRanges


def visible(ranges: KeyRanges, num_keys: int) -> Bool[Array, "T S"]:
    """The mask as a matrix: True where row t sees key s."""
    key = jnp.arange(num_keys, dtype=jnp.int32)[None, :]
    lo, hi, self_lo, self_pos = (bound[:, None] for bound in ranges)
    return ((key >= lo) & (key < hi)) | ((key >= self_lo) & (key <= self_pos))


def attend_reference(
    q: Float[Array, "T N H"], k: Float[Array, "S K H"], v: Float[Array, "S K H"], ranges: KeyRanges
) -> Float[Array, "T N H"]:
    """See `attend`. Memory grows with T x S x N: for tests and tiny inputs."""
    num_groups = q.shape[1] // k.shape[1]
    mask = visible(ranges, k.shape[0])
    is_seen = mask.any(0)[:, None, None]
    keys = jnp.repeat(jnp.where(is_seen, k.astype(jnp.float32), 0.0), num_groups, axis=1)
    values = jnp.repeat(jnp.where(is_seen, v.astype(jnp.float32), 0.0), num_groups, axis=1)
    scores = jnp.einsum("tnh,snh->nts", q.astype(jnp.float32), keys, precision="highest") * q.shape[-1] ** -0.5
    scores = jnp.where(mask[None], scores, -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True, initial=-1e30)
    weights = jnp.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.where(total == 0.0, 1.0, total)
    return jnp.einsum("nts,snh->tnh", weights, values, precision="highest").astype(q.dtype)
