"""Status of an integration, the endpoints that report it, and detection of a hidden cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Receive, Scope, Send

TEXT: Final = "text/plain; charset=utf-8"
METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"
STARTING: Final = "starting"


class IntegrationStatus:
    """Status of one integration, from one start to its end.

    `registry` belongs to the integration: its metrics appear under /metrics and disappear when the
    integration restarts. Metric names begin with ``rfork_NAME_``, so that those of two integrations never
    collide.
    """

    def __init__(self, integration: str) -> None:
        self.integration = integration
        self.registry = CollectorRegistry()
        self.is_leader: bool | None = None
        """True if this replica is the leader. None for an integration without leader election."""
        self.not_ready_reason: str | None = STARTING
        """Short reason why it is not ready. None: it is ready."""

    def ready(self) -> None:
        """Report that it works, or that it is a standby that can take over immediately."""
        self.not_ready_reason = None

    def not_ready(self, reason: str) -> None:
        """Report that it does not work. `reason` is a short phrase."""
        self.not_ready_reason = reason

    def leader(self, is_leader: bool) -> None:
        """Set the leadership of this replica."""
        self.is_leader = is_leader

    def __str__(self) -> str:
        state_text = "ready" if self.not_ready_reason is None else f"not ready: {self.not_ready_reason}"
        return f"{self.integration}: {state_text}{', leader' if self.is_leader else ''}"


Statuses = Callable[[], Sequence[IntegrationStatus]]


class IntegrationMetrics(Collector):
    """Prometheus collector for all integrations of a process. Register it in the process's own registry."""

    def __init__(self, statuses: Statuses) -> None:
        self._statuses = statuses

    def collect(self) -> Iterator[Metric]:
        """Yield ``rfork_integration_ready``, ``rfork_integration_leader`` and each integration's own metrics."""
        statuses = tuple(self._statuses())
        ready = GaugeMetricFamily("rfork_integration_ready", "1 if the integration works", labels=["integration"])
        leader = GaugeMetricFamily(
            "rfork_integration_leader", "1 if this replica is the leader", labels=["integration"]
        )
        for status in statuses:
            ready.add_metric([status.integration], float(status.not_ready_reason is None))
            if status.is_leader is not None:
                leader.add_metric([status.integration], float(status.is_leader))
        yield ready
        yield leader
        for status in statuses:
            yield from status.registry.collect()


def probes_app(statuses: Statuses, registry: CollectorRegistry) -> ASGIApp:
    """Return the ASGI application for /healthz, /readyz (each integration is ready) and /metrics.

    `registry` is the process's own and must contain the `IntegrationMetrics`.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        status, content_type, body = _route(scope["path"], statuses(), registry)
        headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    return app


def _route(path: str, statuses: Sequence[IntegrationStatus], registry: CollectorRegistry) -> tuple[int, str, bytes]:
    if path == "/healthz":
        return 200, TEXT, b"ok\n"
    if path == "/readyz":
        ready = all(status.not_ready_reason is None for status in statuses)
        return 200 if ready else 503, TEXT, "".join(f"{status}\n" for status in statuses).encode()
    if path == "/metrics":
        return 200, METRICS, generate_latest(registry)
    return 404, TEXT, b"not found: there are /healthz, /readyz and /metrics\n"


def raise_if_cancelled() -> None:
    """Raise CancelledError if the current task was cancelled but kept running.

    Call it where a task continues after an error: if an awaited operation fails while it is being cancelled,
    `asyncio.gather` and task groups raise only the error.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():  # type: ignore[attr-defined]  # Python 3.11
        raise asyncio.CancelledError
