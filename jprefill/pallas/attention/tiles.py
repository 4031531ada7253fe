"""Tile sizes of the Triton kernel: one table, by GPU family and head size. No JAX here.

What bounds a tile is shared memory (`num_stages` blocks of K and V, and the queries) and registers (the float32
products and values of `block_q` rows, spread over `num_warps` warps). No half-precision entry spills a
register on its GPUs.
"""

from dataclasses import dataclass
from typing import Literal

from jprefill.errors import ConfigError

Family = Literal["ada", "ampere", "hopper"]


@dataclass(frozen=True)
class Tile:
    """`block_q` query rows (tokens x heads that share a KV head) against `block_kv` keys at a time."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int


# Shared memory a block may use: ada 101,376 B (L4, L40, A10), ampere 166,912 B (A100), hopper 232,448 B (H100, H200).
# A larger head size takes the entry of the next power of two.
_HALF: dict[Family, dict[int, Tile]] = {
    "ada": {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 8, 2)},
    "ampere": {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 32, 8, 2)},
    "hopper": {64: Tile(128, 128, 8, 2), 128: Tile(128, 128, 8, 2), 256: Tile(128, 64, 8, 2)},
}
# Without tensor cores: exact float32 is for checking numbers, not for speed.
_FLOAT32: dict[int, Tile] = {64: Tile(32, 16, 4, 2), 128: Tile(64, 16, 8, 2), 256: Tile(32, 16, 8, 2)}
# The rows that the head reads: small tiles on any GPU, for large ones would keep a few cores busy and the rest idle.
FEW_ROWS = 256
_HALF_FEW_ROWS: dict[int, Tile] = {64: Tile(32, 64, 4, 2), 128: Tile(32, 64, 4, 2), 256: Tile(16, 32, 4, 2)}
_FAMILIES: dict[Family, tuple[str, ...]] = {
    "ampere": ("A100", "A800", "A30"),
    "hopper": ("H100", "H200", "H800", "H20", "GH200", "B100", "B200", "GB200", "B300", "GB300"),
}


def family_of(device_kind: str) -> Family:
    """The family whose tiles a GPU takes; "ada", which has the least shared memory, where the name is not known."""
    words = device_kind.replace("-", " ").split()
    for family, names in _FAMILIES.items():
        if any(name in words for name in names):
            return family
    return "ada"


def tile_for(device_kind: str, head_dim: int, itemsize: int, num_query_rows: int) -> Tile:
    """The tile for a GPU (`Device.device_kind`), a head size, the bytes of one element and the size of the input.

    Raises:
      ConfigError: a head size beyond the table.
    """
    if itemsize != 2:
        table = _FLOAT32
    elif num_query_rows <= FEW_ROWS:
        table = _HALF_FEW_ROWS
    else:
        table = _HALF[family_of(device_kind)]
    for size, tile in table.items():
        if head_dim <= size:
            return tile
    raise ConfigError(f"head_dim={head_dim}: the triton attention kernel takes at most {max(table)}")
