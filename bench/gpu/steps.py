"""The steps of a run, in order: each yields flat records, and the first ones tell the later ones what to use."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from bench.gpu.child import Child
from bench.gpu.pass_steps import compiled_passes, layers, load, passes, profile
from bench.gpu.session import Session, heads_of

MAX_RELATIVE_ERROR = 1e-2  # of bfloat16 attention; its operands alone round to 4e-3
TORCH_BACKENDS = ("flash", "cudnn", "cudnn_expanded")
TRITON_TILES = ((64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3))
MOSAIC_TILES = ((64, 2), (64, 4), (128, 2))
QUANTIZED = ("int8_weight", "fp8_weight", "int8_both", "fp8_both")

Record = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """Attributes:
    columns: of the table: keys of the records.
    budget_s: the step is left out if less is left of the run, and cut short after as much.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    budget_s: float
    run: Callable[[Session], Iterator[Record]]


def numerics(session: Session) -> Iterator[Record]:
    """Every implementation against the float32 reference."""
    num_rows, num_keys = session.sizes.numeric_rows
    session.right = set()
    for name in session.machine["implementations"]:
        is_right = True
        for head_dim in session.sizes.head_dims:
            sizes = heads_of(session.sizes.model) | {"head_dim": head_dim, "num_rows": num_rows, "num_keys": num_keys}
            answer = session.attempt(session.ours, "numerics", name=name, **sizes)
            for record in answer.get("layouts", [answer]):
                record["is_right"] = "error" not in record and _is_right(record)
                is_right &= record["is_right"]
                yield {"implementation": name, "head_dim": head_dim} | record
        if is_right:
            session.right.add(name)


def _is_right(record: Record) -> bool:
    return record["is_finite"] and record["is_zero"] and record["relative_error"] <= MAX_RELATIVE_ERROR


def matmul(session: Session) -> Iterator[Record]:
    """The ceiling: the fastest product of either side in the shapes of the model's MLP."""
    width, inner = session.sizes.model.embed_dim, session.sizes.model.mlp_dim
    for num_rows in session.sizes.matmul_rows:
        for num_in, num_out in ((width, inner), (inner, width)):
            for child in session.sides:
                sizes = {"num_rows": num_rows, "num_in": num_in, "num_out": num_out}
                record = session.attempt(child, "matmul", **sizes, **session.timing)
                _add_tflops(record, 2 * num_rows * num_in * num_out)
                if "error" not in record:
                    session.ceiling_tflops = max(session.ceiling_tflops or 0.0, record["best_tflops"])
                yield {"side": child.name, "shape": f"{num_rows}x{num_in}x{num_out}"} | record


def attention(session: Session) -> Iterator[Record]:
    """Causal attention of whole prompts, and of the last chunk of the longest as layout `stream` runs it."""
    lengths = session.sizes.attention_lengths
    for length in lengths:
        records = []
        for name in session.machine["implementations"]:
            records.append(_time_attention(session, name, length, length))
            yield records[-1]
        if session.peer is not None:
            for backend in TORCH_BACKENDS:
                records.append(_time_peer_attention(session, session.peer, backend, length))
                yield records[-1]
        _choose(session, records)
    for name in session.machine["implementations"]:
        yield _time_attention(session, name, min(session.sizes.chunk_size, lengths[-1]), lengths[-1])


def _time_attention(session: Session, name: str, num_rows: int, num_keys: int) -> Record:
    sizes = heads_of(session.sizes.model) | {"num_rows": num_rows, "num_keys": num_keys}
    record = session.attempt(session.ours, "attention", name=name, **sizes, **session.timing)
    _add_tflops(record, _causal_flops(session, num_rows, num_keys))
    return {"side": session.ours.name, "implementation": name, "rows": num_rows, "keys": num_keys} | record


def _time_peer_attention(session: Session, peer: Child, backend: str, length: int) -> Record:
    sizes = heads_of(session.sizes.model) | {"num_keys": length}
    record = session.attempt(peer, "attention", backend=backend, **sizes, **session.timing)
    _add_tflops(record, _causal_flops(session, length, length))
    return {"side": peer.name, "implementation": backend, "rows": length, "keys": length} | record


def _causal_flops(session: Session, num_rows: int, num_keys: int) -> int:
    """Of the pairs that are seen, so about half of the square."""
    return session.sizes.model.attention_flops(num_rows * (2 * num_keys - num_rows + 1) // 2)


def _add_tflops(record: Record, flops: int) -> None:
    if "error" not in record:
        record["tflops"] = flops / record["median_s"] / 1e12
        record["best_tflops"] = flops / record["best_s"] / 1e12


def _choose(session: Session, records: list[Record]) -> None:
    """Passes use the fastest of each side at the longest length; of ours only one that agreed with the reference."""
    ours = [record for record in records if record["side"] == session.ours.name and "error" not in record]
    session.attention_s = {record["implementation"]: record["median_s"] for record in ours}
    best: dict[str, Record] = {}
    for record in sorted((r for r in records if "error" not in r), key=lambda r: r["median_s"]):
        if record["side"] != session.ours.name or session.right is None or record["implementation"] in session.right:
            best.setdefault(record["side"], record)
    # On a CPU the kernels are interpreted: which of them is fastest there means nothing.
    if session.ours.name in best and not session.is_attention_fixed and session.machine["platform"] != "cpu":
        session.attention = best[session.ours.name]["implementation"]
    if session.peer and session.peer.name in best:
        session.peer_backend = best[session.peer.name]["implementation"]


def parity(session: Session) -> Iterator[Record]:
    """A small model with the same weights on both sides: our distance from PyTorch's float32, beside its own."""
    model, chunk_size = asdict(session.sizes.parity), min(session.sizes.chunk_size, 256)
    longest = session.sizes.numeric_rows[1]
    lengths = [longest // 8 + 1, longest // 2 + 3]
    ours = session.ask(
        session.ours, "parity", model=model, lengths=lengths, chunk_size=chunk_size, attention=session.attention
    )
    if session.peer is None:
        yield {"lengths": lengths, "note": "left out: needs PyTorch"}
        return
    peers = session.ask(session.peer, "parity", model=model, lengths=lengths, label_ids=ours["label_ids"])
    for index, length in enumerate(lengths):
        exact = peers["float32"][index]
        yield {
            "tokens": length,
            "attention": session.attention or session.machine["default_attention"],
            "ours_max_delta": _max_delta(ours["logprobs"][index], exact),
            "peer_max_delta": _max_delta(peers["bfloat16"][index], exact),
        }


def _max_delta(left: list[float], right: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def tiles(session: Session) -> Iterator[Record]:
    """Other tile sizes of the kernels, on the main prompt."""
    length = session.sizes.attention_lengths[-1]
    for kernel, candidates in (("triton", TRITON_TILES), ("mosaic", MOSAIC_TILES)):
        if kernel not in session.machine["implementations"]:
            yield {"kernel": kernel, "error": "not among the implementations of this device"}
            continue
        for tile in candidates[: session.sizes.max_tiles]:
            sizes = heads_of(session.sizes.model) | {"num_rows": length, "num_keys": length}
            record = session.attempt(session.ours, "tile", kernel=kernel, tile=tile, **sizes, **session.timing)
            _add_tflops(record, _causal_flops(session, length, length))
            yield {"kernel": kernel, "tile": "x".join(map(str, tile))} | record


def quantized(session: Session) -> Iterator[Record]:
    """8-bit products in the shape of the MLP's first half."""
    num_rows, width, inner = session.sizes.matmul_rows[0], session.sizes.model.embed_dim, session.sizes.model.mlp_dim
    sizes = {"num_rows": num_rows, "num_in": width, "num_out": inner}
    for scheme in QUANTIZED:
        record = session.attempt(session.ours, "quantized_matmul", scheme=scheme, **sizes, **session.timing)
        _add_tflops(record, 2 * num_rows * width * inner)
        yield {"scheme": scheme} | record


def copies(session: Session) -> Iterator[Record]:
    """Between device and host memory."""
    sizes = {"num_bytes": session.sizes.copy_bytes, "repeats": session.sizes.repeats}
    for record in session.ask(session.ours, "host_copies", **sizes):
        yield record | {"gb_per_s": record["bytes"] / record["median_s"] / 1e9}


STEPS = (
    Step(
        "numerics",
        "attention against the float32 reference",
        ("implementation", "head_dim", "segments", "max_error", "relative_error", "is_finite", "is_zero", "is_right"),
        75,
        numerics,
    ),
    Step(
        "matmul",
        "bfloat16 matrix products: the ceiling",
        ("side", "shape", "tflops", "best_tflops", "runs_in"),
        20,
        matmul,
    ),
    Step(
        "attention",
        "causal attention (FLOPs of visible pairs)",
        ("side", "implementation", "rows", "keys", "median_s", "tflops", "spread"),
        70,
        attention,
    ),
    Step(
        "load", "compile and load", ("side", "attention", "backend", "compile_s", "load_s", "weights_bytes"), 100, load
    ),
    Step(
        "passes",
        "whole passes, in turns",
        (
            "prompts",
            "ours_s",
            "peer_s",
            "ours_tokens_per_s",
            "peer_tokens_per_s",
            "ratio",
            "ours_share",
            "peer_share",
            "peak_bytes",
            "planned_bytes",
            "peak_error",
            "peak_pass_bytes",
            "planned_pass_bytes",
        ),
        80,
        passes,
    ),
    Step(
        "layers",
        "one layer of the main prompt, programs compared",
        ("variant", "layer_s", "host_s", "host_share", "share", "temp_bytes", "compile_s"),
        80,
        layers,
    ),
    Step("profile", "the main prompt under the profiler", ("kernel", "seconds", "share", "count"), 15, profile),
    Step(
        "parity",
        "a small model, same weights: nats from PyTorch float32",
        ("tokens", "attention", "ours_max_delta", "peer_max_delta"),
        40,
        parity,
    ),
    Step("tiles", "kernel tiles", ("kernel", "tile", "median_s", "tflops"), 45, tiles),
    Step("quantized", "8-bit matrix products", ("scheme", "tflops", "runs_in", "temp_bytes"), 25, quantized),
    Step("copies", "host copies", ("copy", "gb_per_s", "started_s", "median_s"), 10, copies),
    Step(
        "compiled_peer",
        "the peer's passes with torch.compile",
        ("prompts", "compile_s", "peer_s", "peer_tokens_per_s", "ratio"),
        60,
        compiled_passes,
    ),
)
