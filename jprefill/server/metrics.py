"""Prometheus metrics: what the engine counts, and what the door sees. Labels are bounded by construction."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jprefill.server.record import RequestRecord
from jprefill.types import EngineStats

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
    "num_prompt_tokens": ("jprefill_prompt_tokens", "Prompt tokens as callers count them."),
    "num_cached_tokens": ("jprefill_cached_tokens", "Prompt tokens that were not computed again."),
    "num_computed_tokens": ("jprefill_computed_tokens", "Tokens that passes computed."),
    "num_compiles_after_start": (
        "jprefill_compiles_after_start",
        "Programs compiled after warm-up; anything above 0 is a bug.",
    ),
    "device_busy_s": ("jprefill_device_busy_seconds", "Time that passes spent on the device."),
}


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
