"""`load`: any source to device arrays."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jprefill.config import DType, Quantization
from jprefill.model.checkpoints.detect import open_source
from jprefill.model.checkpoints.orbax import OrbaxSource
from jprefill.model.checkpoints.read_ahead import progress_bar, read_ahead
from jprefill.model.checkpoints.source import (
    DTYPES,
    WeightSource,
    check_dtype,
    check_quantization,
    check_tensors,
    leaves_of,
)
from jprefill.model.config import ModelConfig
from jprefill.model.weights import weight_leaves


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model's weights on the device.

    Attributes:
      name: to be served under, if nothing else is asked for.
      weights: exactly the names, shapes and dtypes of `weight_leaves(config, dtype, quantization)`.
      fingerprint: equal only for equal weights, config, dtype and quantization; exact for a converted checkpoint, from
        headers, sizes and times of change for files loaded in place.
      tokenizer_path: where `jprefill.tokenization` finds the tokenizer.
    """

    name: str
    config: ModelConfig
    weights: dict[str, jax.Array]
    fingerprint: str
    tokenizer_path: Path
    dtype: DType
    quantization: Quantization | None = None


def load(
    path: str | Path, *, dtype: DType = "bfloat16", quantization: Quantization | None = None, progress: bool = False
) -> Checkpoint:
    """Loads a model onto the first device.

    Tensors are read by a few threads (by Orbax, for a converted checkpoint), cast or quantised on the host and
    sent as they arrive: host memory holds a part of the model only, and nothing is compiled.

    Args:
      path: what `open_source` takes.
      dtype: of weights that are not quantised.
      quantization: of the projection matrices; None leaves them as they are stored.

    Raises:
      CheckpointError: the files are missing, damaged or incomplete; names file and tensor.
      UnsupportedModelError: the model asks for something that is not implemented.
      ConfigError: an unknown dtype or quantization, or weights that are quantised in another way already.
    """
    check_dtype(dtype)
    source = open_source(path)
    runs_in = check_quantization(source, quantization)
    names = list(check_tensors(source, quantization))
    weights = _to_device(source, names, dtype, runs_in, progress=progress)
    return Checkpoint(
        name=source.name,
        config=source.config,
        weights=weights,
        fingerprint=source.fingerprint(dtype, runs_in),
        tokenizer_path=source.tokenizer_path,
        dtype=dtype,
        quantization=runs_in,
    )


def _to_device(
    source: WeightSource, names: list[str], dtype: DType, quantization: Quantization | None, *, progress: bool
) -> dict[str, jax.Array]:
    """One tensor after the other, while the next are read; the host copy lives until its transfer is done."""
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    weights: dict[str, jax.Array] = {}
    num_bytes = sum(leaf.num_bytes for leaf in weight_leaves(source.config, DTYPES[dtype], quantization).values())
    with progress_bar("loading", num_bytes, progress=progress) as bar:
        for leaves in _host_leaves(source, names, dtype, quantization):
            for name, array in leaves.items():
                weights[name] = jax.block_until_ready(jax.device_put(array, sharding))
                bar.update(array.nbytes)
    return weights


def _host_leaves(
    source: WeightSource, names: list[str], dtype: DType, quantization: Quantization | None
) -> Iterator[dict[str, np.ndarray]]:
    """What `leaves_of` makes of each tensor, in order; made by the reading threads where there are such."""
    if isinstance(source, OrbaxSource):
        for name, tensor in source.read_all(names):
            yield leaves_of(name, tensor, dtype, quantization)
        return

    def read(name: str) -> dict[str, np.ndarray]:
        return leaves_of(name, source.read(name), dtype, quantization)

    for _, leaves in read_ahead(read, names):
        yield leaves
