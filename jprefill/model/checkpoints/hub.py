"""Models by `org/name`, through the Hugging Face cache (`HF_HOME`, `HF_HUB_OFFLINE`, `HF_TOKEN` count)."""

import re
from pathlib import Path

import huggingface_hub

from jprefill.errors import CheckpointError

_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]
# Repositories repeat their weights in other layouts; sub-folders hold other models (adapters, originals).
_IGNORED = ["consolidated*", "*/*"]


def is_repo_id(text: str) -> bool:
    """Whether `text` looks like `org/name`."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text, re.ASCII) is not None


def download(repo_id: str) -> Path:
    """Folder of the repository's snapshot in the local cache, downloaded where needed.

    Raises:
      CheckpointError: no such local path, and the hub refused, was not reached, or is switched off.
    """
    try:
        folder = huggingface_hub.snapshot_download(repo_id, allow_patterns=_PATTERNS, ignore_patterns=_IGNORED)
    except (
        OSError,
        ValueError,
    ) as error:  # hub and network errors derive from OSError, bad names from ValueError
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise CheckpointError(
            f"{repo_id}: no such local path, and the Hugging Face hub did not give it: {reason}"
        ) from None
    return Path(folder)
