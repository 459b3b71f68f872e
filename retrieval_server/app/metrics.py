"""The server's metrics for Prometheus: requests, their seconds, batches and waiting queries.

Each application has a registry of its own.
"""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_QUERIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)


class _Live(Collector):
    """Figures of live searches, as they are when they are asked for."""

    def __init__(self, figures: Callable[[], Mapping[str, float]]) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        """Return each as a gauge."""
        for name, value in self._figures().items():
            yield GaugeMetricFamily(f"retrieval_live_{name}", "Of searches of the web", value)


class Metrics:
    """The metrics of one application."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "retrieval_requests", "Answered, by status", ["status"], registry=registry
        )
        self._seconds = Histogram(
            "retrieval_request_seconds",
            "From a request's headers to its answer",
            buckets=_SECONDS,
            registry=registry,
        )
        self._queries = Counter("retrieval_queries", "Searched for", registry=registry)
        self._batches = Histogram(
            "retrieval_batch_queries",
            "Queries in one call of the index",
            buckets=_QUERIES,
            registry=registry,
        )
        self._waiting = Gauge(
            "retrieval_waiting_queries", "That no call has taken yet", registry=registry
        )

    def watch(self, waiting: Callable[[], int]) -> None:
        """Ask this for how many queries are waiting."""
        self._waiting.set_function(waiting)

    def watch_live(self, figures: Callable[[], Mapping[str, float]]) -> None:
        """Ask this for what live searches came to and cost, by name."""
        self._registry.register(_Live(figures))

    def answered(self, status: int, seconds: float) -> None:
        """Count one request."""
        self._requests.labels(str(status)).inc()
        self._seconds.observe(seconds)

    def searched(self, queries: int) -> None:
        """Count one call of the index."""
        self._queries.inc(queries)
        self._batches.observe(queries)

    def render(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)
