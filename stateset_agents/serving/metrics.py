"""Metrics in Prometheus's format: of one server, and of whatever else has some. The only file that imports
prometheus_client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from stateset_agents.backends.dialects.request import Answer, ApiError
from stateset_agents.serving.limits import AnswerQueue

if TYPE_CHECKING:
    from aiohttp import web


_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class ServerMetrics:
    """Counts since the server's start; without prometheus_client nothing is counted, and `page` raises."""

    def __init__(self, queue: AnswerQueue) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError:
            self._registry: Any = None
            return
        self._registry = prometheus.CollectorRegistry()
        self._requests = prometheus.Counter(
            "stateset_requests", "Requests by path and status", ["path", "status"], registry=self._registry
        )
        self._seconds = prometheus.Histogram(
            "stateset_request_seconds",
            "From a request's headers to the end of its answer",
            ["path"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._waits = prometheus.Histogram(
            "stateset_wait_seconds",
            "What an answer waited for its turn",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._tokens = prometheus.Counter(
            "stateset_tokens", "Tokens read and sampled", ["kind"], registry=self._registry
        )
        for name, text, count in (
            ("stateset_running", "Answers that are sampled", lambda: queue.num_running),
            ("stateset_waiting", "Answers that wait for their turn", lambda: queue.num_waiting),
        ):
            prometheus.Gauge(name, text, registry=self._registry).set_function(count)

    def middleware(self) -> Callable[..., Awaitable[web.StreamResponse]]:
        """The outermost middleware: counts requests by route and status."""
        from aiohttp import web

        @web.middleware
        async def counted(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            if self._registry is None:
                return await handler(request)
            resource = request.match_info.route.resource
            path = "other" if resource is None else resource.canonical
            with self._seconds.labels(path).time():
                response = await handler(request)
            self._requests.labels(path, response.status).inc()
            return response

        return counted

    def record_wait(self, seconds: float) -> None:
        """Record how long an answer waited for its turn."""
        if self._registry is not None:
            self._waits.observe(seconds)

    def record_answers(self, answers: Sequence[Answer]) -> None:
        """Count the tokens of the complete answers to one request."""
        if self._registry is not None:
            self._tokens.labels("prompt").inc(answers[0].prompt_tokens)
            self._tokens.labels("completion").inc(sum(answer.completion_tokens for answer in answers))

    def page(self) -> tuple[bytes, str]:
        """The text and its content type; raises ApiError, status 501, without prometheus_client."""
        if self._registry is None:
            raise _not_installed()
        return _page(self._registry)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFamily:
    """Values of one name, as they are now."""

    name: str
    """The name without `_total`, which a counter gets."""
    kind: Literal["gauge", "counter"]
    text: str
    labels: tuple[str, ...] = ()
    values: tuple[tuple[tuple[str, ...], float], ...] = ()
    """Each with the values of its labels."""


def metrics_page(families: Iterable[MetricFamily]) -> tuple[bytes, str]:
    """The text and its content type; raises ApiError, status 501, without prometheus_client."""
    try:
        from prometheus_client import CollectorRegistry
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        from prometheus_client.registry import Collector
    except ImportError as error:
        raise _not_installed() from error
    metrics = []
    for family in families:
        kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
        metric = kind(family.name, family.text, labels=family.labels)
        for labels, value in family.values:
            metric.add_metric(labels, value)
        metrics.append(metric)

    class Values(Collector):
        def collect(self) -> Any:
            return metrics

    registry = CollectorRegistry()
    registry.register(Values())
    return _page(registry)


def _page(registry: Any) -> tuple[bytes, str]:
    import prometheus_client as prometheus

    return prometheus.generate_latest(registry), prometheus.CONTENT_TYPE_LATEST


def _not_installed() -> ApiError:
    return ApiError(
        'metrics need prometheus_client. Install it with: pip install "prometheus_client>=0.21"',
        code="metrics_not_installed",
        status=501,
    )
