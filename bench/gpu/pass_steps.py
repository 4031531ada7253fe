"""Steps over the whole model: load, passes of both sides in turns, layer programs, profile."""

import statistics
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from bench.gpu.child import Child, ChildError
from bench.gpu.session import Session
from bench.gpu.sizes import Prompts

MAX_SLOWDOWN = 10.0  # of an attention implementation, against the fastest

Record = dict[str, Any]


def load(session: Session) -> Iterator[Record]:
    """The model on both sides, with random weights. The peer loads first: ours is the larger risk."""
    for child in reversed(list(session.sides)):
        yield {"side": child.name} | (session.load(child) or {})


def passes(session: Session) -> Iterator[Record]:
    """Every prompt set, ours and the peer's in turns after a warm-up of each."""
    for child in session.sides:
        # Loaded already, unless the step before failed: then once more, and each pass says what is wrong.
        with suppress(ChildError):
            session.load(child)
    for prompts in session.sizes.prompts:
        record = _in_turns(session, prompts)
        _add_shares(session, prompts, record)
        _add_memory(session, prompts, record)
        yield {"prompts": prompts.name, "tokens": prompts.num_tokens} | record


def _in_turns(session: Session, prompts: Prompts) -> Record:
    """Times of both sides; one that fails leaves its error and drops out, the other goes on."""
    times: dict[str, list[float]] = {}
    record: Record = {}
    running = list(session.sides)
    for turn in range(min(session.sizes.repeats, prompts.max_repeats) + 1):
        for child in list(running):
            answer = _run_pass(session, child, prompts)
            side = "ours" if child is session.ours else "peer"
            if "error" in answer:
                record["error" if side == "ours" else "peer_error"] = answer["error"]
                running.remove(child)
            elif turn > 0:
                times.setdefault(side, []).append(answer["seconds"])
                record["peak_bytes" if side == "ours" else "peer_peak_bytes"] = answer["peak_bytes"]
    for side, seconds in times.items():
        record |= {f"{side}_times_s": seconds, f"{side}_s": statistics.median(seconds)}
        record[f"{side}_tokens_per_s"] = prompts.num_tokens / record[f"{side}_s"]
    if "ours" in times and "peer" in times:
        record["ratio"] = record["peer_s"] / record["ours_s"]
    return record


def _run_pass(session: Session, child: Child, prompts: Prompts) -> Record:
    sizes = {"count": prompts.count, "length": prompts.length}
    if child is session.ours:
        return session.attempt(child, "run_pass", bucket=prompts.bucket, **sizes)
    return session.attempt(child, "run_pass", vocab_size=session.sizes.model.vocab_size, **sizes)


def _add_shares(session: Session, prompts: Prompts, record: Record) -> None:
    """Share of the ceiling, counting what each side computes; `ours_model_share` counts the whole model for ours."""
    model = session.sizes.model
    flops = {"ours": prompts.done_flops(model), "peer": prompts.model_flops(model)}
    for side, done in flops.items():
        if f"{side}_s" in record:
            record[f"{side}_tflops"] = done / record[f"{side}_s"] / 1e12
            if session.ceiling_tflops:
                record[f"{side}_share"] = record[f"{side}_tflops"] / session.ceiling_tflops
    if "ours_share" in record:
        record["ours_model_share"] = record["ours_share"] * flops["peer"] / flops["ours"]


def _add_memory(session: Session, prompts: Prompts, record: Record) -> None:
    """The plan next to what the device saw, and both without the weights, which hide an error of the rest."""
    planned = session.planned.get(str(prompts.bucket))
    if planned is None:
        return
    record |= {"planned_bytes": planned, "planned_pass_bytes": planned - session.weights_bytes}
    if record.get("peak_bytes"):
        record["peak_pass_bytes"] = record["peak_bytes"] - session.weights_bytes
        record["peak_error"] = planned / record["peak_bytes"] - 1


def layers(session: Session) -> Iterator[Record]:
    """The layer program with one thing changed at a time; `host_share` near 1 means that a call blocks the host."""
    sizes, prompts = session.sizes, session.sizes.main_prompt
    session.load(session.ours)
    others = _other_attention(session)
    variants: list[tuple[str, str, dict[str, Any]]] = [
        ("traced count", "stream", {}),
        ("static count", "stream", {"static_chunks": True}),
        *((f"chunk {size}", "stream", {"chunk_size": size}) for size in sizes.chunk_sizes),
        *((f"attention {name}", "stream", {"attention": name}) for name in others),
        ("layout hybrid", "hybrid", {}),
        ("layout full", "full", {}),
    ]
    flops = prompts.num_tokens * sizes.model.gemm_flops_per_token
    flops += prompts.count * sizes.model.attention_flops(prompts.length * (prompts.length + 1) // 2)
    for name, layout, changes in variants:
        place = {"count": prompts.count, "length": prompts.length, "bucket": prompts.bucket}
        repeats = {"num_layers": min(8, sizes.model.num_layers), "repeats": sizes.repeats}
        record = session.attempt(session.ours, "layer", layout=layout, changes=changes, **place, **repeats)
        if "error" not in record:
            record["host_share"] = record["host_s"] / record["layer_s"]
            if session.ceiling_tflops:
                record["share"] = flops / record["layer_s"] / 1e12 / session.ceiling_tflops
        yield {"variant": name, "prompts": prompts.name} | record


def _other_attention(session: Session) -> list[str]:
    """Implementations worth a layer program: right, and not so slow that they take the step's whole time."""
    slowest_s = MAX_SLOWDOWN * min(session.attention_s.values(), default=0.0)
    known = session.right if session.right is not None else set(session.machine["implementations"])
    chosen = session.attention or session.machine["default_attention"]
    return sorted(name for name in known if name != chosen and session.attention_s.get(name, 0.0) <= slowest_s)


def profile(session: Session) -> Iterator[Record]:
    """Busy and idle time of the device in one pass, then its slowest kernels."""
    prompts = session.sizes.main_prompt
    session.load(session.ours)
    place = {"count": prompts.count, "length": prompts.length, "bucket": prompts.bucket}
    seen = session.ask(session.ours, "profile", **place)
    span = seen["span_s"] or 1.0
    yield {"kernel": "(whole pass)", "seconds": seen["span_s"], "share": 1.0, "count": seen["num_kernels"]}
    yield {"kernel": "(device busy)", "seconds": seen["busy_s"], "share": seen["busy_s"] / span, "count": None}
    yield {"kernel": "(longest gap)", "seconds": seen["longest_gap_s"], "share": seen["longest_gap_s"] / span}
    for kernel in seen["kernels"]:
        share = kernel["seconds"] / span
        yield {"kernel": kernel["name"], "seconds": kernel["seconds"], "share": share, "count": kernel["count"]}


def compiled_passes(session: Session) -> Iterator[Record]:
    """The peer with compiled layers, in turns with ours, on the shortest and the main prompt."""
    if session.peer is None or session.machine["platform"] == "cpu":
        yield {"note": "left out: needs PyTorch and a GPU (compiling takes minutes on a CPU)"}
        return
    session.load(session.ours)
    session.load(session.peer)
    session.ask(session.peer, "compile")
    for prompts in dict.fromkeys((session.sizes.main_prompt, session.sizes.prompts[0])):
        first = _run_pass(session, session.peer, prompts)  # compiles
        record = _in_turns(session, prompts) if "error" not in first else first
        yield {"prompts": prompts.name, "compile_s": first.get("seconds")} | record
