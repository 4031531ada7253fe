"""What changed in an index since somebody asked. No JAX."""

from collections.abc import Iterable, Mapping


class ChangeLog:
    """Keys that came or went. Only the engine thread uses it.

    Args:
      max_keys: beyond, nobody seems to ask, and the log says that anything may have changed.
    """

    def __init__(self, max_keys: int):
        """Whoever asks first knows nothing: anything may have changed."""
        self._max_keys = max_keys
        self._keys: dict[bytes, bool] | None = None

    def note(self, keys: Iterable[bytes], *, is_cached: bool) -> None:
        """These keys are cached from now on, or are no more."""
        if self._keys is not None:
            self._keys |= dict.fromkeys(keys, is_cached)
            if len(self._keys) > self._max_keys:
                self._keys = None

    def take(self) -> Mapping[bytes, bool] | None:
        """What changed since the last call, and whether it is cached now; None: anything may have changed."""
        keys, self._keys = self._keys, {}
        return keys
