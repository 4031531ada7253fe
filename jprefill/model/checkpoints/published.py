"""Checkpoints that others quantised: `quantization_config` of Hugging Face's `fp8` and of compressed-tensors.

    values   x.weight            I8 or F8_E4M3 [out, in]
    scales   x.weight_scale      one number | [out] | [out, 1] | one per block
             x.weight_scale_inv  the same under DeepSeek's name: it multiplies too, whatever the name says

Only the weights are taken from it. Scales of activations and of a KV cache are read by nobody, because both stay in
the working dtype here: a rounding that the published model allows itself is left out, so the numbers are closer to the
original model, not further away. A module that the config's ignore list names has a plain weight, which says enough.

Sources: transformers `FineGrainedFP8Config`; compressed-tensors `QuantizationArgs` and `CompressionFormat`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jprefill.config import Quantization
from jprefill.errors import CheckpointError, UnsupportedModelError
from jprefill.model.checkpoints.source import StoredTensor
from jprefill.model.quantized import Quantized, from_blocks

CONFIG_KEYS = ("quantization_config", "compression_config")  # the second: compressed-tensors before 2025
_FORMATS: dict[str, Quantization] = {"float-quantized": "fp8", "int-quantized": "int8"}
_NUMBER_TYPES: dict[Quantization, str] = {"fp8": "float", "int8": "int"}
_SCALES = (".weight_scale", ".weight_scale_inv")
_UNUSED = (".input_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale")


@dataclass(frozen=True)
class Published:
    """What a `quantization_config` says about the weights.

    Attributes:
      element: the safetensors name of the values' type.
      block: (rows, columns) that share a scale; None where scales are per tensor or per output channel.
    """

    quantization: Quantization
    element: str
    block: tuple[int, int] | None = None


def published_quantization(hf: Mapping[str, Any]) -> Published | None:
    """Reads the quantisation of a `config.json`; None where there is none.

    Raises:
      UnsupportedModelError: a method, format or switch that is not implemented, by name.
    """
    found = [hf[key] for key in CONFIG_KEYS if hf.get(key)]
    if not found:
        return None
    config = found[0]
    if not isinstance(config, Mapping):
        raise UnsupportedModelError(f"quantization_config={config!r} must be an object")
    method = config.get("quant_method")
    if method == "fp8":
        return _fine_grained(config)
    if method == "compressed-tensors":
        return _compressed(config)
    raise UnsupportedModelError(
        f"quantization_config quant_method={method!r} is not implemented: 'fp8' and 'compressed-tensors' are"
    )


def without_quantization(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the model itself."""
    return {key: value for key, value in hf.items() if key not in CONFIG_KEYS}


def split_scales(
    tensors: Mapping[str, StoredTensor],
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Weights and everything else, and the scales by the name of the weight that they belong to."""
    scales = {}
    rest = {}
    for name, tensor in tensors.items():
        ending = next((e for e in _SCALES if name.endswith(e)), None)
        if ending is not None:
            scales[name.removesuffix(ending) + ".weight"] = tensor
        elif not name.endswith(_UNUSED):
            rest[name] = tensor
    return rest, scales


def check_scale(name: str, weight: StoredTensor, scale: StoredTensor, published: Published) -> None:
    """Checks shape and type of a scale against its weight.

    Raises:
      CheckpointError: they do not go together; names file and tensor.
    """
    if weight.format != published.element:
        raise CheckpointError(
            f"{weight.file.name}: tensor {name!r} has a scale and dtype {weight.format}, "
            f"the quantization_config says {published.element}"
        )
    if len(weight.shape) != 2 or not _fits(weight.shape, scale.shape, published.block):
        raise CheckpointError(
            f"{scale.file.name}: the scale of {name!r} has shape {scale.shape}, "
            f"which does not go with a weight of shape {weight.shape}"
            + (f" in blocks of {published.block}" if published.block else "")
        )


def quantized_of(name: str, values: np.ndarray, scale: np.ndarray, published: Published) -> Quantized:
    """Values and scales of any published form as one scale per output channel.

    A scale per tensor is repeated, which changes nothing. Blocks go through `from_blocks`, which may round.

    Raises:
      CheckpointError: a scale is negative, infinite or NaN.
    """
    scale = scale.astype(np.float32)
    if not (np.isfinite(scale).all() and (scale >= 0).all()):
        raise CheckpointError(f"tensor {name!r} has a scale that is negative or not finite")
    if published.block is not None:
        return from_blocks(values, scale, published.block, published.quantization)
    return Quantized(values, np.broadcast_to(scale.reshape(-1), values.shape[:1]).copy())


def _fits(weight: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int] | None) -> bool:
    if block is not None:
        return scale == _num_blocks(weight, block)
    return math.prod(scale) == 1 or scale in (weight[:1], (weight[0], 1))


def _num_blocks(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def _fine_grained(config: Mapping[str, Any]) -> Published:
    """Hugging Face's `fp8`: DeepSeek's blocks, or without blocks per tensor or channel."""
    if (fmt := config.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedModelError(f"quantization_config fmt={fmt!r} is not implemented: 'e4m3' is")
    block = config.get("weight_block_size")
    return Published("fp8", "F8_E4M3", None if block is None else _block(block, "weight_block_size"))


def _compressed(config: Mapping[str, Any]) -> Published:
    """compressed-tensors: all groups must quantise weights in the one way that the format names."""
    fmt = config.get("format")
    if fmt not in _FORMATS:
        known = " and ".join(map(repr, _FORMATS))
        raise UnsupportedModelError(f"compressed-tensors format={fmt!r} is not implemented: {known} are")
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise UnsupportedModelError(f"compressed-tensors sparsity_config format={sparsity!r} is not implemented")
    if config.get("transform_config"):
        raise UnsupportedModelError("compressed-tensors transform_config is not implemented")
    quantization = _FORMATS[fmt]
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise UnsupportedModelError("compressed-tensors without config_groups is not implemented")
    blocks = {_group_block(name, group, quantization) for name, group in groups.items()}
    if len(blocks) > 1:
        raise UnsupportedModelError("compressed-tensors config_groups with and without blocks are not implemented")
    return Published(quantization, "F8_E4M3" if quantization == "fp8" else "I8", blocks.pop())


def _group_block(name: str, group: Any, quantization: Quantization) -> tuple[int, int] | None:
    """The block of one group's weights, after a check of everything else it says about them."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise UnsupportedModelError(f"compressed-tensors {name} without weights is not implemented")
    for key, expected in (("num_bits", 8), ("type", _NUMBER_TYPES[quantization]), ("symmetric", True)):
        if (value := weights.get(key, True if key == "symmetric" else None)) != expected:
            raise UnsupportedModelError(
                f"compressed-tensors {name} weights {key}={value!r} is not implemented: {expected!r} is"
            )
    strategy = weights.get("strategy")
    if strategy == "block":
        return _block(weights.get("block_structure"), "block_structure")
    if strategy not in ("channel", "tensor"):
        raise UnsupportedModelError(
            f"compressed-tensors {name} weights strategy={strategy!r} is not implemented: "
            "'channel', 'tensor' and 'block' are"
        )
    return None


def _block(value: Any, key: str) -> tuple[int, int]:
    if not (isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)):
        raise UnsupportedModelError(f"quantization_config {key}={value!r} must be two whole numbers, at least 1")
    return value[0], value[1]
