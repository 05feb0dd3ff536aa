"""What a hook says of itself, and where it is asked: /healthz, /readyz and /metrics of a hook's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Receive, Scope, Send

TEXT: Final = "text/plain; charset=utf-8"
METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"
STARTING: Final = "it is starting"


class IntegrationStatus:
    """What one hook says of itself, from one start of it to its end.

    `registry` is the hook's own: what it puts there is under /metrics, and goes when the hook is started
    anew. Metric names begin with ``rfork_HOOK_``, so that no two hooks have one name.
    """

    def __init__(self, integration: str) -> None:
        self.integration = integration
        self.registry = CollectorRegistry()
        self.is_leader: bool | None = None
        """Whether it acts, where only one of its replicas does; None: each of them does."""
        self.not_ready_reason: str | None = STARTING
        """Why it is not ready, in a few words; None: it is."""

    def ready(self) -> None:
        """It does its work, or, where another replica leads, would take over at once."""
        self.not_ready_reason = None

    def not_ready(self, why: str) -> None:
        """It cannot do its work; `why` in a few words."""
        self.not_ready_reason = why

    def leader(self, is_leader: bool) -> None:
        """Whether this replica is the one that acts."""
        self.is_leader = is_leader

    def __str__(self) -> str:
        state_text = "ready" if self.not_ready_reason is None else f"not ready: {self.not_ready_reason}"
        return f"{self.integration}: {state_text}{', leader' if self.is_leader else ''}"


Statuses = Callable[[], Sequence[IntegrationStatus]]


class IntegrationMetrics(Collector):
    """What all hooks of a process tell Prometheus; to be registered where the process's own metrics are."""

    def __init__(self, statuses: Statuses) -> None:
        self._statuses = statuses

    def collect(self) -> Iterator[Metric]:
        """``rfork_hook_ready`` and ``rfork_hook_leader`` by hook, and what is in each one's own registry."""
        statuses = tuple(self._statuses())
        ready = GaugeMetricFamily("rfork_hook_ready", "Whether the hook does its work", labels=["hook"])
        leader = GaugeMetricFamily("rfork_hook_leader", "Whether this replica is the one that acts", labels=["hook"])
        for status in statuses:
            ready.add_metric([status.integration], float(status.not_ready_reason is None))
            if status.is_leader is not None:
                leader.add_metric([status.integration], float(status.is_leader))
        yield ready
        yield leader
        for status in statuses:
            yield from status.registry.collect()


def probes_app(statuses: Statuses, registry: CollectorRegistry) -> ASGIApp:
    """The ASGI application: /healthz (the event loop turns), /readyz (each hook is ready), /metrics.

    `registry` is the process's own; what the hooks tell is to be in it as `IntegrationMetrics`.
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
