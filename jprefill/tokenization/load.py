"""Finds the tokenizer of a checkpoint, and copies it."""

import shutil
from pathlib import Path

from jprefill.errors import CheckpointError
from jprefill.tokenization.api import Tokenizer
from jprefill.tokenization.gguf_vocabulary import load_gguf_tokenizer, write_gguf_tokenizer
from jprefill.tokenization.json_tokenizer import JsonTokenizer
from jprefill.tokenization.sentencepiece_tokenizer import SentencePieceTokenizer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def load_tokenizer(path: Path) -> Tokenizer:
    """Loads the tokenizer of a checkpoint.

    Args:
      path: a .gguf file, or a directory with `tokenizer.json`, else `tokenizer.model`, else one .gguf file.

    Raises:
      CheckpointError: none of them is there, or a file is broken.
    """
    if (path / "tokenizer.json").is_file():
        return JsonTokenizer.from_directory(path)
    if (path / "tokenizer.model").is_file():
        return SentencePieceTokenizer.from_directory(path)
    return load_gguf_tokenizer(_gguf_file(path))


def copy_tokenizer_files(source: Path, directory: Path) -> tuple[str, ...]:
    """Puts all that `load_tokenizer` needs into `directory`, so that a converted checkpoint stands alone.

    Args:
      source: as for `load_tokenizer`; a GGUF vocabulary is written as `tokenizer.json`.
      directory: made if missing.

    Returns:
      The names of the files written.

    Raises:
      CheckpointError: `source` has no tokenizer.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if not any((source / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        write_gguf_tokenizer(_gguf_file(source), directory)
        return ("tokenizer.json", "tokenizer_config.json")
    names = tuple(name for name in TOKENIZER_FILES if (source / name).is_file())
    if not directory.samefile(source):
        for name in names:
            shutil.copyfile(source / name, directory / name)
    return names


def _gguf_file(path: Path) -> Path:
    if path.is_file() and path.suffix == ".gguf":
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path.name}: no such directory or .gguf file")
    found = sorted(path.glob("*.gguf"))
    if len(found) != 1:
        raise CheckpointError(
            f"{path.name}: no tokenizer found: looked for tokenizer.json, tokenizer.model and one .gguf file"
            f" ({len(found)} are there)"
        )
    return found[0]
