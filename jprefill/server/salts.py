"""Salts: what keeps the stored prefixes of different callers apart."""

import hashlib
import re

from jprefill.errors import InvalidRequestError

SALT_RULE = "1 to 128 characters, none of @ / \\ NUL"
SALT_PATTERN = r"^[^@/\\\x00]{1,128}$"
_SALT = re.compile(r"[^@/\\\x00]{1,128}")


def check_salts(cache_salt: str | None, prompt_cache_key: str | None) -> tuple[str | None, str | None]:
    """Returns both fields of a body as they are.

    Raises:
      InvalidRequestError: one breaks `SALT_RULE`; `param` names it.
    """
    for param, value in (("cache_salt", cache_salt), ("prompt_cache_key", prompt_cache_key)):
        if value is not None and not _SALT.fullmatch(value):
            raise InvalidRequestError(f"{param} must have {SALT_RULE}", param=param)
    return cache_salt, prompt_cache_key


def join_salts(*parts: str | None) -> str:
    """One salt from several, hashed: neither their lengths nor their contents go any further.

    Each part is hashed by itself first, so that no part can pose as another or as two. Empty if all are.
    """
    if not any(parts):
        return ""
    digests = [hashlib.sha256((part or "").encode()).digest() for part in parts]
    return hashlib.sha256(b"".join(digests)).hexdigest()
