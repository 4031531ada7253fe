"""What single operations do on the device: attention against the reference, attention and matrix product speed."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.gpu.segments import LAYOUTS, segment_rows
from bench.gpu.timing import measure
from jprefill.pallas.attention import KeyRanges, attend

FP8 = jnp.float8_e4m3fn


def numerics(
    name: str, num_heads: int, num_kv_heads: int, head_dim: int, num_rows: int, num_keys: int
) -> dict[str, list[dict[str, Any]]]:
    """Error of one implementation against the float32 reference, for every layout of `segments`.

    Queries come chunk by chunk over the whole buffer, as layout `stream` calls it. Keys and values that no row may
    see are NaN. One compilation serves all layouts: ranges are data.

    Returns:
      `layouts`, for each of them: `max_error`; `relative_error` = |ours - reference| / |reference|; `is_finite`;
      `is_zero`: rows which see nothing gave exact zeros.
    """
    keys = jax.random.split(jax.random.key(0), 3)
    q = _normal(keys[0], num_keys, num_heads, head_dim)
    k, v = (_normal(key, num_keys, num_kv_heads, head_dim) for key in keys[1:])
    ours = jax.jit(partial(attend, implementation=name))
    reference = jax.jit(partial(attend, implementation="reference"))
    records = []
    for layout in LAYOUTS:
        rows, num_real = segment_rows(layout, num_keys)
        k_here, v_here = (x.at[num_real:].set(jnp.nan) for x in (k, v))
        got, exact = [], []
        for start in range(0, num_keys, num_rows):
            here = slice(start, start + num_rows)
            ranges = KeyRanges(*(jnp.asarray(bound) for bound in rows[here].T))
            arguments = (q[here], k_here, v_here, ranges)
            got.append(np.asarray(ours(*arguments), np.float32))
            exact.append(np.asarray(reference(*_in_float32(arguments)), np.float32))
        records.append({"segments": layout} | _errors(np.concatenate(got), np.concatenate(exact), num_real))
    return {"layouts": records}


def _in_float32(arguments: tuple) -> tuple:
    *arrays, ranges = arguments
    return (*(array.astype(jnp.float32) for array in arrays), ranges)


def _errors(got: np.ndarray, exact: np.ndarray, num_real: int) -> dict[str, Any]:
    difference = np.abs(got - exact)[:num_real]
    return {
        "max_error": float(difference.max()),
        "relative_error": float(np.linalg.norm(difference) / np.linalg.norm(exact[:num_real])),
        "is_finite": bool(np.isfinite(got).all()),
        "is_zero": not got[num_real:].any(),
    }


def attention(
    name: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_rows: int,
    num_keys: int,
    repeats: int,
    target_s: float,
) -> dict[str, Any]:
    """Time of causal attention of the last `num_rows` of `num_keys` tokens."""
    attend_here = jax.jit(partial(attend, implementation=name))
    return _time_attention(attend_here, num_heads, num_kv_heads, head_dim, num_rows, num_keys, repeats, target_s)


def _time_attention(
    attend_here: Callable,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_rows: int,
    num_keys: int,
    repeats: int,
    target_s: float,
) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(1), 3)
    q = _normal(keys[0], num_rows, num_heads, head_dim)
    k, v = (_normal(key, num_keys, num_kv_heads, head_dim) for key in keys[1:])
    zeros = jnp.zeros(num_rows, jnp.int32)
    ranges = KeyRanges(zeros, zeros, zeros, jnp.arange(num_keys - num_rows, num_keys, dtype=jnp.int32))
    return measure(lambda: attend_here(q, k, v, ranges), jax.block_until_ready, repeats, target_s)


def tile(
    kernel: str,
    tile: list[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_rows: int,
    num_keys: int,
    repeats: int,
    target_s: float,
) -> dict[str, Any]:
    """As `attention`, at another tile size than the kernel's table has.

    Args:
      kernel: `triton`, whose tile is (block_q, block_kv, num_warps, num_stages), or `mosaic`: (block_kv, num_stages).
    """
    sizes = (num_heads, num_kv_heads, head_dim, num_rows, num_keys, repeats, target_s)
    if kernel == "triton":
        from jprefill.pallas.attention.tiles import Tile
        from jprefill.pallas.attention.triton import attend_triton

        return _time_attention(jax.jit(partial(attend_triton, tile=Tile(*tile))), *sizes)
    from jprefill.pallas.attention import mosaic

    # The kernel has one tile per head size and no argument for it: the entry of the table is changed for this call.
    before = mosaic.BLOCKS[head_dim]
    mosaic.BLOCKS[head_dim] = (tile[0], tile[1])
    try:
        return _time_attention(jax.jit(partial(mosaic.attend_mosaic)), *sizes)
    finally:
        mosaic.BLOCKS[head_dim] = before


def matmul(num_rows: int, num_in: int, num_out: int, repeats: int, target_s: float) -> dict[str, Any]:
    """Time of the bfloat16 product that a projection is: x[M, I] with a weight [O, I]."""
    x, weight = _normal(jax.random.key(2), num_rows, num_in), _normal(jax.random.key(3), num_out, num_in)
    product = jax.jit(_product).lower(x, weight).compile()
    return measure(lambda: product(x, weight), jax.block_until_ready, repeats, target_s) | _compiled_to(product)


def quantized_matmul(
    scheme: str, num_rows: int, num_in: int, num_out: int, repeats: int, target_s: float
) -> dict[str, Any]:
    """The same product with 8-bit weights, or with both sides in 8 bits (JAX.md: who wins, and what it materialises).

    Args:
      scheme: `int8_weight`, `fp8_weight`: weights are converted to bfloat16 inside the product. `int8_both`,
        `fp8_both`: the product itself runs in 8 bits.
    """
    kind = jnp.dtype(jnp.int8) if scheme.startswith("int8") else jnp.dtype(FP8)
    x, weight = _normal(jax.random.key(2), num_rows, num_in), _normal(jax.random.key(3), num_out, num_in)
    scale = jnp.full(num_out, 0.01, jnp.float32)
    weight = jnp.round(weight.astype(jnp.float32) * 30).astype(kind)
    x = jnp.round(x.astype(jnp.float32) * 30).astype(kind) if scheme.endswith("both") else x
    run = jax.jit(_weight_only if scheme.endswith("weight") else _both_quantized)
    product = run.lower(x, weight, scale).compile()
    return measure(lambda: product(x, weight, scale), jax.block_until_ready, repeats, target_s) | _compiled_to(product)


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())))


def _weight_only(x: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    return _product(x, weight.astype(x.dtype)) * scale.astype(x.dtype)[None, :]


def _both_quantized(x: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    wide = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    product = lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=wide)
    return (product.astype(jnp.float32) * scale[None, :]).astype(jnp.bfloat16)


def _compiled_to(product: jax.stages.Compiled) -> dict[str, Any]:
    """Which library the autotuner took, and the scratch memory."""
    text = product.as_text() or ""
    marks = {"cublas": "__cublas", "triton": "__triton", "cudnn": "__cudnn"}
    found = [library for library, mark in marks.items() if mark in text]
    memory = product.memory_analysis()
    return {"runs_in": "+".join(found) or "xla", "temp_bytes": memory.temp_size_in_bytes if memory else None}


def host_copies(num_bytes: int, repeats: int) -> list[dict[str, Any]]:
    """Speed of copies between the device and host memory, pinned (`pinned_host`) and ordinary (NumPy)."""
    device = jax.devices()[0]
    on_device = jax.sharding.SingleDeviceSharding(device)
    values = jax.random.normal(jax.random.key(4), (num_bytes // 4,))
    records = []
    if any(memory.kind == "pinned_host" for memory in device.addressable_memories()):
        on_host = on_device.with_memory_kind("pinned_host")
        pinned = jax.device_put(values, on_host)
        records.append(_copy("device to pinned", lambda: jax.device_put(values, on_host), num_bytes, repeats))
        records.append(_copy("pinned to device", lambda: jax.device_put(pinned, on_device), num_bytes, repeats))
    host = np.asarray(values)
    # A new array each time: a jax.Array remembers its NumPy copy.
    records.append(_copy("device to numpy", lambda: np.asarray(values + 1), num_bytes, repeats))
    records.append(_copy("numpy to device", lambda: jax.device_put(host, on_device), num_bytes, repeats))
    return records


def _copy(name: str, call: Callable[[], Any], num_bytes: int, repeats: int) -> dict[str, Any]:
    """`started_s` is when the call came back: much less than `median_s` for a copy that runs by itself."""
    jax.block_until_ready(call())
    started = time.perf_counter()
    result = call()
    started_s = time.perf_counter() - started
    jax.block_until_ready(result)
    timing = measure(call, jax.block_until_ready, repeats, 0.0)
    return {"copy": name, "bytes": num_bytes, "started_s": started_s} | timing


def _normal(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16)
