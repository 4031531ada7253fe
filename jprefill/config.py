"""Every setting, in frozen dataclasses, one per part. Each default stands here and nowhere else. No JAX."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from jprefill.errors import ConfigError

FIRST_BUCKET = 128  # tokens
SMALL_GPU_BYTES = 32 * 10**9

Layout = Literal["stream", "hybrid", "full"]
DType = Literal["bfloat16", "float32", "float16"]
Policy = Literal["jct", "srjf", "hrrn", "lpm", "fcfs"]
Quantization = Literal["int8", "fp8"]
Keep = Literal["prefix", "all", "none"]
Eviction = Literal["saved_time", "lru"]


@dataclass(frozen=True)
class _Checked:
    """Refuses values outside a `Literal`, naming the key, the value and what is allowed."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value, allowed = getattr(self, f.name), _allowed(f.type)
            if allowed and value not in allowed:
                raise ConfigError(f"{f.name}={value!r}: allowed are {', '.join(map(repr, allowed))}")

    def at_least(self, minimum: int | float, *names: str) -> None:
        """Raises `ConfigError` for each named field that is below `minimum`; None passes."""
        for name in names:
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ConfigError(f"{name}={value!r}: must be at least {minimum}")


def _allowed(kind: Any) -> tuple[object, ...]:
    """The values of a `Literal` or of a `Literal | None`; empty for any other type."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    bare = [part for part in get_args(kind) if part is not NoneType]
    return (*get_args(bare[0]), None) if len(bare) == 1 and get_origin(bare[0]) is Literal else ()


@dataclass(frozen=True)
class EngineConfig(_Checked):
    """How one engine runs one model.

    Attributes:
      dtype: of weights and activations; norms, softmax and rope angles are float32 always.
      quantization: of the projection matrices, done while loading; None: as the checkpoint stores them.
      layout: how a layer program walks its tokens; `hybrid` and `full` are the naive twins of `stream`.
      attention: implementation name in `jprefill.pallas.attention`; None picks by platform.
      chunk_size: tokens per step of a layer's loops; None: 256 on a CPU, 2048 on a GPU, 1024 on one below 32 GB.
      max_model_len: longest prompt in tokens; None takes the model's own limit.
      max_batch_tokens: tokens one pass may hold when it packs several requests; None: `max_model_len`.
      buckets: lengths in tokens that get compiled programs; None: `default_buckets`.
      max_queued_requests: back-pressure limit; one more is refused with 429.
      max_queued_tokens: likewise, in tokens.
      max_items: items of one request.
      max_labels: target ids at one row.
      policy: the order in which waiting requests are taken: the least time first as the prefix store stands now (`jct`)
        or stood at arrival (`srjf`), the highest response ratio, the longest cached prefix, or the first come.
      fairness: seconds of its own time that `jct` forgives a request for each second that it has waited.
      max_overtaken_s: others may go before a request for so long; see `scheduler.policy` for what follows.
      packing: several requests may ride in one pass.
      preemption: a short pass may go before the rest of a long one, between two layers; with `jct` and `srjf` only.
      kv_cache_memory_bytes: device memory for kept prefixes; None: what the memory plan leaves on a GPU, 512 MiB
        elsewhere; 0: no prefix store.
      block_size: tokens per block of the prefix store.
      keep: whose KV is kept: of prefixes that are shared, marked or seen before, of everything, or of nothing.
      eviction: which block leaves a full pool: the one that saves least time, or the one unused for longest.
      kv_host_bytes: host memory for blocks that leave the device pool; 0: none.
      kv_disk_path: folder for blocks that leave host memory, kept over restarts; None: none.
      kv_disk_bytes: the most that it may hold.
      shared_prompt: text that starts prompts of every tenant; salts do not separate it.
      batch_invariant: scores are bit-identical alone, packed, cached and restored; costs some speed.
      compilation_cache: folder for compiled programs; None: `~/.cache/jprefill/xla`, "": none.
    """

    dtype: DType = "bfloat16"
    quantization: Quantization | None = None
    layout: Layout = "stream"
    attention: str | None = None
    chunk_size: int | None = None
    max_model_len: int | None = None
    max_batch_tokens: int | None = None
    buckets: tuple[int, ...] | None = None
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4_000_000
    max_items: int = 4096
    max_labels: int = 1024
    policy: Policy = "jct"
    fairness: float = 0.3
    max_overtaken_s: float = 30.0
    packing: bool = True
    preemption: bool = True
    kv_cache_memory_bytes: int | None = None
    block_size: int = 16
    keep: Keep = "prefix"
    eviction: Eviction = "saved_time"
    kv_host_bytes: int = 0
    kv_disk_path: str | None = None
    kv_disk_bytes: int = 10 * 2**30
    shared_prompt: str | None = field(default=None, repr=False)
    batch_invariant: bool = False
    compilation_cache: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(0, "kv_cache_memory_bytes", "kv_host_bytes", "kv_disk_bytes")
        if not 8 <= self.block_size <= 256 or self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size={self.block_size}: must be a power of two, 8 to 256")
        self.at_least(1, "max_model_len", "max_batch_tokens", "max_queued_requests", "max_queued_tokens")
        self.at_least(1, "max_items", "max_labels")
        self.at_least(0, "fairness", "max_overtaken_s")
        size = self.chunk_size
        if size is not None and (size < 16 or size & (size - 1)):
            raise ConfigError(f"chunk_size={size}: must be a power of two, at least 16")


@dataclass(frozen=True)
class ServerConfig(_Checked):
    """How the HTTP server listens and what it refuses.

    Attributes:
      host: address to listen on.
      port: 0 picks a free one.
      api_keys: any of them opens every route; empty: no key is asked for.
      served_model_names: names a request may use; the first is echoed. Empty: the checkpoint's name.
      max_body_bytes: after decoding.
      max_questions: of one `/v1/decisions` request.
      request_timeout_s: deadline of a request that sends none; None: no deadline.
      shutdown_timeout_s: how long accepted requests may still run after the first SIGTERM.
      tokenizer_threads: size of the thread pool that tokenises.
      default_salt_per_api_key: requests with different API keys never share stored prefixes.
      report_cached_tokens: whether `usage` tells how many tokens came from the prefix store.
      log_format: `json` writes one object a line.
      log_level: the least urgent level that is written.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    served_model_names: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 2**20
    max_questions: int = 400
    request_timeout_s: float | None = None
    shutdown_timeout_s: float = 30.0
    tokenizer_threads: int = 2
    default_salt_per_api_key: bool = False
    report_cached_tokens: bool = True
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port}: must be 0 to 65535 (0 picks a free one)")
        self.at_least(1, "max_body_bytes", "max_questions", "tokenizer_threads")
        self.at_least(0, "request_timeout_s", "shutdown_timeout_s")


def from_mapping[C](kind: type[C], values: Mapping[str, object]) -> C:
    """Builds `kind`, one of the classes above, from flags, keywords or YAML.

    Raises:
      ConfigError: an unknown key, naming the known ones, or a value that the class refuses.
    """
    known = [f.name for f in fields(kind)]  # pyright: ignore[reportArgumentType]  no type means "a dataclass"
    if unknown := sorted(set(values) - set(known)):
        raise ConfigError(f"unknown setting {unknown[0]!r}: known are {', '.join(known)}")
    return kind(**values)


def chunk_size_for(memory_bytes: int | None) -> int:
    """Tokens per step of a layer's loops where nobody asked for a number.

    Large enough to keep a GPU busy, smaller where memory is short; a CPU is busy with 256.

    Args:
      memory_bytes: of a GPU; None: of no GPU.
    """
    if memory_bytes is None:
        return 256
    return 1024 if memory_bytes < SMALL_GPU_BYTES else 2048


def default_buckets(max_tokens: int, chunk_size: int) -> tuple[int, ...]:
    """Bucket lengths in tokens, each four times the last, up to one that holds `max_tokens`.

    Work follows the real length in whole chunks, not the bucket, so a few coarse buckets are enough. The first is
    shorter than a chunk and walked in one piece: a lone short prompt does not pay for a whole chunk.
    The last is `max_tokens` rounded up to whole chunks.
    """
    last = -(-max_tokens // chunk_size) * chunk_size
    buckets = []
    length = FIRST_BUCKET
    while length < last:
        buckets.append(length)
        length *= 4
    return (*buckets, last)
