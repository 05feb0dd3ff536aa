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


class Status:
    """What one hook says of itself, from one start of it to its end.

    `registry` is the hook's own: what it puts there is under /metrics, and goes when the hook is started
    anew. Metric names begin with ``rfork_HOOK_``, so that no two hooks have one name.
    """

    def __init__(self, hook: str) -> None:
        self.hook = hook
        self.registry = CollectorRegistry()
        self.leads: bool | None = None
        """Whether it acts, where only one of its replicas does; None: each of them does."""
        self.why_not: str | None = STARTING
        """Why it is not ready, in a few words; None: it is."""

    def ready(self) -> None:
        """It does its work, or, where another replica leads, would take over at once."""
        self.why_not = None

    def not_ready(self, why: str) -> None:
        """It cannot do its work; `why` in a few words."""
        self.why_not = why

    def leader(self, leads: bool) -> None:
        """Whether this replica is the one that acts."""
        self.leads = leads

    def __str__(self) -> str:
        said = "ready" if self.why_not is None else f"not ready: {self.why_not}"
        return f"{self.hook}: {said}{', leader' if self.leads else ''}"


Statuses = Callable[[], Sequence[Status]]


class HookMetrics(Collector):
    """What all hooks of a process tell Prometheus; to be registered where the process's own metrics are."""

    def __init__(self, statuses: Statuses) -> None:
        self._statuses = statuses

    def collect(self) -> Iterator[Metric]:
        """``rfork_hook_ready`` and ``rfork_hook_leader`` by hook, and what is in each one's own registry."""
        statuses = tuple(self._statuses())
        ready = GaugeMetricFamily("rfork_hook_ready", "Whether the hook does its work", labels=["hook"])
        leader = GaugeMetricFamily(
            "rfork_hook_leader", "Whether this replica is the one that acts", labels=["hook"]
        )
        for status in statuses:
            ready.add_metric([status.hook], float(status.why_not is None))
            if status.leads is not None:
                leader.add_metric([status.hook], float(status.leads))
        yield ready
        yield leader
        for status in statuses:
            yield from status.registry.collect()


def probes_app(statuses: Statuses, registry: CollectorRegistry) -> ASGIApp:
    """The ASGI application: /healthz (the event loop turns), /readyz (each hook is ready), /metrics.

    `registry` is the process's own; what the hooks tell is to be in it as `HookMetrics`.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        status, kind, body = _answer(scope["path"], statuses(), registry)
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    return answer


def _answer(path: str, statuses: Sequence[Status], registry: CollectorRegistry) -> tuple[int, str, bytes]:
    if path == "/healthz":
        return 200, TEXT, b"ok\n"
    if path == "/readyz":
        ready = all(status.why_not is None for status in statuses)
        return 200 if ready else 503, TEXT, "".join(f"{status}\n" for status in statuses).encode()
    if path == "/metrics":
        return 200, METRICS, generate_latest(registry)
    return 404, TEXT, b"not found: there are /healthz, /readyz and /metrics\n"
