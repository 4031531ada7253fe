"""`jprefill plan`: the memory plan of a model on a GPU, before anybody rents it.

jprefill plan --model llama-3.1-8b --gpu l4
jprefill plan --model checkpoints/mine --gpu h100 --dtype fp8 --max-model-len 100000 --json
"""

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import get_args

from jprefill.errors import ConfigError
from jprefill.model.config import ModelConfig
from jprefill.planner.measured import Measurements
from jprefill.planner.models import MODELS, find_model
from jprefill.planner.plan import Plan, PlanDType, PlanLayout, PlanRequest, make_plans
from jprefill.planner.targets import USABLE_FRACTION, GpuTarget, find_target, target_names

GIB = 2**30
_SIZES = {
    "weights": "weights_bytes",
    "x (activations)": "activations_bytes",
    "keys and values": "kv_bytes",
    "row vectors": "rows_bytes",
    "scratch": "scratch_bytes",
    "head": "head_bytes",
    "peak": "peak_bytes",
    "reserve": "reserve_bytes",
    "prefix pool": "prefix_pool_bytes",
}
_TOKENS = {"longest input (tokens)": "max_input_tokens", "prefix pool (tokens)": "prefix_pool_tokens"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    known = ", ".join(MODELS)
    parser.add_argument("--model", required=True, metavar="MODEL", help=f"a checkpoint, a hub name, or one of: {known}")
    gpus = "|".join(target_names())
    parser.add_argument("--gpu", required=True, metavar="GPU", help=f"{gpus}, or a FILE like those in planner/targets")
    parser.add_argument("--dtype", choices=get_args(PlanDType), default="bf16", help="of the projections (bf16)")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="longest prompt served (the model's limit)")
    layouts = get_args(PlanLayout)
    parser.add_argument("--layout", choices=layouts, help=f"plan this one alone ({layouts[0]}, beside the others)")
    parser.add_argument("--attention", metavar="NAME", help="implementation (the one for that GPU)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", metavar="FILE.png", help="draw memory against input length; needs matplotlib")


def run(args: argparse.Namespace) -> int:
    """Plans and prints; exit status 0."""
    target = find_target(args.gpu)
    config = find_model(args.model)
    request = PlanRequest(
        model=args.model,
        config=config,
        target=target,
        attention=attention_for(target, config, args.attention),
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        layouts=get_args(PlanLayout) if args.layout is None else (args.layout,),
    )
    if args.plot:
        check_plot(args.plot)
    measure = Measurements(target)
    print(f"compiling for {target.description}; kept for the next time", file=sys.stderr)
    plans = make_plans(request, measure)
    if args.plot:
        from jprefill.planner.plot import draw

        draw(request, plans, measure, args.plot)
    if args.json:
        first, *others = (plan.to_dict() for plan in plans)
        print(json.dumps(first | {"compared_with": others}))
    else:
        print_table(request, plans)
    return 0


def attention_for(target: GpuTarget, config: ModelConfig, asked: str | None) -> str:
    """The implementation that an engine would take on that GPU, or the one that was asked for.

    Raises:
      ConfigError: nothing is called so.
    """
    from jprefill.pallas.attention import implementations
    from jprefill.pallas.attention.selection import Heads, choose

    known = implementations()
    if asked is not None and asked not in known:
        raise ConfigError(f"attention={asked!r}: known are {', '.join(known)}")
    heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim, "bfloat16")
    capability = ".".join(map(str, target.capability))
    candidates = choose("gpu", target.description, capability, heads).candidates
    return asked or next(name for name in candidates if name in known)


def check_plot(path: str) -> None:
    """Raises `ConfigError` before minutes are spent on a picture that cannot be drawn."""
    if find_spec("matplotlib") is None:
        raise ConfigError(f"--plot {path}: needs matplotlib: pip install 'jprefill[plot]'")


def print_table(request: PlanRequest, plans: Sequence[Plan]) -> None:
    """One column a layout, sizes in GiB."""
    first, target = plans[0], request.target
    print(
        f"{request.model} in {request.dtype} on {target.name}: {target.memory_bytes / GIB:.2f} GiB, "
        f"{USABLE_FRACTION:.0%} of it usable; attention {request.attention}, chunks of {request.chunk_size} tokens\n"
    )
    rows = [["GiB, for inputs of", *(f"{plan.max_model_len:,}" for plan in plans)]]
    rows += [[text, *(f"{getattr(plan, key) / GIB:.3f}" for plan in plans)] for text, key in _SIZES.items()]
    rows += [[text, *(f"{getattr(plan, key):,}" for plan in plans)] for text, key in _TOKENS.items()]
    head = ["", *(plan.layout for plan in plans)]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  ".join(cells).rstrip())
    if first.max_input_tokens > request.config.max_position:
        print(f"\nThe model was made for {request.config.max_position:,} tokens; memory is not what limits it.")
    if first.max_input_tokens == 0:
        print(f"\n{request.model} in {request.dtype} does not fit on {target.name}.")
