"""`jprefill kv`: what a disk tier holds, and the blocks of a prompt as a file.

jprefill kv stat --kv-disk-path kv
jprefill kv export --model checkpoints/mine --kv-disk-path kv --prompt-file profile.txt --output blocks.safetensors
jprefill kv import --model checkpoints/mine --kv-disk-path kv --input blocks.safetensors

A server may be running on the folder. It finds imported blocks when it starts the next time.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from jprefill.config import EngineConfig
from jprefill.errors import ConfigError, InvalidRequestError
from jprefill.flags import add_flags, from_args
from jprefill.kvstore.block_file import DTYPES, BlockForm, Miss, block_path, read_block, scan
from jprefill.kvstore.disk_tier import NAME_FILE, DiskTier, check_folder
from jprefill.kvstore.exchange import export_blocks, import_blocks
from jprefill.kvstore.hashing import KeyMaker
from jprefill.types import TokenIds

_NO_LIMIT = 2**62  # bytes; a command must never evict what a server keeps: the server knows its own limit


@dataclass(frozen=True)
class ModelBlocks:
    """What a folder holds of one model.

    Attributes:
      model: its name when the blocks were written; "" where nobody wrote it down.
      oldest: time of last use of the block unused for longest, ISO 8601, UTC; `newest` likewise.
    """

    fingerprint: str
    model: str
    num_blocks: int
    num_bytes: int
    oldest: str
    newest: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the three commands and their flags."""
    parsers = parser.add_subparsers(dest="kv_command", metavar="COMMAND", required=True)
    stat = _add(parsers, "stat", "what a folder holds")
    stat.add_argument("--kv-disk-path", required=True, metavar="DIR", help="the folder")
    for name, text in (("export", "write the stored blocks of a prompt to a file"), ("import", "store such a file")):
        sub = _add(parsers, name, text)
        sub.add_argument("--model", required=True, metavar="MODEL", help="whose blocks: as for `jprefill serve`")
        sub.add_argument("--salt", default="", metavar="TEXT", help="of the tenant that they belong to (default: none)")
        if name == "export":
            sub.add_argument("--prompt-file", required=True, metavar="FILE", help="the text as the model sees it")
            sub.add_argument("--output", required=True, metavar="FILE", help="the safetensors file to write")
        else:
            sub.add_argument("--input", required=True, metavar="FILE", help="the safetensors file to read")
        add_flags(sub, EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Runs one of them; exit status 0."""
    return {"stat": _stat, "export": _export, "import": _import}[args.kv_command](args)


def folder_blocks(root: Path) -> list[ModelBlocks]:
    """Counts what a disk tier's folder holds, by model; the most recently used model first. Reads names and sizes.

    Raises:
      ConfigError: there is no such folder, or it cannot be read.
    """
    sums: dict[bytes, list[int]] = {}
    try:
        check_folder(root, makes=False)
        for entry in scan(root):
            blocks, size, oldest, newest = sums.get(entry.fingerprint, [0, 0, entry.used_ns, entry.used_ns])
            span = [min(oldest, entry.used_ns), max(newest, entry.used_ns)]
            sums[entry.fingerprint] = [blocks + 1, size + entry.num_bytes, *span]
    except OSError as error:
        raise ConfigError(f"kv_disk_path={str(root)!r}: {error.strerror}") from None
    return [
        ModelBlocks(fingerprint.hex(), _name(root / fingerprint.hex() / NAME_FILE), blocks, size, _day(old), _day(new))
        for fingerprint, (blocks, size, old, new) in sorted(sums.items(), key=lambda item: -item[1][3])
    ]


def _add(parsers: Any, name: str, text: str) -> argparse.ArgumentParser:
    sub = parsers.add_parser(name, help=text, description=text, allow_abbrev=False)
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    return sub


def _stat(args: argparse.Namespace) -> int:
    models = folder_blocks(Path(args.kv_disk_path))
    sums = {"num_blocks": sum(m.num_blocks for m in models), "num_bytes": sum(m.num_bytes for m in models)}
    if args.json:
        print(json.dumps({**sums, "models": [asdict(model) for model in models]}))
        return 0
    print(f"{sums['num_blocks']:,} blocks, {sums['num_bytes'] / 2**20:,.1f} MiB; models: {len(models)}")
    for m in models:
        print(f"{m.fingerprint[:12]}  {m.num_blocks:,} blocks  {m.num_bytes / 2**20:,.1f} MiB  {m.model}")
        print(f"{'':12}  last used {m.oldest} to {m.newest}")
    return 0


def _export(args: argparse.Namespace) -> int:
    config, root = _settings(args)
    text = _text(args.prompt_file)
    model = _open(args.model, config)
    keys = model.maker.keys(model.encode(text), args.salt)
    payloads = []
    for key, tokens in zip(keys.hashes, keys.tokens, strict=True):
        try:
            payload = read_block(block_path(root, model.form.fingerprint, key), model.form, key, tokens)
        except OSError as error:
            raise ConfigError(f"kv_disk_path={str(root)!r}: {error.strerror}") from None
        if isinstance(payload, Miss):
            break
        payloads.append(payload)
    if not payloads:
        raise InvalidRequestError(f"kv_disk_path={str(root)!r}: holds no block of this prompt, model and salt")
    export_blocks(Path(args.output), model.form, keys, payloads, model_name=model.name)
    counts = {"num_blocks": len(payloads), "num_prompt_blocks": len(keys), "block_size": model.form.block_size}
    _report(args, f"exported {len(payloads)} of {len(keys)} blocks of {model.name} to {args.output}", counts)
    return 0


def _import(args: argparse.Namespace) -> int:
    config, root = _settings(args)
    model = _open(args.model, config)
    found = import_blocks(Path(args.input), model.form, model.maker, args.salt)
    disk = DiskTier(root, _NO_LIMIT, model.form, model_name=model.name)
    for key, tokens, payload in reversed(list(zip(found.keys.hashes, found.keys.tokens, found.payloads, strict=True))):
        if not disk.put(key, tokens, payload):
            raise ConfigError(f"kv_disk_path={str(root)!r}: blocks cannot be written there")
    counts = {"num_blocks": len(found.keys), "block_size": model.form.block_size}
    _report(args, f"imported {len(found.keys)} blocks of {model.name} into {root}", counts)
    return 0


def _settings(args: argparse.Namespace) -> tuple[EngineConfig, Path]:
    config = from_args(args, EngineConfig)
    if config.kv_disk_path is None:
        raise ConfigError("--kv-disk-path: must be given: the folder of the disk tier")
    return config, Path(config.kv_disk_path)


@dataclass(frozen=True)
class _Model:
    name: str
    form: BlockForm
    maker: KeyMaker
    encode: Callable[[str], TokenIds]


def _open(path: str, config: EngineConfig) -> _Model:
    """Loads the weights, since the fingerprint is over all of them."""
    from jprefill.kvstore.fingerprint import fingerprint  # here: these import JAX, which `--help` must not
    from jprefill.model import checkpoints
    from jprefill.tokenization.load import load_tokenizer

    checkpoint = checkpoints.load(path, dtype=config.dtype, quantization=config.quantization, progress=True)
    tokenizer = load_tokenizer(checkpoint.tokenizer_path)

    def encode(text: str | None) -> TokenIds:
        return np.array(tokenizer.encode(text, add_bos=tokenizer.adds_bos) if text else [], np.int32)

    c = checkpoint.config
    shape = (c.num_layers, 2, config.block_size, c.num_kv_heads, c.head_dim)
    form = BlockForm(fingerprint(c, checkpoint.weights, config), shape, DTYPES[config.dtype])
    maker = KeyMaker(form.fingerprint, config.block_size, encode(config.shared_prompt))
    return _Model(checkpoint.name, form, maker, encode)


def _text(path: str) -> str:
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"--prompt-file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"--prompt-file {path}: not UTF-8 at byte {error.start}") from None
    return text.removesuffix("\n")


def _name(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _day(used_ns: int) -> str:
    return datetime.fromtimestamp(used_ns / 1e9, UTC).isoformat(timespec="seconds")


def _report(args: argparse.Namespace, line: str, counts: dict[str, int]) -> None:
    print(json.dumps(counts) if args.json else line)
