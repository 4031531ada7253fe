"""What the small JSON files beside a vocabulary say: special tokens, BOS rule, chat template."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jprefill.errors import CheckpointError

ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class AddedText:
    """A token that the files add to a vocabulary; `lstrip`/`rstrip` swallow white space beside it."""

    text: str
    is_special: bool = True
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True)
class TokenizerSettings:
    """The files' answers; None or empty where they say nothing.

    Attributes:
      tokens: role to text; None where a file says that the model has no such token.
      model_ids: `bos_token` and `eos_token` ids of the model's files, for tokenizers whose files name none.
      adds_bos: `add_bos_token`; None: look at the vocabulary's own rule.
      is_legacy: SentencePiece only: a space goes before the text after *every* special token.
      added: id to token, on top of a SentencePiece vocabulary.
    """

    tokens: Mapping[str, str | None] = field(default_factory=dict)
    model_ids: Mapping[str, int] = field(default_factory=dict)
    adds_bos: bool | None = None
    chat_template: str | None = None
    is_legacy: bool = True
    added: Mapping[int, AddedText] = field(default_factory=dict)

    def token_id(self, role: str, token_to_id: Callable[[str], int | None]) -> int | None:
        """Id of the token with this role, None where the model has none.

        Raises:
          CheckpointError: the files name a token that the vocabulary lacks.
        """
        if not self.tokens:
            return self.model_ids.get(role)
        text = self.tokens.get(role)
        if text is None:
            return None
        token_id = token_to_id(text)
        if token_id is None:
            raise CheckpointError(f"tokenizer_config.json: {role} {text!r} is not in the vocabulary")
        return token_id


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; {} where there is no such file.

    Raises:
      CheckpointError: the file is no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path.name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} must hold a JSON object, not {type(value).__name__}")
    return value


def read_settings(directory: Path) -> TokenizerSettings:
    """Reads the files of a Hugging Face checkpoint directory; each of them may be missing.

    Raises:
      CheckpointError: a file is broken.
    """
    config = read_json(directory / "tokenizer_config.json")
    tokens = _role_texts(read_json(directory / "special_tokens_map.json")) | _role_texts(config)
    adds_bos = config.get("add_bos_token")
    return TokenizerSettings(
        tokens=tokens,
        model_ids=_model_ids(directory),
        adds_bos=None if adds_bos is None else bool(adds_bos),
        chat_template=_chat_template(directory, config),
        is_legacy=config.get("legacy") is not False,
        added=_added_texts(directory, config),
    )


def _role_texts(values: Mapping[str, Any]) -> dict[str, str | None]:
    """A role's value is a text, an AddedToken object, or null: the model has no such token."""
    texts: dict[str, str | None] = {}
    for role in ROLES:
        if role in values:
            value = values[role]
            text = value.get("content") if isinstance(value, dict) else value
            if text is not None and not isinstance(text, str):
                raise CheckpointError(f"{role} must be a text or an AddedToken object, not {text!r}")
            texts[role] = text
    return texts


def _model_ids(directory: Path) -> dict[str, int]:
    """`generation_config.json` over `config.json`; of several EOS ids the first."""
    ids: dict[str, int] = {}
    for name in ("config.json", "generation_config.json"):
        values = read_json(directory / name)
        for role in ("bos_token", "eos_token"):
            value = values.get(f"{role}_id")
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, int) and not isinstance(value, bool):
                ids[role] = value
    return ids


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The file of its own wins over `chat_template.json`, that over the key in `tokenizer_config.json`."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_bytes().decode(errors="replace")
    template = read_json(directory / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):  # [{"name": "default", "template": "..."}, {"name": "tool_use", ...}]
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _added_texts(directory: Path, config: Mapping[str, Any]) -> dict[int, AddedText]:
    entries = config.get("added_tokens_decoder") or {}
    try:
        return _parse_added(read_json(directory / "added_tokens.json"), entries)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointError("the added tokens are no map of id and text: see added_tokens_decoder") from None


def _parse_added(ids: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[int, AddedText]:
    added = {int(token_id): AddedText(text) for text, token_id in ids.items()}
    for token_id, entry in entries.items():
        added[int(token_id)] = AddedText(
            text=entry["content"],
            is_special=bool(entry.get("special", False)),
            lstrip=bool(entry.get("lstrip", False)),
            rstrip=bool(entry.get("rstrip", False)),
        )
    return added
