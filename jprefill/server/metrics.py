"""Prometheus metrics: what the engine counts, and what the door sees. Labels are bounded by construction."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jprefill.server.record import RequestRecord
from jprefill.types import EngineStats, TierStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKENS = (16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0)
_GAUGES = {
    "num_waiting": ("jprefill_requests_waiting", "Requests in the engine's queue."),
    "num_waiting_tokens": ("jprefill_waiting_tokens", "Tokens in the engine's queue."),
    "num_running": ("jprefill_requests_running", "Requests in the running batch."),
}
_COUNTERS = {
    "num_finished": ("jprefill_requests_finished", "Requests that the engine answered."),
    "num_failed": ("jprefill_requests_failed", "Requests that met an error in the engine."),
    "num_shed": ("jprefill_requests_shed", "Requests dropped because their deadline passed."),
    "num_batches": ("jprefill_batches", "Forward passes."),
    "num_preemptions": ("jprefill_preemptions", "Passes that ran before the rest of a longer one."),
    "num_prompt_tokens": ("jprefill_prompt_tokens", "Prompt tokens as callers count them."),
    "num_cached_tokens": ("jprefill_cached_tokens", "Prompt tokens that were not computed again."),
    "num_kept_tokens": ("jprefill_kept_tokens", "Prompt tokens whose KV was added to the prefix store."),
    "num_computed_tokens": ("jprefill_computed_tokens", "Tokens that passes computed."),
    "num_compiles_after_start": (
        "jprefill_compiles_after_start",
        "Programs compiled after warm-up; anything above 0 is a bug.",
    ),
    "device_busy_s": ("jprefill_device_busy_seconds", "Time that passes spent on the device."),
}


# One series per tier of the prefix store, there from the start: of a tier that is not set up, all are 0.
_TIERS = ("device", "host", "disk")
_TIER_GAUGES = {
    "num_blocks": ("jprefill_kv_blocks", "Blocks in a tier of the prefix store."),
    "num_bytes": ("jprefill_kv_bytes", "Bytes of these blocks."),
    "max_bytes": ("jprefill_kv_max_bytes", "Bytes that the tier may hold."),
    "is_on": ("jprefill_kv_tier_on", "1 while the tier works; 0 if a fault switched it off, or it is not set up."),
}
_TIER_COUNTERS = {
    "num_hits": ("jprefill_kv_hits", "Blocks found in the tier."),
    "num_misses": ("jprefill_kv_misses", "Blocks found neither in the tier nor in a faster one."),
    "num_insertions": ("jprefill_kv_insertions", "Blocks that were put into the tier."),
    "num_evictions": ("jprefill_kv_evictions", "Blocks that left the tier for others."),
    "num_restores": ("jprefill_kv_restores", "Blocks brought from the tier to the device."),
    "restore_s": ("jprefill_kv_restore_seconds", "Time that this took."),
    "num_errors": ("jprefill_kv_errors", "Faults of the tier; each was a miss for its request."),
}
_NO_TIER = TierStats(is_on=False)


class Metrics:
    """The server's own registry, so that two servers in one process never mix.

    `observe` belongs to the event loop; `render` calls the two sources given at the start.
    """

    def __init__(self, stats: Callable[[], EngineStats | None], num_open: Callable[[], int]):
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(stats, num_open))
        self._requests = self._counter("http_requests", "HTTP answers.", "route", "status")
        self._errors = self._counter("errors", "Refusals and failures.", "reason")
        self._total = self._histogram("http_request_seconds", "From headers to answer.", _SECONDS)
        self._queue = self._histogram("queue_seconds", "Waiting in the engine.", _SECONDS)
        self._tokenize = self._histogram("tokenization_seconds", "Parsing and tokenising.", _SECONDS)
        self._device = self._histogram("inference_seconds", "On the device.", _SECONDS)
        self._tokens = self._histogram("request_prompt_tokens", "Prompt length of a request.", _TOKENS)

    def observe(self, record: RequestRecord) -> None:
        """Counts one finished request. Route is a template or `other`, reason one of our codes."""
        self._requests.labels(record.route, str(record.status)).inc()
        self._total.labels(record.route).observe(record.total_s)
        if record.reason is not None:
            self._errors.labels(record.reason).inc()
        if record.num_prompt_tokens is not None:
            self._queue.labels(record.route).observe(record.queue_s)
            self._tokenize.labels(record.route).observe(record.tokenize_s)
            self._device.labels(record.route).observe(record.device_s)
            self._tokens.labels(record.route).observe(record.num_prompt_tokens)

    def render(self) -> bytes:
        """Everything in the text format 0.0.4."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"jprefill_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"jprefill_{name}", text, ("route",), registry=self.registry, buckets=buckets)


class _EngineCollector(Collector):
    """Reads `EngineStats` at scrape time; nothing is copied in between."""

    def __init__(self, stats: Callable[[], EngineStats | None], num_open: Callable[[], int]):
        self._stats = stats
        self._num_open = num_open

    def collect(self) -> Iterable[Metric]:
        """All engine families, zero until the engine is up, so that series never appear late."""
        stats = self._stats() or EngineStats()
        yield GaugeMetricFamily("jprefill_requests_open", "Requests inside the server.", self._num_open())
        for field, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(name, text, getattr(stats, field))
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(name, text, getattr(stats, field))
        for field, (name, text) in _TIER_GAUGES.items():
            yield _by_tier(GaugeMetricFamily(name, text, labels=["tier"]), stats, field)
        for field, (name, text) in _TIER_COUNTERS.items():
            yield _by_tier(CounterMetricFamily(name, text, labels=["tier"]), stats, field)


def _by_tier[M: (GaugeMetricFamily, CounterMetricFamily)](family: M, stats: EngineStats, field: str) -> M:
    """Adds the field's value of every tier."""
    for tier in _TIERS:
        family.add_metric([tier], float(getattr(stats.tiers.get(tier, _NO_TIER), field)))
    return family
