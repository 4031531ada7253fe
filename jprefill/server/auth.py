"""Bearer keys."""

import hashlib
import secrets
from collections.abc import Iterable

from starlette.types import Scope

from jprefill.errors import AuthenticationError
from jprefill.server.record import header

# Probes of a load balancer carry no key. Everything else needs one, whatever route is added later.
OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/ping"})


class Keys:
    """The keys that open this server. With none, every request passes (also an empty `Bearer `)."""

    def __init__(self, keys: Iterable[str]):
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, scope: Scope) -> None:
        """Refuses a request without a valid key.

        The path is `scope["path"]`: a URL rebuilt from the Host header can be forged (CVE-2026-48746).

        Raises:
          AuthenticationError: no key or a wrong one.
        """
        if not self._digests or scope["path"] in OPEN_PATHS:
            return
        key = sent_key(scope)
        digest = _digest(key.encode("latin-1"))
        # Every key is compared, and digests have one length: the time tells nothing about the keys.
        matches = [secrets.compare_digest(digest, known) for known in self._digests]
        if not key or not any(matches):
            raise AuthenticationError("the API key is missing or wrong: send Authorization: Bearer KEY")


def sent_key(scope: Scope) -> str:
    """The key in `Authorization: Bearer KEY`, one character per byte; empty if there is none."""
    scheme, _, key = (header(scope, b"authorization") or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
