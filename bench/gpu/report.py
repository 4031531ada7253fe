"""The tables that a run prints."""

from collections.abc import Sequence
from typing import Any


def table(columns: Sequence[str], records: Sequence[dict[str, Any]]) -> str:
    """Records as aligned text, one a line; a failure stands behind what is known of its record."""
    columns = [column for column in columns if any(record.get(column) is not None for record in records)]
    rows = [[_cell(column, record.get(column)) for column in columns] for record in records]
    widths = [max(len(text) for text in column) for column in zip(columns, *rows, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in (columns, *rows)]
    notes = ["", *(f"  ! {error}" if (error := _error(record)) else "" for record in records)]
    return "\n".join((line + note).rstrip() for line, note in zip(lines, notes, strict=True))


def _error(record: dict[str, Any]) -> str:
    found = [record[key] for key in ("error", "peer_error", "note") if record.get(key)]
    return " | ".join(text.splitlines()[0][:160] for text in found)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if column.endswith("_bytes"):
        return f"{value / 2**20:,.1f} MiB"
    if column.endswith(("share", "peak_error", "spread")):
        return f"{100 * value:.1f} %"
    if column == "gb_per_s":
        return f"{value:,.2f}"
    if column.endswith("_per_s"):
        return f"{value:,.0f}"
    if column.endswith("_s") or column == "seconds":
        return f"{1000 * value:,.3f} ms" if value < 1 else f"{value:,.2f} s"
    if column in ("max_error", "relative_error", "ours_max_delta", "peer_max_delta"):
        return f"{value:.1e}"
    return f"{value:,.2f}" if isinstance(value, float) else str(value)
