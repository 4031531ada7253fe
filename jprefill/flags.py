"""Command-line flags and JPREFILL_* variables, made from the config dataclasses.

    field                 flag                  variable
    max_model_len         --max-model-len       JPREFILL_MAX_MODEL_LEN
    request_timeout_s     --request-timeout     JPREFILL_REQUEST_TIMEOUT       the unit leaves the name
    api_keys              --api-key             JPREFILL_API_KEY               repeat the flag, or use commas

A flag wins over its variable, a variable over the default. Types, help and defaults stand in `config.py`.
"""

import argparse
import inspect
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from jprefill.errors import ConfigError

# vLLM's spellings of the same settings
_ALIASES = {
    "max_batch_tokens": "--max-num-batched-tokens",
    "max_queued_requests": "--max-num-queued-reqs",
    "max_queued_tokens": "--max-num-queued-tokens",
}
_BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def add_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """Adds one flag per field of a config dataclass, in a group of its own."""
    group = parser.add_argument_group(f"{config.__name__} settings")
    help_texts = _help_texts(config)
    for f in fields(config):
        names = [_flag(f)] + ([_ALIASES[f.name]] if f.name in _ALIASES else [])
        options: dict[str, Any] = {"dest": f.name, "default": None, "help": _help(f, help_texts)}
        if _bare_type(f) is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = _metavar(f)
            options["action"] = "append" if get_origin(_bare_type(f)) is tuple else "store"
        group.add_argument(*names, **options)


def from_args[C](args: argparse.Namespace, config: type[C], environ: Mapping[str, str] | None = None) -> C:
    """Builds a config from parsed flags, then JPREFILL_* variables, then defaults.

    Args:
      args: of a parser that `add_flags(parser, config)` filled.
      environ: the variables; None takes the process's own.

    Raises:
      ConfigError: a value that does not parse or is not allowed; names the flag or variable.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for f in fields(config):  # pyright: ignore[reportArgumentType]  no type means "a dataclass"
        given = getattr(args, f.name, None)
        if given is not None:
            values[f.name] = _parse(f, given, _flag(f))
        elif environ.get(_variable(f)):  # an empty variable counts as not set
            values[f.name] = _parse(f, environ[_variable(f)], _variable(f))
    return config(**values)


def _flag(f: Field[Any]) -> str:
    name = f.name.removesuffix("_s")
    if _is_repeatable(f):
        name = name.removesuffix("s")
    return "--" + name.replace("_", "-")


def _variable(f: Field[Any]) -> str:
    return "JPREFILL_" + _flag(f).removeprefix("--").replace("-", "_").upper()


def _bare_type(f: Field[Any]) -> Any:
    """The field's type without `| None`."""
    if NoneType in get_args(f.type):
        return next(kind for kind in get_args(f.type) if kind is not NoneType)
    return f.type


def _is_repeatable(f: Field[Any]) -> bool:
    return _bare_type(f) == tuple[str, ...]


def _parse(f: Field[Any], given: Any, source: str) -> Any:
    kind = _bare_type(f)
    if isinstance(given, bool):
        return given
    if get_origin(kind) is tuple:
        given = [given] if isinstance(given, str) else given
        parts = [part.strip() for text in given for part in text.split(",") if part.strip()]
        return tuple(_parse_one(get_args(kind)[0], part, source) for part in parts)
    return _parse_one(kind, given, source)


def _parse_one(kind: Any, text: str, source: str) -> Any:
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise ConfigError(f"{source}={text!r}: allowed are {', '.join(get_args(kind))}")
        return text
    if kind is bool:
        if text.lower() not in _BOOLEANS:
            raise ConfigError(f"{source}={text!r}: allowed are {', '.join(_BOOLEANS)}")
        return _BOOLEANS[text.lower()]
    try:
        return kind(text)
    except ValueError:
        words = {int: "a whole number", float: "a number"}
        raise ConfigError(f"{source}={text!r}: must be {words[kind]}") from None


def _metavar(f: Field[Any]) -> str:
    kind = _bare_type(f)
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    if get_origin(kind) is tuple:
        return "TEXT" if _is_repeatable(f) else "N,N,..."
    return {int: "N", float: "SECONDS" if f.name.endswith("_s") else "X"}.get(kind, "TEXT")


def _help(f: Field[Any], help_texts: Mapping[str, str]) -> str:
    default = () if f.default is MISSING else f.default
    shown = "" if default is None or default == () else f"default {default}; "
    text = help_texts.get(f.name, f.name.replace("_", " ") + ".")
    return f"{text} ({shown}{_variable(f)})".replace("%", "%%")


def _help_texts(config: type) -> dict[str, str]:
    """The Attributes section of a Google-style docstring: field name -> text on one line."""
    _, _, section = (inspect.getdoc(config) or "").partition("Attributes:\n")
    section = section.split("\n\n")[0]
    entries = re.split(r"^  (?=\w+: )", section, flags=re.MULTILINE)
    pairs = (entry.split(": ", 1) for entry in entries if ": " in entry)
    return {name: " ".join(text.replace("`", "").split()) for name, text in pairs}
