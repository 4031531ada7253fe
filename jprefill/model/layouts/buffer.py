"""The KV buffer that every layer of every pass shares, and how a layer's new rows get into it."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jprefill.model.config import ModelConfig
from jprefill.model.layouts.contract import KeyValues


def empty_kv(config: ModelConfig, dtype: jnp.dtype, num_rows: int) -> KeyValues:
    """A buffer of zeros. Rows that no pass has written must be finite: attention may read, and mask, any of them."""
    shape = (num_rows, config.num_kv_heads, config.head_dim)
    return KeyValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def put_rows(
    kv: KeyValues, k: Float[Array, "T K H"], v: Float[Array, "T K H"], self_pos: Int32[Array, " T"]
) -> KeyValues:
    """Keys and values of T token rows, written in place to their own KV rows; padding (-1) is not stored.

    Args:
      self_pos: KV rows, strictly ascending; padding comes last.
    """
    num_rows = kv.k.shape[0]
    # Rows beyond the buffer are dropped. They differ from each other, as the promises to the compiler demand.
    beyond = num_rows + jnp.arange(self_pos.shape[0], dtype=jnp.int32)
    rows = jnp.where(self_pos < 0, beyond, self_pos)

    def put(buffer: Float[Array, "S K H"], new: Float[Array, "T K H"]) -> Float[Array, "S K H"]:
        return buffer.at[rows].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)

    return KeyValues(put(kv.k, k), put(kv.v, v))
