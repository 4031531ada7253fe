"""Loads a GGUF model with Hugging Face transformers alone, dense: the side that jprefill is compared with."""

from pathlib import Path

import torch
from gguf import GGUFReader
from tokenizers import Tokenizer, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)


def load_model(
    path: Path, dtype: torch.dtype, attention: str = "sdpa", *, is_classifier: bool = False
) -> PreTrainedModel:
    """A GGUF file or a Hugging Face directory, in `dtype`, ready for inference.

    Without `dequantize=True` transformers keeps GGUF weights packed and unpacks them in every matmul: slower,
    and rounded in another place than a dense model.
    """
    options: dict[str, object] = {"dtype": dtype, "attn_implementation": attention}
    if path.is_file():
        options |= {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
        path = path.parent
    auto_class = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    return auto_class.from_pretrained(path, **options).eval()


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a GGUF file, with the splitting rule that the file names."""
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if _pre_tokenizer_name(path) == "smollm":
        _split_digits(tokenizer.backend_tokenizer)
    return tokenizer


def _pre_tokenizer_name(path: Path) -> str:
    field = GGUFReader(path).get_field("tokenizer.ggml.pre")
    return field.contents() if field else "default"


def _split_digits(backend: Tokenizer) -> None:
    """transformers drops `tokenizer.ggml.pre`; SmolLM2's own tokenizer.json splits single digits off first.

    It shows only where two or more spaces stand before a digit.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
