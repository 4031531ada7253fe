"""`load`: any source to device arrays."""

import math
from dataclasses import dataclass
from pathlib import Path

import jax

from jprefill.config import DType
from jprefill.model.checkpoints.detect import open_source
from jprefill.model.checkpoints.orbax import OrbaxSource
from jprefill.model.checkpoints.read_ahead import progress_bar, read_ahead
from jprefill.model.checkpoints.source import DTYPES, WeightSource, cast, check_dtype, check_tensors
from jprefill.model.config import ModelConfig


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model's weights on the device.

    Attributes:
      name: to be served under, if nothing else is asked for.
      weights: exactly the names and shapes of `weight_shapes(config)`, all of `dtype`.
      fingerprint: equal only for equal weights, config and dtype; exact for a converted checkpoint, from
        headers, sizes and times of change for files loaded in place.
      tokenizer_path: where `jprefill.tokenization` finds the tokenizer.
    """

    name: str
    config: ModelConfig
    weights: dict[str, jax.Array]
    fingerprint: str
    tokenizer_path: Path
    dtype: DType


def load(path: str | Path, *, dtype: DType = "bfloat16", progress: bool = False) -> Checkpoint:
    """Loads a model onto the first device.

    Tensors are read by a few threads (by Orbax, for a converted checkpoint), cast on the host and sent as
    they arrive: host memory holds a part of the model only, and nothing is compiled.

    Raises:
      CheckpointError: the files are missing, damaged or incomplete; names file and tensor.
      UnsupportedModelError: the model asks for something that is not implemented.
      ConfigError: an unknown dtype.
    """
    check_dtype(dtype)
    source = open_source(path)
    shapes = check_tensors(source)
    weights = _to_device(source, shapes, dtype, progress=progress)
    return Checkpoint(
        name=source.name,
        config=source.config,
        weights=weights,
        fingerprint=source.fingerprint(dtype),
        tokenizer_path=source.tokenizer_path,
        dtype=dtype,
    )


def _to_device(
    source: WeightSource, shapes: dict[str, tuple[int, ...]], dtype: DType, *, progress: bool
) -> dict[str, jax.Array]:
    """One tensor after the other, while the next are read; the host copy lives until its transfer is done."""
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    arrays = source.read_all(shapes) if isinstance(source, OrbaxSource) else read_ahead(source.read, shapes)
    weights: dict[str, jax.Array] = {}
    num_bytes = sum(math.prod(shape) for shape in shapes.values()) * DTYPES[dtype].itemsize
    with progress_bar("loading", num_bytes, progress=progress) as bar:
        for name, array in arrays:
            weights[name] = jax.block_until_ready(jax.device_put(cast(array, dtype, name), sharding))
            bar.update(weights[name].nbytes)
    return weights
