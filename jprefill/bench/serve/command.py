"""`jprefill bench serve`: latency of a running server, ours or any that speaks OpenAI's completions, under load.

jprefill bench serve --workload post_recommendation --scale 10 --rates 1,2,4,inf --goodput-slo-ms 2000
jprefill bench serve --backend openai --base-url http://gpu:8000 --workload trace:trace.jsonl --rates recorded

Each rate and seed is a run of its own, and its prompts have not been seen before: their tokens carry a salt, so that
what an earlier run left in a prefix store is of no use. Prompts are made before the clock starts; they take
about 6 bytes of memory a token.
"""

import argparse
import asyncio
import json
import math
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jprefill
from jprefill.bench.local import positive
from jprefill.bench.serve.clients import (
    BACKENDS,
    Language,
    connected,
    encode_body,
    first_model,
    model_tokens,
    sender,
    try_out,
    words,
)
from jprefill.bench.serve.driver import drive
from jprefill.bench.serve.report import HEADER, Run, draw, row, summarise
from jprefill.bench.workloads import WORKLOADS, Workload, make_workload
from jprefill.errors import ConfigError

if TYPE_CHECKING:
    from httpx import AsyncClient

_RECORDED = "recorded"
Rate = float | str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `jprefill bench serve`."""
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="(default: %(default)s)")
    parser.add_argument(
        "--backend", choices=tuple(BACKENDS), default="jprefill", help="/v1/score of ours, or OpenAI's /v1/completions"
    )
    parser.add_argument("--model", metavar="NAME", help="as the server calls it (default: the first that it lists)")
    parser.add_argument("--api-key", metavar="KEY")
    parser.add_argument(
        "--workload",
        default="short_labels",
        metavar="NAME",
        help=f"{', '.join(WORKLOADS)} or trace:FILE (short_labels)",
    )
    parser.add_argument("--scale", type=_above_zero, default=1.0, metavar="X", help="divides all token counts (1)")
    parser.add_argument(
        "--rates",
        type=_rates,
        default=(math.inf,),
        metavar="Q,Q,...",
        help="requests per second, in Poisson arrivals; inf: all at once; recorded: as in the trace (default: inf)",
    )
    parser.add_argument("--num-requests", type=positive, metavar="N", help="of each run (default: the workload's)")
    parser.add_argument("--seeds", type=_seeds, default=(0,), metavar="N,N,...", help="one run a rate for each (0)")
    parser.add_argument(
        "--prompts", choices=("ids", "text"), default="ids", help="text needs no /tokenize, but counts words as tokens"
    )
    parser.add_argument("--salt", type=int, metavar="N", help="of the prompts, to repeat a run (default: by the clock)")
    parser.add_argument("--warm-up", type=int, default=1, metavar="N", help="requests before each run, uncounted (1)")
    parser.add_argument("--timeout-s", type=_above_zero, default=600.0, metavar="S", help="of one request (600)")
    parser.add_argument("--goodput-slo-ms", type=_above_zero, metavar="MS", help="what a good answer may take")
    parser.add_argument("--label", metavar="TEXT", help="what the records call the server (default: the backend)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record for each run there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw latencies against rates there")


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 1 if a run had no good answer at all, else 0.

    Raises:
      ConfigError: a flag cannot be used, or the server does not answer.
    """
    _check(args)
    args = argparse.Namespace(**vars(args) | {"salt": time.time_ns() if args.salt is None else args.salt})
    setting, runs = asyncio.run(_measure(args))
    pooled = [summarise(*_names(args), of_rate, _slo_s(args)) for of_rate in runs]
    records = [summarise(*_names(args), [one], _slo_s(args)) for of_rate in runs for one in of_rate]
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps([asdict(record) | setting for record in records], indent=1, allow_nan=False)
        args.json.write_text(text + "\n", encoding="utf-8")
    if args.plot:
        draw(pooled, args.plot)
    return 0 if all(record.num_ok for record in records) else 1


def _check(args: argparse.Namespace) -> None:
    """What can be wrong is said before a request is sent."""
    if args.warm_up < 0:
        raise ConfigError(f"--warm-up {args.warm_up}: must be at least 0")
    if _RECORDED in args.rates and not args.workload.startswith("trace:"):
        raise ConfigError(
            f"--rates {_RECORDED}: --workload {args.workload} has no times of its own, only trace:FILE has"
        )
    if args.plot and find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'jprefill[plot]'")
    if args.plot and all(rate == math.inf for rate in args.rates):
        raise ConfigError("--plot: there is no finite rate in --rates to draw")


async def _measure(args: argparse.Namespace) -> tuple[dict[str, Any], list[list[Run]]]:
    """The setting, and for each rate the runs of all seeds. Prints as it goes."""
    workloads = {seed: _workload(args, seed) for seed in args.seeds}
    async with connected(args.base_url, args.api_key) as client:
        model = args.model or await first_model(client)
        language = words() if args.prompts == "text" else await model_tokens(client, model)
        setting = _setting(args, model, next(iter(workloads.values())))
        print("\n".join(f"{key}: {value}" for key, value in setting.items()))
        print(HEADER, flush=True)
        load = _Load(client, model, language, args)
        runs = []
        for rate in args.rates:
            runs.append([await load.run(rate, seed, workload) for seed, workload in workloads.items()])
            print(row(summarise(*_names(args), runs[-1], _slo_s(args))), flush=True)
    return setting, runs


class _Load:
    """Everything that the runs share. Every run has a salt of its own."""

    def __init__(self, client: "AsyncClient", model: str, language: Language, args: argparse.Namespace):
        self._client = client
        self._backend = BACKENDS[args.backend]
        self._model = model
        self._language = language
        self._args = args

    async def run(self, rate: Rate, seed: int, workload: Workload) -> Run:
        """Warms up, then sends the workload at one rate.

        Raises:
          ConfigError: a request before the run is not answered.
        """
        timed = workload if rate == _RECORDED else workload.at_rate(float(rate), seed)
        for body in self._bodies(timed.first(self._args.warm_up), f"{rate} warm-up"):
            await try_out(self._client, self._backend, body, self._args.timeout_s)
        bodies = self._bodies(timed, str(rate))
        times_s = [arrival.at_s for arrival in timed.arrivals]
        send = sender(self._client, self._backend)
        outcomes = await drive(send, bodies, times_s, self._args.timeout_s)
        qps = float(rate) if rate != _RECORDED else len(times_s) / times_s[-1] if times_s[-1] else math.inf
        return Run(seed, qps, tuple(outcomes))

    def _bodies(self, workload: Workload, name: str) -> list[bytes]:
        salt = f"{self._args.salt} {name}"
        return [
            encode_body(self._backend, self._model, workload, arrival, self._language, salt)
            for arrival in workload.arrivals
        ]


def _workload(args: argparse.Namespace, seed: int) -> Workload:
    try:
        return make_workload(args.workload, seed, num_requests=args.num_requests, scale=args.scale)
    except ConfigError as error:
        raise ConfigError(f"--workload: {error.message}") from None


def _names(args: argparse.Namespace) -> tuple[str, str]:
    """What the records call the server, and the workload."""
    return args.label or args.backend, args.workload


def _slo_s(args: argparse.Namespace) -> float | None:
    return None if args.goodput_slo_ms is None else args.goodput_slo_ms / 1000


def _setting(args: argparse.Namespace, model: str, workload: Workload) -> dict[str, Any]:
    """What a reader needs to repeat the run; the same for all its records. The key is not for readers."""
    argv = ["***" if args.api_key and args.api_key in word else word for word in sys.argv[1:]]
    return {
        "backend": args.backend,
        "model": model,
        "scale": args.scale,
        "prompt_tokens": workload.num_tokens,
        "prompts": args.prompts,
        "salt": args.salt,
        "timeout_s": args.timeout_s,
        "goodput_slo_ms": args.goodput_slo_ms,
        "versions": {"jprefill": jprefill.__version__, "httpx": version("httpx"), "python": sys.version.split()[0]},
        "command": " ".join(["jprefill", *argv]),
    }


def _above_zero(text: str) -> float:
    """An argparse type: a finite number above 0."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number above 0")
    return value


def _rates(text: str) -> tuple[Rate, ...]:
    """An argparse type: rates, separated by commas."""
    rates = [_RECORDED if part.strip() == _RECORDED else _number(part) for part in text.split(",")]
    if bad := [rate for rate in rates if isinstance(rate, float) and not rate > 0]:
        raise argparse.ArgumentTypeError(f"{bad[0]:g}: must be above 0, inf or {_RECORDED}")
    return tuple(dict.fromkeys(rates))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number") from None


def _seeds(text: str) -> tuple[int, ...]:
    """An argparse type: whole numbers of at least 0, separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    if bad := [part for part in parts if not part.isdecimal()]:
        raise argparse.ArgumentTypeError(f"{bad[0]!r}: must be whole numbers, at least 0")
    return tuple(dict.fromkeys(map(int, parts)))
