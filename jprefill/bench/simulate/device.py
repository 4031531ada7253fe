"""How long passes take on a GPU that is not there: a roofline, or what was measured on one that is.

seconds = a + b * chunks + c * attention area      b: the slower of arithmetic and reading all weights once
"""

import json
from pathlib import Path
from typing import NamedTuple

from jprefill.errors import ConfigError
from jprefill.model.config import ModelConfig
from jprefill.scheduler.jct import JctModel

EFFICIENCY = 0.6  # of the peak; DESIGN's aim is 0.65 of the matmul rate. A guess until a GPU has been timed
LAUNCH_S = 4e-6  # per program; a layer is one, and so are its block moves


class Gpu(NamedTuple):
    """From NVIDIA's data sheets; arithmetic on bf16, dense."""

    flops_per_s: float
    bytes_per_s: float
    memory_bytes: int


GPUS = {
    "l4": Gpu(121e12, 300e9, 24 * 10**9),
    "a100-40": Gpu(312e12, 1555e9, 40 * 10**9),
    "a100-80": Gpu(312e12, 2039e9, 80 * 10**9),
    "h100": Gpu(989e12, 3350e9, 80 * 10**9),
    "h200": Gpu(989e12, 4800e9, 141 * 10**9),
}
WEIGHT_BYTES = {"bf16": 2, "fp8": 1, "int8": 1}


def device_model(gpu: str, model: ModelConfig, dtype: str, chunk_size: int, efficiency: float = EFFICIENCY) -> JctModel:
    """What passes take. Weights of 8 bits are multiplied as bf16, as our programs do.

    Args:
      dtype: of the weights.
      chunk_size: tokens.

    Raises:
      ConfigError: a GPU or dtype that is not known.
    """
    if gpu not in GPUS or dtype not in WEIGHT_BYTES:
        raise ConfigError(f"{gpu}, {dtype}: GPUs are {', '.join(GPUS)}, dtypes {', '.join(WEIGHT_BYTES)}")
    peak, bytes_per_s = GPUS[gpu].flops_per_s * efficiency, GPUS[gpu].bytes_per_s
    num_params = layer_params(model) * model.num_layers
    per_chunk_s = max(2 * num_params * chunk_size / peak, num_params * WEIGHT_BYTES[dtype] / bytes_per_s)
    # Of each key that a query sees: a product for the score, another for the value, two FLOPs an element.
    per_key_s = 4 * model.num_heads * model.head_dim * model.num_layers / peak
    return JctModel.of(LAUNCH_S * 3 * model.num_layers, per_chunk_s, per_key_s)


def measured_model(path: Path) -> JctModel:
    """What passes take on a device that was timed: a file that an engine keeps, or one of `jprefill bench jct --json`.

    Raises:
      ConfigError: there are no coefficients in it.
    """
    try:
        return JctModel.of(*json.loads(path.read_text(encoding="utf-8"))["coefficients"])
    except OSError as error:
        raise ConfigError(f"--jct {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"--jct {path}: needs 'coefficients', four numbers, none below 0") from None


def layer_params(model: ModelConfig) -> int:
    """Elements of one layer's matrices."""
    attention = model.embed_dim * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    return attention + 3 * model.embed_dim * model.mlp_dim


def crossover_tokens(model: ModelConfig) -> int:
    """The position from which on attention costs a token more than a layer's matrix products."""
    return max(1, layer_params(model) // (2 * model.num_heads * model.head_dim))
