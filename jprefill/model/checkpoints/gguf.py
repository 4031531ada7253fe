"""GGUF files of `llama`, `qwen2` and `qwen3` models: names, config and row order translated back to Hugging Face's."""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jprefill.config import DType, Quantization
from jprefill.errors import CheckpointError, UnsupportedModelError
from jprefill.model.checkpoints.gguf_header import GGUFHeader, read_gguf_header
from jprefill.model.checkpoints.hf import cheap_fingerprint
from jprefill.model.checkpoints.source import Kind, StoredTensor, find
from jprefill.model.config import ModelConfig
from jprefill.model.weights import EMBED, FINAL_NORM, LM_HEAD, layer_name

_PLAIN = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_TOP_NAMES = {"token_embd.weight": EMBED, "output_norm.weight": FINAL_NORM, "output.weight": LM_HEAD}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_rot_embd": "self_attn.rotary_emb.inv_freq",
}
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_ROPE_FREQS = "rope_freqs.weight"
_LLAMA3_SCALINGS = tuple(
    {
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for factor in (8.0, 32.0)
)


class GGUFSource:
    """One GGUF file; quantised tensors are read as float32. Invariant: see `WeightSource`."""

    kind: Kind = "gguf"
    quantization: Quantization | None = None

    def __init__(self, path: Path):
        """Reads the header.

        Raises:
          CheckpointError: the file is damaged or truncated.
          UnsupportedModelError: another architecture, or a feature that is not implemented.
        """
        header = read_gguf_header(path)
        self.name = path.stem
        self.tokenizer_path = path
        self.hf_config = hf_config_of(header)
        self.config = ModelConfig.from_hf(self.hf_config)
        self._path, self._raw_header = path, header.raw
        self._tensors = {hf_name(name): entry for name, entry in header.tensors.items() if name != _ROPE_FREQS}

    def names(self) -> set[str]:
        """See `WeightSource`."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource`."""
        return find(self._tensors, name, self._path.name).shape

    def dtype(self, name: str) -> np.dtype:
        """See `WeightSource`."""
        stored = find(self._tensors, name, self._path.name).format
        if stored not in _PLAIN and not _is_dequantisable(stored):
            raise CheckpointError(f"{self._path.name}: tensor {name!r} has type {stored}, which is not implemented")
        return _PLAIN.get(stored, np.dtype(np.float32))

    def file_name(self, name: str) -> str:
        """See `WeightSource`."""
        return self._path.name

    def read(self, name: str) -> np.ndarray:
        """See `WeightSource`."""
        dtype = self.dtype(name)
        array = _decode(self._tensors[name], name, dtype)
        if self.hf_config["model_type"] != "llama":  # only there did the converter change the order
            return array
        if ".q_proj." in name:
            return unpermute(array, self.config.num_heads)
        if ".k_proj." in name:
            return unpermute(array, self.config.num_kv_heads)
        return array

    def fingerprint(self, dtype: DType, quantization: Quantization | None) -> str:
        """See `WeightSource`. From header, size and time of change: no weight is read."""
        return cheap_fingerprint({self._path: self._raw_header}, self.config, dtype, quantization)


def hf_name(name: str) -> str:
    """Hugging Face name of a GGUF tensor; a name without one stays, and is refused as unexpected."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = re.fullmatch(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.(weight|bias)", name)
    if match is None or match[2] not in _LAYER_NAMES:
        return name
    suffix = "" if match[2] == "attn_rot_embd" else f".{match[3]}"
    return layer_name(int(match[1]), _LAYER_NAMES[match[2]] + suffix)


def unpermute(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a q or k projection (or bias) from llama.cpp's order back to Hugging Face's.

    Per head of size H, llama.cpp keeps the two halves that rope pairs next to each other:

        GGUF            0   H/2   1   H/2+1   2   H/2+2 ...
        Hugging Face    0   1   2 ...             H/2   H/2+1 ...

    Source: llama.cpp `convert_hf_to_gguf.py`, `LlamaModel.permute`, whose inverse this is.
    """
    by_pair = array.reshape(num_heads, -1, 2, *array.shape[1:])  # [N, H/2, 2, ...]
    return np.ascontiguousarray(by_pair.swapaxes(1, 2)).reshape(array.shape)


def hf_config_of(header: GGUFHeader) -> dict[str, Any]:
    """The Hugging Face `config.json` that the GGUF metadata and tensors amount to.

    Raises:
      UnsupportedModelError: another architecture, or a feature that is not implemented, by name.
      CheckpointError: a key is missing or has the wrong type.
    """
    meta = _Metadata.of(header)
    meta.refuse_unsupported()
    embed_dim, num_heads = meta.count("embedding_length"), meta.count("attention.head_count")
    head_dim = meta.head_dim(embed_dim // max(num_heads, 1))
    theta = meta.number("rope.freq_base", 10_000.0)
    names = {hf_name(name) for name in header.tensors}
    return {
        "architectures": [_ARCHITECTURES[meta.architecture]],
        "model_type": meta.architecture,
        "vocab_size": math.prod(find(header.tensors, "token_embd.weight", "GGUF file").shape[:1]),
        "num_hidden_layers": meta.count("block_count"),
        "hidden_size": embed_dim,
        "intermediate_size": meta.count("feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": meta.count("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": meta.count("context_length"),
        "rope_parameters": {"rope_theta": theta, **_rope_scaling(header.tensors, theta, head_dim)},
        "tie_word_embeddings": LM_HEAD not in names,
        "attention_bias": layer_name(0, "self_attn.q_proj.bias") in names,
        "mlp_bias": layer_name(0, "mlp.up_proj.bias") in names,
    }


@dataclass(frozen=True)
class _Metadata:
    """The keys of one architecture: `llama.block_count`, `qwen2.block_count`."""

    architecture: str
    values: Mapping[str, Any]

    @classmethod
    def of(cls, header: GGUFHeader) -> "_Metadata":
        name = header.metadata.get("general.architecture")
        if name not in _ARCHITECTURES:
            raise UnsupportedModelError(
                f"GGUF architecture {name!r} is not implemented: {', '.join(_ARCHITECTURES)} are"
            )
        return cls(name, header.metadata)

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(f"{self.architecture}.{key}", default)

    def refuse_unsupported(self) -> None:
        for key, neutral in (
            ("rope.scaling.type", "none"),
            ("rope.scale_linear", 1.0),
            ("expert_count", 0),
            ("attention.sliding_window", 0),
            ("attention.causal", True),
        ):
            if (value := self.get(key, neutral)) != neutral:
                raise UnsupportedModelError(f"{self.architecture}.{key}={value!r} is not implemented: {neutral!r} is")

    def head_dim(self, default: int) -> int:
        head_dim = self.count("attention.key_length", default)
        for key in ("attention.value_length", "rope.dimension_count"):
            if (value := self.count(key, head_dim)) != head_dim:
                raise UnsupportedModelError(
                    f"{self.architecture}.{key}={value} differs from head_dim={head_dim}: not implemented"
                )
        return head_dim

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number; a list (one number per layer) only where all are the same."""
        value = self.get(key, default)
        if isinstance(value, list) and value:
            if len(set(value)) > 1:
                raise UnsupportedModelError(f"{self.architecture}.{key} differs between layers: not implemented")
            value = value[0]
        if type(value) is not int:
            raise CheckpointError(f"GGUF metadata: {self.architecture}.{key}={value!r} must be a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise CheckpointError(f"GGUF metadata: {self.architecture}.{key}={value!r} must be a number")
        return float(value)


def _rope_scaling(tensors: dict[str, StoredTensor], theta: float, head_dim: int) -> dict[str, Any]:
    """Names the scaling that `rope_freqs.weight` (divisors of the rope frequencies) was made from."""
    if _ROPE_FREQS not in tensors:
        return {"rope_type": "default"}
    entry = tensors[_ROPE_FREQS]
    if entry.format != "F32":
        raise UnsupportedModelError(f"{_ROPE_FREQS} has type {entry.format}: F32 is implemented")
    divisors = entry.read_bytes(_ROPE_FREQS).view(np.float32)
    for scaling in _LLAMA3_SCALINGS:
        expected = llama3_divisors(theta, head_dim, scaling)
        if divisors.shape == expected.shape and np.allclose(divisors, expected, rtol=1e-4, atol=0):
            return {"rope_type": "llama3", **scaling}
    raise UnsupportedModelError(f"{_ROPE_FREQS} matches no llama3 rope scaling that is known (factor 8 or 32)")


def llama3_divisors(theta: float, head_dim: int, scaling: Mapping[str, float]) -> np.ndarray:
    """What llama3 scaling divides each of the H/2 rope frequencies by.

    Source: transformers `modeling_rope_utils._compute_llama3_parameters`.
    """
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    ratio = scaling["original_max_position_embeddings"] / wavelengths
    keep = np.clip((ratio - low) / (high - low), 0.0, 1.0)  # 1: short wave, kept; 0: long wave, divided
    return 1 / ((1 - keep) / scaling["factor"] + keep)


def _decode(tensor: StoredTensor, name: str, dtype: np.dtype) -> np.ndarray:
    data = tensor.read_bytes(name)
    if tensor.format in _PLAIN:
        return data.view(dtype).reshape(tensor.shape)
    rows = data.reshape(math.prod(tensor.shape[:-1]), -1)
    return dequantize(rows, GGMLQuantizationType[tensor.format]).reshape(tensor.shape)


@functools.cache
def _is_dequantisable(name: str) -> bool:
    """Whether `gguf.quants` knows the type: one block of zeros tells."""
    ggml_type = GGMLQuantizationType[name]
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[ggml_type][1]), np.uint8), ggml_type)
    except NotImplementedError:
        return False
    return True
