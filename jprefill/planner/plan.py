"""The memory plan: what a model needs on a GPU in each layout, the longest input, and what is left for prefixes.

Every figure of a pass comes from programs compiled for that GPU; a straight line only says which length to compile
next, and the length that is reported was compiled.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np

from jprefill.config import Layout, Quantization, chunk_size_for
from jprefill.errors import ConfigError
from jprefill.model.config import ModelConfig
from jprefill.model.memory import ProgramMemory, library_bytes, pass_bytes
from jprefill.model.weights import weight_leaves
from jprefill.planner.jobs import CompileJob
from jprefill.planner.search import longest_input
from jprefill.planner.targets import GpuTarget

PlanLayout = Literal["stream", "hybrid", "full", "whole-kv"]
PlanDType = Literal["bf16", "int8", "fp8"]

# Float32 holds every position exactly up to here; rope needs that.
MAX_TOKENS = 2**24
PROGRAMS = ("embed", "layer", "read_64")

# The programs of each job, by name.
Measure = Callable[[Sequence[CompileJob]], list[Mapping[str, ProgramMemory]]]


@dataclass(frozen=True)
class PlanRequest:
    """What to plan for.

    Attributes:
      model: its name, for the reader.
      dtype: of the projection matrices; embedding, LM head, norms and activations are bfloat16.
      max_model_len: longest prompt that will be served; None: the model's own limit, or what fits if that is less.
      layouts: the first one is the plan; the others are compared with it.
    """

    model: str
    config: ModelConfig
    target: GpuTarget
    attention: str
    dtype: PlanDType = "bf16"
    max_model_len: int | None = None
    layouts: tuple[PlanLayout, ...] = get_args(PlanLayout)

    @property
    def quantization(self) -> Quantization | None:
        """As the layer programs name it."""
        return None if self.dtype == "bf16" else self.dtype

    @property
    def chunk_size(self) -> int:
        """Tokens per step of a layer's loops, as the engine takes them."""
        return chunk_size_for(self.target.memory_bytes)

    @property
    def probe_bucket(self) -> int:
        """The length that is measured first: the one that will be served, where it fits."""
        return self.bucket(self.max_model_len or self.config.max_position)

    def bucket(self, length: int) -> int:
        """The padded length of a pass."""
        return -(-length // self.chunk_size) * self.chunk_size

    def job(self, layout: PlanLayout, bucket: int) -> CompileJob:
        """The hungriest programs of one bucket: `fill_kv` is a part of `layer`, the smaller head of the larger one.

        `whole-kv` runs the programs of `stream`.
        """
        return CompileJob(
            config=self.config,
            layout=_layout(layout),
            attention=self.attention,
            chunk_size=self.chunk_size,
            bucket=bucket,
            quantization=self.quantization,
            programs=PROGRAMS,
        )


@dataclass(frozen=True)
class Plan:
    """One layout of one model on one GPU. All sizes in bytes.

    `weights + activations + kv + rows + scratch + head = peak`, at `max_model_len`; with `reserve` and the prefix pool
    it is the whole device. Where not even the weights fit, `max_model_len` is 0 and so is what belongs to a pass.

    Attributes:
      max_model_len: the length that the parts are given for (tokens).
      activations_bytes: x, the residual stream of a whole pass.
      kv_bytes: keys and values that are alive: of one layer; of all layers for `whole-kv`.
      rows_bytes: positions and key ranges.
      scratch_bytes: of the hungriest of embedding and layer programs.
      head_bytes: what reading the answer needs beyond that.
      reserve_bytes: never used: context, libraries, fragmentation, and a matrix that a library call may dequantise.
      max_input_tokens: the longest pass that fits with no prefix pool.
      max_input_peak_bytes: and its peak.
      prefix_pool_tokens: tokens of all layers' keys and values that fit beside a pass of `max_model_len`.
    """

    model: str
    gpu: str
    layout: PlanLayout
    dtype: PlanDType
    attention: str
    chunk_size: int
    max_model_len: int
    device_bytes: int
    weights_bytes: int
    activations_bytes: int
    kv_bytes: int
    rows_bytes: int
    scratch_bytes: int
    head_bytes: int
    peak_bytes: int
    reserve_bytes: int
    max_input_tokens: int
    max_input_peak_bytes: int
    prefix_pool_bytes: int
    prefix_pool_tokens: int

    def to_dict(self) -> dict[str, Any]:
        """The JSON keys of `jprefill plan`."""
        return asdict(self)


def make_plans(request: PlanRequest, measure: Measure) -> list[Plan]:
    """One plan for each of `request.layouts`, in their order.

    Args:
      measure: compiles jobs for `request.target`, or remembers them; may be called from several threads.

    Raises:
      ConfigError: `max_model_len` does not fit in the first layout, or is beyond what positions can be.
    """
    if request.max_model_len is not None and not 1 <= request.max_model_len <= MAX_TOKENS:
        raise ConfigError(f"max_model_len={request.max_model_len}: must be 1 to {MAX_TOKENS}")
    planner = Planner(request, measure)
    # All of it in one process first: what is left is about one length for each layout.
    lengths = (request.chunk_size, request.probe_bucket)
    measure(list(dict.fromkeys(request.job(layout, length) for layout in request.layouts for length in lengths)))
    with ThreadPoolExecutor(2) as pool:
        plans = list(pool.map(planner.plan, request.layouts))
    first, asked = plans[0], request.max_model_len
    if asked is not None and asked > first.max_input_tokens:
        raise ConfigError(
            f"max_model_len={asked} does not fit: {request.model} in {request.dtype} on {request.target.name} with "
            f"layout {first.layout} takes at most {first.max_input_tokens} tokens"
        )
    return plans


class Planner:
    """Plans the layouts of one request. Holds no state but the request."""

    def __init__(self, request: PlanRequest, measure: Measure):
        self.request = request
        self._measure = measure
        self.weights_bytes = weights_bytes(request.config, request.quantization)
        self.reserve_bytes = request.target.memory_bytes - request.target.usable_bytes
        self.reserve_bytes += library_bytes(request.config, request.quantization)
        self.budget_bytes = request.target.memory_bytes - self.reserve_bytes - self.weights_bytes

    def plan(self, layout: PlanLayout) -> Plan:
        """The whole plan of one layout."""
        longest = longest_input(
            lambda bucket: self.pass_bytes(layout, bucket),
            self.budget_bytes,
            step=self.request.chunk_size,
            at_most=MAX_TOKENS,
            probe=self.request.probe_bucket,
        )
        length = min(longest, self.request.max_model_len or self.request.config.max_position)
        parts = self._parts(layout, self.request.bucket(length)) if length else dict.fromkeys(_PASS_PARTS, 0)
        peak_bytes = self.weights_bytes + sum(parts.values())
        pool_bytes = max(0, self.request.target.memory_bytes - self.reserve_bytes - peak_bytes)
        token_bytes = kv_bytes(self.request.config, 1) * self.request.config.num_layers
        return Plan(
            model=self.request.model,
            gpu=self.request.target.name,
            layout=layout,
            dtype=self.request.dtype,
            attention=self.request.attention,
            chunk_size=self.request.chunk_size,
            max_model_len=length,
            device_bytes=self.request.target.memory_bytes,
            weights_bytes=self.weights_bytes,
            **parts,
            peak_bytes=peak_bytes,
            reserve_bytes=self.reserve_bytes,
            max_input_tokens=longest,
            max_input_peak_bytes=self.weights_bytes + (self.pass_bytes(layout, longest) if longest else 0),
            prefix_pool_bytes=pool_bytes,
            prefix_pool_tokens=pool_bytes // token_bytes,
        )

    def pass_bytes(self, layout: PlanLayout, bucket: int) -> int:
        """The most that a pass holds besides the weights."""
        [programs] = self._measure([self.request.job(layout, bucket)])
        return pass_bytes(programs) + self._kept_bytes(layout, bucket)

    def _kept_bytes(self, layout: PlanLayout, bucket: int) -> int:
        """Keys and values of the other layers, where a layout keeps them."""
        config = self.request.config
        return kv_bytes(config, bucket) * (config.num_layers - 1) if layout == "whole-kv" else 0

    def _parts(self, layout: PlanLayout, bucket: int) -> dict[str, int]:
        """The parts of a pass: what the layer program takes is counted, the rest is what the compiler adds."""
        [programs] = self._measure([self.request.job(layout, bucket)])
        resident = programs["layer"].activation_bytes
        activations = bucket * self.request.config.embed_dim * _ITEM_BYTES
        kv = kv_bytes(self.request.config, bucket)
        without_head = {name: program for name, program in programs.items() if not name.startswith("read")}
        total, body = pass_bytes(programs), pass_bytes(without_head)
        return {
            "activations_bytes": activations,
            "kv_bytes": kv + self._kept_bytes(layout, bucket),
            "rows_bytes": resident - activations - kv,
            "scratch_bytes": body - resident,
            "head_bytes": total - body,
        }


_ITEM_BYTES = 2  # bfloat16
_PASS_PARTS = ("activations_bytes", "kv_bytes", "rows_bytes", "scratch_bytes", "head_bytes")


def _layout(layout: PlanLayout) -> Layout:
    return "stream" if layout == "whole-kv" else layout


def weights_bytes(config: ModelConfig, quantization: Quantization | None) -> int:
    """All weights on the device, scales included."""
    leaves = weight_leaves(config, np.dtype("bfloat16"), quantization).values()
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def kv_bytes(config: ModelConfig, num_tokens: int) -> int:
    """Keys and values of one layer."""
    return 2 * num_tokens * config.num_kv_heads * config.head_dim * _ITEM_BYTES
