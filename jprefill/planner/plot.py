"""The picture of `jprefill plan --plot`: memory against input length, one line a layout."""

from collections.abc import Sequence
from importlib import import_module

from jprefill.planner.plan import Measure, Plan, Planner, PlanRequest

GIB = 2**30


def draw(request: PlanRequest, plans: Sequence[Plan], measure: Measure, path: str) -> None:
    """Writes a PNG (or what the ending says). The lines go through measured lengths and end where memory does."""
    import_module("matplotlib").use("Agg")  # no window system needed
    pyplot = import_module("matplotlib.pyplot")
    planner = Planner(request, measure)
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for plan in plans:
        if plan.max_input_tokens == 0:
            continue
        lengths = (request.chunk_size, plan.max_input_tokens)
        sizes = [(plan.weights_bytes + planner.pass_bytes(plan.layout, length)) / GIB for length in lengths]
        label = f"{plan.layout}: {plan.max_input_tokens:,} tokens"
        axes.plot([length / 1000 for length in lengths], sizes, marker="o", label=label)
    limit = (request.target.memory_bytes - planner.reserve_bytes) / GIB
    axes.axhline(limit, color="black", linestyle="--", linewidth=1, label=f"usable: {limit:.1f} GiB")
    axes.set(xlabel="input, thousands of tokens", ylabel="memory, GiB", ylim=(planner.weights_bytes / GIB * 0.98, None))
    axes.set_title(f"{request.model} in {request.dtype} on {request.target.name}")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
