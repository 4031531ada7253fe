"""`Variant`: one way of running our engine, as `--between` spells it."""

import re
from dataclasses import dataclass, replace
from typing import Any, get_args

from jprefill.config import EngineConfig, Layout
from jprefill.errors import ConfigError

_SPELLING = re.compile(r"(?P<layout>[a-z]+)(:(?P<chunk_size>\d+))?(?P<pack>\+pack)?")


@dataclass(frozen=True, slots=True)
class Variant:
    """Engine settings, and whether prompts are submitted together (packed) or one by one."""

    config: EngineConfig
    is_packed: bool = False

    def __str__(self) -> str:
        chunk = "" if self.config.chunk_size is None else f":{self.config.chunk_size}"
        pack = "+pack" if self.is_packed else ""
        return f"{self.config.layout}{chunk}{pack}"


def parse_variants(text: str, base: EngineConfig) -> tuple[Variant, ...]:
    """Reads `LAYOUT[:CHUNK_SIZE][+pack],...`, at least two; what is left out comes from `base`.

    Raises:
      ConfigError: a spelling, layout or chunk size that is not allowed, or a single variant.
    """
    variants = tuple(_parse(part.strip(), base) for part in text.split(","))
    if len(set(variants)) != len(variants) or len(variants) < 2:
        raise ConfigError(f"--between {text!r}: name at least two different variants, like stream,hybrid,full")
    return variants


def _parse(part: str, base: EngineConfig) -> Variant:
    match = _SPELLING.fullmatch(part)
    if not match or match["layout"] not in get_args(Layout):
        layouts = ", ".join(get_args(Layout))
        raise ConfigError(f"--between {part!r}: must be LAYOUT[:CHUNK_SIZE][+pack], LAYOUT one of {layouts}")
    changes: dict[str, Any] = {"layout": match["layout"]}
    if match["chunk_size"]:
        changes["chunk_size"] = int(match["chunk_size"])
    return Variant(replace(base, **changes), is_packed=match["pack"] is not None)
