"""Log lines: text for people, JSON for collectors. Everything goes to stderr through `logging`."""

import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec


class TextFormatter(logging.Formatter):
    """`12:00:01 INFO jprefill.access: request route=/v1/score status=200 ...`; empty fields are left out."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback after it if there is one."""
        fields = "".join(f" {key}={value}" for key, value in _fields(record).items() if value is not None)
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        line = f"{time} {record.levelname} {record.name}: {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line with the keys `ts`, `level`, `event` and those of the record."""

    def format(self, record: logging.LogRecord) -> str:
        """A single line always: a traceback becomes a field."""
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "logger": record.name,
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def set_up_logs(log_format: Literal["text", "json"], level: str) -> None:
    """Sends jprefill's and uvicorn's lines to stderr. Importing jprefill as a library sets up nothing."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    for name, minimum in (("jprefill", level.upper()), ("uvicorn", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(minimum)
        logger.propagate = False


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """What a caller passed as `extra={"fields": {...}}`."""
    return getattr(record, "fields", {})
