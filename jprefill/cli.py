"""The `jprefill` command. Each sub-command loads only what it needs; `--help` never loads JAX.

Results go to stdout, as a table or with `--json` as one JSON object; everything else goes to stderr.
Exit status: 0 done, 1 a comparison failed, 2 bad input or setting, 130 interrupted.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

from jprefill.config import DType, EngineConfig, Quantization, ServerConfig
from jprefill.environment import prepare
from jprefill.errors import InvalidRequestError, JPrefillError
from jprefill.flags import add_flags, from_args


@dataclass(frozen=True)
class Command:
    """A sub-command: one line of help, what adds its arguments, what runs it."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    prepare(os.environ)
    try:
        args = _parser(argv).parse_args(argv)
        return COMMANDS[args.command].run(args)
    except JPrefillError as error:
        print(f"jprefill: error: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jprefill", description="Decisions by large language models, in JAX.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    parsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    asked = next((arg for arg in argv if not arg.startswith("-")), None)
    for name, command in COMMANDS.items():
        sub = parsers.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
        if name == asked:  # the others' modules are not even imported
            command.add_arguments(sub)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import jprefill

        print(f"jprefill {jprefill.__version__}")
        parser.exit()


# ---- convert -----------------------------------------------------------------------------------------------


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="a Hugging Face folder, hub name or GGUF file")
    parser.add_argument("target", metavar="DST", help="the folder to write")
    parser.add_argument("--dtype", choices=get_args(DType), help="of the stored weights")
    parser.add_argument("--quantization", choices=get_args(Quantization), help="of the layers' matrices")
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it is there")
    _add_json(parser)


def _convert(args: argparse.Namespace) -> int:
    from jprefill.model import checkpoints

    form = {key: getattr(args, key) for key in ("dtype", "quantization") if getattr(args, key) is not None}
    manifest = checkpoints.convert(args.source, args.target, overwrite=args.overwrite, **form)
    if args.json:
        _print_json({"target": args.target, **asdict(manifest)})
    else:
        types = manifest.dtype if manifest.quantization is None else f"{manifest.quantization} and {manifest.dtype}"
        print(f"wrote {args.target}: {manifest.name}, {types}, from {manifest.source_kind}")
    return 0


# ---- score -------------------------------------------------------------------------------------------------


def _add_score(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    query = parser.add_mutually_exclusive_group(required=True)
    query.add_argument("--query", metavar="TEXT", help="what stands before every item")
    query.add_argument("--query-file", metavar="FILE", help="the same, from a file; - is stdin")
    items = parser.add_mutually_exclusive_group()
    items.add_argument("--item", action="append", metavar="TEXT", help="repeat for more (default: one, empty)")
    items.add_argument("--items-file", metavar="FILE", help="one item per line; - is stdin")
    parser.add_argument("--label", action="append", metavar="TEXT", required=True, help="repeat for more")
    parser.add_argument("--item-first", action="store_true", help="the prompt is item + query")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="X", help="(default 1)")
    _add_json(parser)
    add_flags(parser, EngineConfig)


def _score(args: argparse.Namespace) -> int:
    query = args.query if args.query_file is None else _read(args.query_file, "--query-file")
    items = args.item or [""]
    if args.items_file is not None:
        items = _read(args.items_file, "--items-file").splitlines()
    with _scorer(args) as scorer:
        scores = scorer.score(query, items, args.label, item_first=args.item_first, temperature=args.temperature)
    if args.json:
        _print_json({"model": args.model, "items": scores.to_dicts(), **_costs(scores)})
        return 0
    head = ["item", *map(repr, args.label), "label mass"]
    rows = [
        [_short(text), *map(_number, item.probabilities), _number(item.label_mass)]
        for text, item in zip(items, scores.items, strict=True)
    ]
    _print_table(head, rows)
    return 0


# ---- decide ------------------------------------------------------------------------------------------------


def _add_decide(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--input", metavar="TEXT", help="the text to decide about")
    text.add_argument("--input-file", metavar="FILE", help="the same, from a file; - is stdin")
    question = parser.add_mutually_exclusive_group(required=True)
    question.add_argument("--predicate", action="append", metavar="TEXT", help="a statement; repeat for more")
    question.add_argument("--choice", metavar="TEXT", help="a question with --option")
    question.add_argument("--rating", metavar="TEXT", help="a question with --level")
    question.add_argument("--questions-file", metavar="FILE", help="JSON: a list of OpenAI question objects")
    parser.add_argument("--option", action="append", metavar="TEXT", help="an answer of --choice; repeat")
    parser.add_argument("--level", action="append", metavar="TEXT", help="of --rating, lowest first; repeat")
    _add_json(parser)
    add_flags(parser, EngineConfig)


def _decide(args: argparse.Namespace) -> int:
    text = args.input if args.input_file is None else _read(args.input_file, "--input-file")
    questions = _questions(args)
    with _scorer(args) as scorer:
        decisions = scorer.decide(text, questions)
    if args.json:
        version = decisions.prompt_format_version
        answers = {"prompt_format_version": version, "answers": decisions.to_dicts()}
        _print_json({"model": args.model, **answers, **_costs(decisions)})
        return 0
    rows = []
    for question, answer in zip(questions, decisions.to_dicts(), strict=True):
        name = answer["name"] or _short(question["instructions"])
        for option, probability in _options(answer):
            rows.append([name, option, _number(probability), _number(answer["label_mass"])])
    _print_table(["question", "answer", "probability", "label mass"], rows)
    return 0


def _questions(args: argparse.Namespace) -> list[dict[str, Any]]:
    for flag, given, needed in (("--option", args.option, args.choice), ("--level", args.level, args.rating)):
        if (given is None) != (needed is None):
            raise InvalidRequestError(f"{flag} goes with {'--choice' if flag == '--option' else '--rating'}")
    if args.predicate is not None:
        return [{"type": "predicate", "instructions": text} for text in args.predicate]
    if args.choice is not None:
        choices = [{"value": text} for text in args.option]
        return [{"type": "choice", "instructions": args.choice, "choices": choices}]
    if args.rating is not None:
        levels = [{"label": text} for text in args.level]
        return [{"type": "score", "instructions": args.rating, "levels": levels}]
    try:
        questions = json.loads(_read(args.questions_file, "--questions-file"))
    except ValueError as error:
        raise InvalidRequestError(f"--questions-file {args.questions_file}: not JSON: {error}") from None
    if isinstance(questions, dict):
        questions = questions.get("questions")
    if not isinstance(questions, list):
        raise InvalidRequestError(f"--questions-file {args.questions_file}: must hold a list of question objects")
    return questions


def _options(answer: dict[str, Any]) -> list[tuple[str, float]]:
    """Rows of one answer: the statement, or every option."""
    if answer["type"] == "predicate":
        return [("true", answer["probability"])]
    if answer["type"] == "choice":
        return [(str(p["value"]), p["probability"]) for p in answer["probabilities"]]
    levels = [(f"{p['value']} {p['label']}", p["probability"]) for p in answer["probabilities"]]
    return [*levels, ("expected level", answer["score"])]


# ---- serve, compare, bench ---------------------------------------------------------------------------------


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    add_flags(parser, ServerConfig)
    add_flags(parser, EngineConfig)


def _serve(args: argparse.Namespace) -> int:
    engine, server = from_args(args, EngineConfig), from_args(args, ServerConfig)  # before the slow imports
    from jprefill.server.run import serve

    return serve(args.model, engine, server)


def _module_command(module: str, text: str) -> Command:
    """A command that stands in a module of its own: `add_arguments(parser)` and `run(args) -> int`."""
    return Command(
        text,
        lambda parser: import_module(module).add_arguments(parser),
        lambda args: import_module(module).run(args),
    )


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parsers = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, command in _BENCHMARKS.items():
        sub = parsers.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
        command.add_arguments(sub)


def _bench(args: argparse.Namespace) -> int:
    return _BENCHMARKS[args.benchmark].run(args)


# ---- shared ------------------------------------------------------------------------------------------------

_MODEL_HELP = "a converted checkpoint, a Hugging Face folder or hub name, or a GGUF file"


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="MODEL", help=_MODEL_HELP)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _scorer(args: argparse.Namespace) -> Any:
    config = from_args(args, EngineConfig)  # before the slow imports: a bad flag is answered at once
    from jprefill.scorer import Scorer

    return Scorer.from_config(args.model, config)


def _read(path: str, flag: str) -> str:
    """The text of a file, or of stdin for `-`, without the line break at its end."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"{flag} {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{flag} {path}: not UTF-8 at byte {error.start}") from None
    return text.removesuffix("\n")


def _costs(result: Any) -> dict[str, Any]:
    return {"usage": asdict(result.usage), "timings": asdict(result.timings)}


def _print_json(record: dict[str, Any]) -> None:
    print(json.dumps(record, ensure_ascii=False, allow_nan=False))


def _number(value: float) -> str:
    return f"{value:.4f}"


def _short(text: str, width: int = 48) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell, text to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in [head, *rows]:
        cells = [
            cell.rjust(width) if _is_number(cell) else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ]
        print("  ".join(cells).rstrip())


def _is_number(cell: str) -> bool:
    return cell.replace(".", "", 1).isdecimal()


_BENCHMARKS = {
    "offline": _module_command("jprefill.bench.offline", "time scoring in this process, without a server"),
    "ablate": _module_command("jprefill.bench.ablate", "what each part of the engine gives"),
    "jct": _module_command("jprefill.bench.jct", "how well job completion times are foretold"),
    "packing": _module_command("jprefill.bench.packing", "short prompts together against one at a time"),
    "prefix": _module_command("jprefill.bench.prefix", "time requests that share profiles, with and without the store"),
    "schedule": _module_command("jprefill.bench.schedule", "time one decision with thousands of requests waiting"),
    "serve": _module_command("jprefill.bench.serve.command", "load on a running server, at given rates"),
    "store": _module_command("jprefill.bench.store", "time the keys and the index of the prefix store"),
}

COMMANDS = {
    "serve": Command("answer over HTTP", _add_serve, _serve),
    "score": Command("probabilities of labels after a text", _add_score, _score),
    "decide": Command("answer questions about a text", _add_decide, _decide),
    "convert": Command("turn weights into a checkpoint of ours", _add_convert, _convert),
    "plan": _module_command("jprefill.planner.command", "what fits on a GPU, before you rent it"),
    "simulate": _module_command("jprefill.bench.simulate.command", "policies and routing on a fleet that is not there"),
    "compare": _module_command("jprefill.bench.compare", "compare scores with a reference file"),
    "kv": _module_command("jprefill.kvstore.command", "look into a disk tier, export and import its blocks"),
    "bench": Command("measure speed", _add_bench, _bench),
}
