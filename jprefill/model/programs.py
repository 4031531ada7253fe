"""The executables of one model: compiled ahead, called by the runner, never recompiled.

Which programs there are stands in `declared.py`. What triggers a compile: building `Programs`. A call with another
shape or dtype raises `TypeError` instead.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from jax import stages
from tqdm import tqdm

from jprefill.config import DType, Layout
from jprefill.model.declared import HEAD_SIZES, DeclaredProgram, HeadSize, declare
from jprefill.model.layouts import KeyValues, LayoutSpec, empty_kv
from jprefill.model.memory import ProgramMemory, pass_bytes

COMPILE_STACK_BYTES = 64 * 2**20  # XLA's recursion has overflowed the default 8 MiB on deep programs


@dataclass(frozen=True)
class BucketPrograms:
    """The executables of one bucket. `fill_kv` is None where every layer runs whole.

    `pass_bytes`: the most device memory that one pass of this bucket holds besides the weights.
    """

    bucket: int
    chunk_size: int
    embed: stages.Compiled
    layer: stages.Compiled
    fill_kv: stages.Compiled | None
    read: dict[HeadSize, stages.Compiled]
    pass_bytes: int


class Programs:
    """All executables of one model, by bucket. Immutable once built; used by the engine thread.

    Attributes:
      new_kv: makes the KV buffer, of `buckets[-1]` rows, that every bucket's programs take.
    """

    def __init__(self, by_bucket: dict[int, BucketPrograms], new_kv: Callable[[], KeyValues]):
        self._by_bucket = by_bucket
        self.buckets = tuple(sorted(by_bucket))
        self.new_kv = new_kv

    def of(self, bucket: int) -> BucketPrograms:
        """The executables for a bucket that was compiled."""
        return self._by_bucket[bucket]

    @classmethod
    def compile(
        cls,
        spec: LayoutSpec,
        layout: Layout,
        dtype: DType,
        buckets: tuple[int, ...],
        *,
        progress: bool = False,
    ) -> "Programs":
        """Traces here, compiles in a small pool of threads with large stacks."""
        kv_rows = max(buckets)
        declared = {bucket: declare(spec, layout, dtype, bucket, kv_rows) for bucket in buckets}
        lowered = {
            (bucket, name): program.trace().lower()
            for bucket, programs in declared.items()
            for name, program in programs.items()
        }
        new_kv = DeclaredProgram(partial(empty_kv, spec.config, jnp.dtype(dtype), kv_rows), ())
        compiled = compile_all(lowered | {(0, "new_kv"): new_kv.trace().lower()}, progress=progress)
        by_bucket = {}
        for bucket, programs in declared.items():
            executables = {name: compiled[bucket, name] for name in programs}
            memory = {
                name: ProgramMemory.of(executables[name].memory_analysis(), program.weight_bytes)
                for name, program in programs.items()
            }
            by_bucket[bucket] = _bucket_programs(spec, bucket, executables, pass_bytes(memory))
        return cls(by_bucket, compiled[0, "new_kv"])


def compile_all[K](lowered: dict[K, stages.Lowered], *, progress: bool = False) -> dict[K, stages.Compiled]:
    """Compiles in a small pool of threads with large stacks."""
    with tqdm(total=len(lowered), desc="compiling", disable=None if progress else True) as bar:

        def build(low: stages.Lowered) -> stages.Compiled:
            compiled = low.compile()
            bar.update()
            return compiled

        pending = _submit_all(build, lowered)
        return {key: future.result() for key, future in pending.items()}


def _submit_all[K](build: Callable[[stages.Lowered], stages.Compiled], lowered: dict[K, stages.Lowered]):
    """Runs `build` over all programs in two threads; the futures are done when this returns."""
    before = threading.stack_size(COMPILE_STACK_BYTES)
    try:
        with ThreadPoolExecutor(max_workers=2, thread_name_prefix="compile") as pool:
            pending: dict[K, Future[stages.Compiled]] = {key: pool.submit(build, low) for key, low in lowered.items()}
    finally:
        threading.stack_size(before)
    return pending


def _bucket_programs(
    spec: LayoutSpec, bucket: int, compiled: dict[str, stages.Compiled], num_bytes: int
) -> BucketPrograms:
    return BucketPrograms(
        bucket=bucket,
        chunk_size=min(spec.chunk_size, bucket),
        embed=compiled["embed"],
        layer=compiled["layer"],
        fill_kv=compiled.get("fill_kv"),
        read={size: compiled[size.name] for size in HEAD_SIZES},
        pass_bytes=num_bytes,
    )
