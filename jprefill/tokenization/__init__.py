"""Text to token ids and back, chat templates, and the checks that keep bad text and bad labels out.

Names are loaded on first use: `checks` and `labels` need no tokenizer library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jprefill.tokenization.api import Tokenizer
    from jprefill.tokenization.chat import ChatTemplate
    from jprefill.tokenization.checks import check_text, check_token_ids
    from jprefill.tokenization.gguf_vocabulary import write_gguf_tokenizer
    from jprefill.tokenization.labels import letter_labels, resolve_labels
    from jprefill.tokenization.load import copy_tokenizer_files, load_tokenizer

_MODULES = {
    "Tokenizer": "api",
    "ChatTemplate": "chat",
    "check_text": "checks",
    "check_token_ids": "checks",
    "write_gguf_tokenizer": "gguf_vocabulary",
    "letter_labels": "labels",
    "resolve_labels": "labels",
    "copy_tokenizer_files": "load",
    "load_tokenizer": "load",
}

__all__ = [
    "ChatTemplate",
    "Tokenizer",
    "check_text",
    "check_token_ids",
    "copy_tokenizer_files",
    "letter_labels",
    "load_tokenizer",
    "resolve_labels",
    "write_gguf_tokenizer",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
