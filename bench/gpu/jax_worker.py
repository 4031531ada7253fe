"""The child process that runs jprefill from this source tree. Needs jax, numpy, jaxtyping and tqdm, nothing else.

`python -m bench.gpu.jax_worker CACHE_FOLDER`, with the repository's root on PYTHONPATH.
"""

import os
import statistics
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu import jax_kernels
from bench.gpu.jax_model import LayerProgram, LoadedModel, parity, peak_bytes, settings_for
from bench.gpu.jax_profile import profile
from bench.gpu.worker import serve
from jprefill.model.compiles import use_cache
from jprefill.pallas.attention import default_implementation, implementations

PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "jaxtyping", "numpy", "nvidia-cudnn-cu13")


class Worker:
    """The commands, by name of the method. State: the model that was loaded last."""

    def __init__(self) -> None:
        self._model: LoadedModel | None = None

    def describe(self) -> dict[str, Any]:
        """The device and what runs on it."""
        device = jax.devices()[0]
        stats = device.memory_stats() or {}
        return {
            "platform": device.platform,
            "device": device.device_kind,
            "memory_limit_bytes": stats.get("bytes_limit"),
            "versions": {name: found for name in PACKAGES if (found := _version(name))} | {"python": sys.version},
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "implementations": [name for name in implementations() if name != "reference"],
            "default_attention": default_implementation(),
        }

    def load(
        self, model: dict[str, Any], chunk_size: int, attention: str | None, buckets: list[int], is_cached: bool
    ) -> dict[str, Any]:
        """Compiles the programs and makes random weights on the device.

        `is_cached`: the runner finds its programs in the compilation cache, which keeps the peak of memory clean.
        """
        self._model = None  # before the next one is made: two do not fit
        jax.config.update("jax_enable_compilation_cache", is_cached)
        loaded = LoadedModel(model, settings_for(chunk_size, attention), tuple(buckets), compiles_first=is_cached)
        self._model = loaded
        return {
            "attention": loaded.spec.attention,
            "chunk_size": chunk_size,
            "weights_bytes": loaded.weights_bytes,
            "compile_s": loaded.compile_s,
            "load_s": loaded.load_s,
            "peak_before_bytes": loaded.peak_before_bytes,
            "planned": {bucket: loaded.planned_bytes(bucket) for bucket in buckets},
        }

    def run_pass(self, count: int, length: int, bucket: int) -> dict[str, Any]:
        """One pass, from the host's batch to the scores on the host."""
        model = self._loaded()
        batch = model.batch(count, length, bucket)
        started = time.perf_counter()
        scores = model.runner.run(batch)
        seconds = time.perf_counter() - started
        if not np.isfinite(scores.pair_logprobs).all():
            raise ArithmeticError("the pass gave a log-probability that is not finite")
        return {"seconds": seconds, "peak_bytes": peak_bytes()}

    def layer(
        self, count: int, length: int, bucket: int, layout: str, changes: dict[str, Any], num_layers: int, repeats: int
    ) -> dict[str, Any]:
        """Time of one layer among `num_layers` in a row, and the host's share of it."""
        model = self._loaded()
        program = LayerProgram(model, model.batch(count, length, bucket), layout, **changes)
        program.run(2)
        runs = [program.run(num_layers) for _ in range(repeats)]
        return {
            "layer_s": statistics.median(total for _, total in runs) / num_layers,
            "host_s": statistics.median(host for host, _ in runs) / num_layers,
            "temp_bytes": program.temp_bytes,
            "compile_s": program.compile_s,
        }

    def profile(self, count: int, length: int, bucket: int) -> dict[str, Any]:
        """One pass under the profiler."""
        model = self._loaded()
        batch = model.batch(count, length, bucket)
        model.runner.run(batch)
        return profile(lambda: model.runner.run(batch))

    def _loaded(self) -> LoadedModel:
        if self._model is None:
            raise LookupError("no model is loaded")
        return self._model


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _is_healthy() -> bool:
    """Whether the device still computes."""
    try:
        return float(jnp.ones(8).sum()) == 8.0
    except jax.errors.JaxRuntimeError:
        return False


def main() -> int:
    """Answers until stdin ends."""
    use_cache(sys.argv[1])
    worker = Worker()
    commands = {
        "describe": worker.describe,
        "numerics": jax_kernels.numerics,
        "attention": jax_kernels.attention,
        "tile": jax_kernels.tile,
        "matmul": jax_kernels.matmul,
        "quantized_matmul": jax_kernels.quantized_matmul,
        "host_copies": jax_kernels.host_copies,
        "parity": parity,
        "load": worker.load,
        "run_pass": worker.run_pass,
        "layer": worker.layer,
        "profile": worker.profile,
    }
    return serve(commands, _is_healthy)


if __name__ == "__main__":
    sys.exit(main())
