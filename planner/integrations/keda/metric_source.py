"""Evaluates triggers: polls the planner and its engines, at most once a second for all triggers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from prometheus_client import CollectorRegistry, Counter

from planner.integrations.keda import signals
from planner.integrations.keda.engine_metrics import EngineUnreachable
from planner.integrations.keda.signals import (
    AnnouncedReplicas,
    EngineReports,
    MetricPage,
    MetricUnavailable,
    TriggerReading,
)
from planner.integrations.keda.triggers import ENGINE_METRICS, Scheme, Trigger
from planner.integrations.planner_api import PlannerApi
from rfork.logs import logger
from rfork.schema import InstanceInfo
from rfork.tracing import NO_SPAN, NOOP_TRACER, Span, Tracer, current_context

CACHE_TTL_S: Final = 1.0
"""Maximum age of a cached value."""
HOST_RETENTION_S: Final = 20.0
"""Time for which an engine that the planner no longer lists is still polled: a few heartbeats."""
WARMUP_S: Final = 10.0
"""Time after the start during which a list without engines counts as incomplete: a planner that started at
the same time (an upgrade, a lost node) lists instances only after their next heartbeats.
"""
MAX_CONCURRENT: Final = 64
"""Maximum concurrent requests to the engines of one model: if they do not respond, other models are not
delayed.
"""
MAX_SILENT_ENDPOINTS: Final = 1000
"""Maximum number of endpoints whose silent engines are remembered: endpoints come from triggers, so their
number is not bounded otherwise.
"""
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Clock = Callable[[], float]


class CoalescingCache(Generic[Key, Value]):
    """Calls `fetch` at most once per key and `ttl_s` seconds: hundreds of triggers need the same values.

    All callers that share a fetch get its result or its exception. Cancelling one caller does not cancel the
    fetch. For one event loop.
    """

    def __init__(self, fetch: Callable[[Key], Awaitable[Value]], ttl_s: float, clock: Clock) -> None:
        self._fetch = fetch
        self._ttl_s = ttl_s
        self._clock = clock
        self._tasks: dict[Key, asyncio.Task[Value]] = {}
        self._fetched_at: dict[Key, float] = {}

    async def get(self, key: Key) -> Value:
        """Return the value of a key, at most `ttl_s` seconds old."""
        now = self._clock()
        for stale in [each for each, at in self._fetched_at.items() if now - at >= self._ttl_s]:
            del self._tasks[stale], self._fetched_at[stale]
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._run_fetch(key))
        return await asyncio.shield(self._tasks[key])

    async def close(self) -> None:
        """Cancel fetches in progress."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_fetch(self, key: Key) -> Value:
        try:
            return await self._fetch(key)
        finally:
            self._fetched_at[key] = self._clock()


class EngineClient(Protocol):
    """Interface to read an engine's metrics."""

    async def read(self, host: str, *, scheme: str, port: int, path: str) -> MetricPage:
        """Return the engine's metrics. Raises EngineUnreachable."""


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """The engines of one model, and the address of their metrics."""

    model: str
    scheme: Scheme
    port: int
    path: str


class MetricSource:
    """Returns current readings for triggers. For one event loop.

    Raises PlannerUnavailable or signals.MetricUnavailable.
    """

    def __init__(
        self,
        planner_api: PlannerApi,
        engines: EngineClient,
        clock: Clock,
        registry: CollectorRegistry,
        tracer: Tracer = NOOP_TRACER,
    ) -> None:
        self._planner_api = planner_api
        self._tracer = tracer
        self._engines = engines
        self._clock = clock
        self._instances: CoalescingCache[str, tuple[InstanceInfo, ...]] = CoalescingCache(
            self._list_instances, CACHE_TTL_S, clock
        )
        self._forks: CoalescingCache[None, Mapping[str, int]] = CoalescingCache(self._count_forks, CACHE_TTL_S, clock)
        self._scaleups: CoalescingCache[None, Mapping[str, AnnouncedReplicas]] = CoalescingCache(
            self._list_scaleups, CACHE_TTL_S, clock
        )
        self._engine_reports: CoalescingCache[EngineEndpoint, EngineReports] = CoalescingCache(
            self._poll_engines, CACHE_TTL_S, clock
        )
        self._warm_at = clock() + WARMUP_S
        self._hosts: dict[str, dict[str, float]] = {}
        """For each model: its hosts, and the time until which each is polled."""
        self._silent: dict[EngineEndpoint, frozenset[str]] = {}
        self._engine_requests = Counter(
            "rfork_scaler_engine_requests", "Requests for an engine's metrics", ["result"], registry=registry
        )
        self._log = logger("planner.integrations.keda")

    async def read(self, trigger: Trigger) -> TriggerReading:
        """Return the trigger's current value."""
        if trigger.metric == "forks":
            return signals.fork_reading(trigger, (await self._forks.get(None)).get(trigger.model, 0))
        if trigger.metric not in ENGINE_METRICS:
            return signals.scaleup_reading(trigger, await self._expected_replicas(trigger.model))
        engines = await self._engine_reports.get(
            EngineEndpoint(trigger.model, trigger.scheme, trigger.port, trigger.path)
        )
        if engines.reported or engines.silent:
            return signals.engine_reading(trigger, engines)
        reading = signals.reading_without_engines(await self._expected_replicas(trigger.model), engines.loading_ranks)
        if not reading.active and self._clock() < self._warm_at:
            raise MetricUnavailable(
                f"the planner lists no instance of {trigger.model}, but the scaler has just started and the list "
                "may be incomplete"
            )
        return reading

    async def close(self) -> None:
        """Cancel fetches in progress."""
        for cache in (self._engine_reports, self._instances, self._forks, self._scaleups):
            await cache.close()

    async def _expected_replicas(self, model: str) -> AnnouncedReplicas:
        return (await self._scaleups.get(None)).get(model, signals.NO_SCALEUP)

    async def _list_instances(self, model: str) -> tuple[InstanceInfo, ...]:
        """Return the engines that serve or load the model: a holder's image has no server."""
        with self._planner_span("/v1/instances"):
            instances = await self._planner_api.instances(model=model)
        return tuple(each for each in instances if each.report.holder is None)

    async def _count_forks(self, _: None) -> Mapping[str, int]:
        with self._planner_span("/v1/forks"):
            return signals.forking_ranks(await self._planner_api.forks())

    async def _list_scaleups(self, _: None) -> Mapping[str, AnnouncedReplicas]:
        with self._planner_span("/v1/scaleups"):
            return signals.expected_replicas(await self._planner_api.scaleups())

    def _planner_span(self, route: str) -> AbstractContextManager[Span]:
        """Return a span for a request to the planner, or a no-op span if the caller is not traced."""
        if current_context() is None:
            return NO_SPAN
        return self._tracer.span(f"GET {route}", kind="client", method="GET", route=route)

    async def _poll_engines(self, endpoint: EngineEndpoint) -> EngineReports:
        instances = await self._instances.get(endpoint.model)
        hosts = signals.hosts_to_poll(self._hosts.get(endpoint.model, {}), instances, self._clock(), HOST_RETENTION_S)
        self._hosts[endpoint.model] = hosts
        if not hosts:
            del self._hosts[endpoint.model]
        request_slots = asyncio.Semaphore(MAX_CONCURRENT)
        traced = self._tracer if current_context() is not None else NOOP_TRACER
        with traced.span("poll engines", kind="client", model=endpoint.model, engines=len(hosts)) as span:
            found = await asyncio.gather(*(self._read_engine(host, endpoint, request_slots) for host in hosts))
            span.set(silent=sum(isinstance(result, str) for result in found))
        results = dict(zip(hosts, found, strict=True))
        engines = EngineReports(
            reported={host: page for host, page in results.items() if not isinstance(page, str)},
            # A failure of an engine that the planner no longer lists has no meaning.
            silent={
                host: reason for host, reason in results.items() if isinstance(reason, str) and hosts[host] == math.inf
            },
            loading_ranks=signals.loading_ranks(instances),
        )
        self._engine_requests.labels("ok").inc(len(engines.reported))
        self._engine_requests.labels("failed").inc(len(engines.silent))
        self._log_silent(endpoint, engines)
        return engines

    async def _read_engine(
        self, host: str, endpoint: EngineEndpoint, request_slots: asyncio.Semaphore
    ) -> MetricPage | str:
        """Return the engine's metrics, or the reason why there are none."""
        async with request_slots:
            try:
                return await self._engines.read(host, scheme=endpoint.scheme, port=endpoint.port, path=endpoint.path)
            except EngineUnreachable as error:
                return str(error)

    def _log_silent(self, endpoint: EngineEndpoint, engines: EngineReports) -> None:
        """Log a line if the set of silent engines changed."""
        silent = frozenset(engines.silent)
        if silent == self._silent.pop(endpoint, frozenset()):
            if silent:
                self._silent[endpoint] = silent  # move it to the end: it was checked most recently
            return
        if silent:
            while len(self._silent) >= MAX_SILENT_ENDPOINTS:
                del self._silent[next(iter(self._silent))]
            self._silent[endpoint] = silent
            self._log.warning(
                "engines left out of the metrics: they do not respond",
                model=endpoint.model, silent=len(silent), reporting=len(engines.reported),
                reasons=_sample_reasons(engines.silent),
            )  # fmt: skip
        elif engines.reported:
            self._log.info("all engines respond again", model=endpoint.model, reporting=len(engines.reported))


def _sample_reasons(reasons: Mapping[str, str], limit: int = 5) -> list[str]:
    return [f"{host} {reason}" for host, reason in sorted(reasons.items())[:limit]]
