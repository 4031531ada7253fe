"""A tiny Llama written in every format, with real tokenizer files."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jprefill.model.config import ModelConfig
from jprefill.model.weights import weight_shapes

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def vocabulary() -> dict[str, int]:
    return {token: i for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>", "ab"])}


def llama_cpp_rows(array: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's row order, row by row: half s of pair i of head h goes to 2i + s."""
    head_dim = len(array) // num_heads
    result = np.empty_like(array)
    for h in range(num_heads):
        for s in range(2):
            for i in range(head_dim // 2):
                result[h * head_dim + 2 * i + s] = array[h * head_dim + s * (head_dim // 2) + i]
    return result


@dataclass
class TinyModel:
    """`hf` may be changed before the first use of `weights`."""

    hf: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        self.hf = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": len(vocabulary()),
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": NUM_HEADS,
            "num_key_value_heads": NUM_KV_HEADS,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "rms_norm_eps": float(np.float32(1e-5)),  # GGUF holds float32
            "max_position_embeddings": 512,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": False,
        } | self.hf
        rng = np.random.default_rng(self.seed)
        shapes = weight_shapes(ModelConfig.from_hf(self.hf))
        self.weights = {
            name: rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()
        }

    def write_hf(self, directory: Path, num_shards: int = 1) -> Path:
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.hf))
        write_tokenizer(directory)
        names = list(self.weights)
        if num_shards == 1:
            save_file(self.weights, directory / "model.safetensors", {"format": "pt"})
            return directory
        weight_map = {name: f"model-{i % num_shards:05}.safetensors" for i, name in enumerate(names)}
        for file in set(weight_map.values()):
            save_file({n: self.weights[n] for n in names if weight_map[n] == file}, directory / file)
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        return directory

    def write_gguf(self, path: Path, kind: str = "F32", **metadata: Any) -> dict[str, np.ndarray]:
        """Writes matrices as `kind` and vectors as F32; returns what they hold, by Hugging Face name."""
        writer = gguf.GGUFWriter(path, self.hf["model_type"])
        add_metadata(writer, self.hf)
        for key, value in metadata.items():
            getattr(writer, key)(value)
        held = {}
        for name, array in self.weights.items():
            array = array.astype(np.float32)
            stored = gguf.GGMLQuantizationType[kind if array.ndim == 2 else "F32"]
            rows = self._gguf_rows(name, array)
            data = gguf.quants.quantize(rows, stored)
            writer.add_tensor(gguf_name(name), data, raw_dtype=stored)
            held[name] = self._hf_rows(name, gguf.quants.dequantize(data, stored))
        if (freqs := getattr(self, "rope_freqs", None)) is not None:
            writer.add_tensor("rope_freqs.weight", freqs.astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return held

    def _gguf_rows(self, name: str, array: np.ndarray) -> np.ndarray:
        heads = self._heads(name)
        return llama_cpp_rows(array, heads) if heads else array

    def _hf_rows(self, name: str, array: np.ndarray) -> np.ndarray:
        heads = self._heads(name)
        if not heads:
            return array
        order = llama_cpp_rows(np.arange(len(array)), heads)
        result = np.empty_like(array)
        result[order] = array
        return result

    def _heads(self, name: str) -> int | None:
        """Heads whose rows llama.cpp's converter reorders: of its `llama` architecture only."""
        if self.hf["model_type"] != "llama":
            return None
        return NUM_HEADS if ".q_proj." in name else NUM_KV_HEADS if ".k_proj." in name else None


def gguf_name(name: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, kind = name.rsplit(".", 1)
    if stem in top:
        return f"{top[stem]}.{kind}"
    _, _, layer, leaf = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[leaf]}.{kind}"


def add_metadata(writer: gguf.GGUFWriter, hf: dict[str, Any]) -> None:
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_head_count(hf["num_attention_heads"])
    writer.add_head_count_kv(hf["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    writer.add_rope_freq_base(hf["rope_theta"])
    writer.add_rope_dimension_count(hf["head_dim"])
    tokens = list(vocabulary())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in ("<s>", "</s>") else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))


def write_tokenizer(directory: Path) -> None:
    backend = Tokenizer(models.BPE(vocabulary(), [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture
def tiny() -> TinyModel:
    return TinyModel()


@pytest.fixture
def make_tiny() -> type[TinyModel]:
    return TinyModel


@pytest.fixture
def hf_directory(tiny: TinyModel, tmp_path: Path) -> Path:
    return tiny.write_hf(tmp_path / "tiny")
