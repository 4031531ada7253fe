"""Compilation: where compiled programs are kept, and how many were made."""

import os
from pathlib import Path

import jax

from jprefill.errors import ConfigError

EVENT = "/jax/core/compile/backend_compile_duration"


def use_cache(folder: str | None) -> Path | None:
    """Keeps compiled programs in `folder` between processes. None: `~/.cache/jprefill/xla`; "": nowhere.

    Compiled programs are code, so the folder belongs to one user: it is made 0700.

    Returns:
      The folder, if there is one.

    Raises:
      ConfigError: others may write to the folder, or it cannot be made.
    """
    if folder == "":
        return None
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(folder) if folder else Path(home) / "jprefill" / "xla"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"compilation_cache={str(path)!r}: {error.strerror}") from None
    if path.stat().st_mode & 0o022:
        raise ConfigError(f"compilation_cache={str(path)!r} can be written by others: compiled programs are code")
    jax.config.update("jax_compilation_cache_dir", str(path))
    # By default JAX stores only what took a second to compile; ours are many and small.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path


class CompileCounter:
    """Compilations of this process since the counter was made. `close` stops the counting."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self._is_closed = False
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: object) -> None:
        if event == EVENT:
            self.count += 1
            self.seconds += duration_secs

    def close(self) -> None:
        """Unregisters the listener; closing twice is fine."""
        if self._is_closed:
            return
        self._is_closed = True
        jax.monitoring.unregister_event_duration_listener(self._listen)
