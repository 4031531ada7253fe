"""Attention on Hopper GPUs through Pallas Mosaic GPU: wgmma and asynchronous copies. Faster than `triton` there."""

from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jprefill.errors import ConfigError
from jprefill.pallas.attention.bounds import tile_bounds
from jprefill.pallas.attention.contract import KeyRanges
from jprefill.pallas.attention.mosaic_kernel import NUM_COMPUTE, NUM_WARPGROUPS, Plan, attend_block
from jprefill.pallas.device import trace_target

DTYPES = ("bfloat16", "float16")
ALIGNMENT = 8  # rows of a buffer that asynchronous copies can tile; any other number costs a copy of it
# head_dim -> (block_kv, num_stages): what fits 227 KiB of shared memory and 232 registers a thread without spills.
BLOCKS = {64: (128, 4), 128: (128, 2), 256: (64, 2)}


def refusal(dtype: str, head_dim: int) -> str | None:
    """Why this kernel cannot run such heads; None if it can."""
    if dtype not in DTYPES:
        return f"dtype {dtype}: wgmma takes {' and '.join(DTYPES)}"
    if head_dim not in BLOCKS:
        return f"head_dim {head_dim}: blocks exist for {', '.join(map(str, BLOCKS))}"
    return None


def attend_mosaic(
    q: Float[Array, "T N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    ranges: KeyRanges,
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "T N H"]:
    """See `attend`. For sm_90 only; bfloat16 and float16, the head sizes of `BLOCKS`.

    Args:
      q: queries.
      k: keys of the whole buffer.
      v: values.
      ranges: what each row sees.
      interpret: settings of Pallas' simulation of a GPU (slow: for tests); where the target is a CPU it always runs.

    Returns:
      As `attend`. The sum of weights is float32, the weights of the product are rounded to the dtype of `v`.

    Raises:
      ConfigError: while tracing, for a dtype or head size without a kernel.
    """
    num_rows, num_heads, _ = q.shape
    if interpret is None and trace_target().platform == "cpu":
        interpret = plgpu.InterpretGPUParams()
    plan = _plan(q, num_heads // k.shape[1], interpret is not None)
    bounds = tile_bounds(ranges, num_keys=len(k), num_groups=1, block_q=plan.block_q, block_kv=plan.block_kv)
    pad = partial(_padded, multiple=plan.block_q)
    rows = *map(pad, ranges[:3]), pad(ranges.self_pos, value=-1)
    q, k, v = (_padded(x, ALIGNMENT) for x in (q, k, v))
    run = plgpu.kernel(
        partial(attend_block, plan=plan),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(len(bounds), num_heads // plan.heads_per_block),
        grid_names=("tile", "heads"),
        num_threads=NUM_WARPGROUPS,
        thread_name="warpgroup",
        kernel_name="attend_mosaic",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return run(bounds, *rows, q, k, v)[:num_rows]


def _plan(q: Float[Array, "T N H"], num_groups: int, is_interpreted: bool) -> Plan:
    head_dim = q.shape[-1]
    if reason := refusal(str(q.dtype), head_dim):
        raise ConfigError(f"attention='mosaic': {reason}")
    block_kv, num_stages = BLOCKS[head_dim]
    return Plan(
        dtype=q.dtype,
        head_dim=head_dim,
        num_groups=num_groups,
        heads_per_block=NUM_COMPUTE if num_groups % NUM_COMPUTE == 0 else 1,
        block_kv=block_kv,
        num_stages=num_stages,
        is_interpreted=is_interpreted,
    )


def _padded(x: Shaped[Array, "T ..."], multiple: int, value: int = 0) -> Shaped[Array, "_ ..."]:
    """Rows added up to a multiple; `x` itself where there is nothing to add."""
    padding = -len(x) % multiple
    return jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1)), constant_values=value) if padding else x
