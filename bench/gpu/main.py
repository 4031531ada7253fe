"""The parent of a run: steps within a time budget, one JSON file, tables. Imports neither JAX nor PyTorch.

Started by `run.sh`. The JSON file is written again after every step, so a run that is killed leaves what it had.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.gpu.child import Child, ChildError
from bench.gpu.report import table
from bench.gpu.session import Session
from bench.gpu.sizes import FULL, TINY
from bench.gpu.steps import STEPS, Step

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("jax", "numpy", "jaxtyping", "tqdm")
SMI_FIELDS = "name,driver_version,memory.total,power.limit,clocks.max.sm,temperature.gpu"
LIMIT_S, TINY_LIMIT_S = 480.0, 60.0
TINY_BUDGET_S = 5.0  # of every step of a tiny run, which is never cut: it has few records


def main(argv: Sequence[str] | None = None) -> int:
    """Runs everything; 0 when no step failed."""
    args = _arguments().parse_args(argv)
    steps = _chosen(args.only)
    wheels = sorted(map(str, Path(args.wheels).resolve().glob("*.whl"))) if args.wheels else []
    sys.path += wheels  # a wheel of pure Python can be imported as it is
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(
            f"run.sh: {sys.executable} has no {', '.join(missing)}. Put wheels into a folder and name it:",
            file=sys.stderr,
        )
        print("  JPREFILL_WHEELS=FOLDER bench/gpu/run.sh    (jaxtyping needs wadler_lindig too)", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        session = _session(args, wheels, stack)
        try:
            session.machine = session.ask(session.ours, "describe")
        except ChildError as error:
            print(f"run.sh: JAX does not start: {error}", file=sys.stderr)
            return 2
        if session.machine["platform"] == "cpu" and not args.tiny:
            print(
                "run.sh: JAX sees no GPU here. `bench/gpu/run.sh --tiny` runs everything small on a CPU.",
                file=sys.stderr,
            )
            return 2
        return _run(session, args, steps)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench/gpu/run.sh", description="Measures jprefill on a GPU, next to PyTorch."
    )
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU: whether the script itself works")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", metavar="DIR", help="for JSON and logs")
    parser.add_argument(
        "--limit-s", type=float, metavar="N", help=f"whole run (default: {LIMIT_S:.0f}, tiny {TINY_LIMIT_S:.0f})"
    )
    parser.add_argument("--only", metavar="STEP,...", help=f"of {', '.join(step.name for step in STEPS)}")
    parser.add_argument("--attention", metavar="NAME", help="for passes (default: the fastest that is right)")
    parser.add_argument(
        "--torch-python", default=sys.executable, metavar="PATH", help="an interpreter that has PyTorch"
    )
    parser.add_argument(
        "--wheels", default=os.environ.get("JPREFILL_WHEELS"), metavar="DIR", help="wheels to import from"
    )
    return parser


def _session(args: argparse.Namespace, wheels: list[str], stack: ExitStack) -> Session:
    """Starts both children; they load their libraries at the same time."""
    paths = [str(ROOT), *wheels, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(paths), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if args.tiny:
        environment |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="jprefill-xla-"))
    stamp = f"{datetime.now(UTC):%Y%m%d-%H%M%S}"

    def child(name: str, python: str, module: str, *arguments: str) -> Child:
        command = [python, "-m", f"bench.gpu.{module}", *arguments]
        return stack.enter_context(Child(name, command, args.out / f"{name}-{stamp}.log", environment))

    ours = child("jprefill", sys.executable, "jax_worker", cache)
    peer = child("torch", args.torch_python, "torch_worker") if _has_torch(args.torch_python) else None
    limit_s = args.limit_s or (TINY_LIMIT_S if args.tiny else LIMIT_S)
    return Session(TINY if args.tiny else FULL, ours, peer, limit_s=limit_s, attention=args.attention)


def _has_torch(python: str) -> bool:
    """Another interpreter is taken at its owner's word; what is wrong with it shows when it is asked."""
    if python != sys.executable or importlib.util.find_spec("torch"):
        return True
    print(f"PyTorch: not in {python}; its part is left out (--torch-python names another interpreter)")
    return False


def _run(session: Session, args: argparse.Namespace, steps: Sequence[Step]) -> int:
    report = _header(session, args)
    name = "tiny" if args.tiny else session.machine["device"].lower().replace(" ", "-")
    path = args.out / f"gpu-{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    print(json.dumps(report["machine"], indent=1), flush=True)
    for step in steps:
        report["steps"][step.name] = _run_step(session, step, report["results"], is_tiny=args.tiny)
        report["total_s"] = session.elapsed_s
        report |= {"ceiling_tflops": session.ceiling_tflops, "attention": session.attention, "planned": session.planned}
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    failed = [name for name, step in report["steps"].items() if step["status"] == "failed"]
    print(f"\n{path}   {session.elapsed_s:.0f} s" + (f"   failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def _chosen(only: str | None) -> list[Step]:
    names = only.split(",") if only else [step.name for step in STEPS]
    if unknown := set(names) - {step.name for step in STEPS}:
        sys.exit(f"run.sh: --only {sorted(unknown)[0]!r}: known are {', '.join(step.name for step in STEPS)}")
    return [step for step in STEPS if step.name in names]


def _header(session: Session, args: argparse.Namespace) -> dict[str, Any]:
    """What a reader must know before the first number."""
    machine = session.machine | {
        "nvidia_smi": _output("nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader")
    }
    if session.peer is not None:
        answer = session.attempt(session.peer, "describe")
        if "error" in answer:
            print(f"PyTorch: left out: {answer['error']}")
            session.peer = None
        machine["peer"] = answer
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["bench/gpu/run.sh", *sys.argv[1:]]),
        "commit": _output("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        "is_tiny": args.tiny,
        "limit_s": session.limit_s,
        "machine": machine,
        "steps": {},
        "results": {},
    }


def _output(*command: str) -> str | None:
    """What a program prints; None where it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _run_step(session: Session, step: Step, results: dict[str, Any], *, is_tiny: bool) -> dict[str, Any]:
    """Runs one step into `results`; how it went."""
    budget_s = TINY_BUDGET_S if is_tiny else step.budget_s
    print(f"\n== {step.name}: {step.title}", flush=True)
    if session.left_s < budget_s:
        note = (
            f"skipped: it may take {budget_s:.0f} s, {max(session.left_s, 0):.0f} of {session.limit_s:.0f} s are left"
        )
        print(note, flush=True)
        return {"status": "skipped", "seconds": 0.0, "note": note}
    started = time.monotonic()
    records = results.setdefault(step.name, [])
    outcome: dict[str, Any] = {"status": "ok"}
    try:
        for record in step.run(session):
            records.append(record)
            if not is_tiny and time.monotonic() - started > budget_s:
                outcome = {"status": "cut", "note": f"cut short: its {budget_s:.0f} s are over"}
                break
    except ChildError as error:
        outcome = {"status": "failed", "note": str(error)}
    if records:
        print(table(step.columns, records))
    outcome["seconds"] = time.monotonic() - started
    print(
        f"{outcome['seconds']:.1f} s" + (f"   {outcome['status']}: {outcome['note']}" if "note" in outcome else ""),
        flush=True,
    )
    return outcome


if __name__ == "__main__":
    sys.exit(main())
