"""Answers triggers: asks the planner, and the engines that it lists, once a second for all of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Counter

from planner.integrations.keda import signals
from planner.integrations.keda.coalescing_cache import Clock, CoalescingCache
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
"""How old an answer may be."""
HOST_RETENTION_S: Final = 20.0
"""How long an engine is asked that the planner does not list any more: some heartbeats."""
WARMUP_S: Final = 10.0
"""How long after its start the scaler takes "no engine" for "none yet": a planner that started with it (an
upgrade, a lost node) lists nobody until their next heartbeats."""


MAX_CONCURRENT: Final = 64
"""Engines of one model that are asked at one time: where they do not answer, those of another go on."""
MAX_SILENT_ENDPOINTS: Final = 1000
"""Ways in which engines are asked of which it is remembered who was silent: any caller may name others."""


class EngineClient(Protocol):
    """How an engine is asked."""

    async def read(self, host: str, *, scheme: str, port: int, path: str) -> MetricPage:
        """What it tells. Raises EngineUnreachable."""


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """The engines of one model, and how they are asked."""

    model: str
    scheme: Scheme
    port: int
    path: str


class MetricSource:
    """What triggers ask for. Of one event loop; what it raises is PlannerUnavailable, or signals.MetricUnavailable."""

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
            self._list, CACHE_TTL_S, clock
        )
        self._forks: CoalescingCache[None, Mapping[str, int]] = CoalescingCache(self._count_forks, CACHE_TTL_S, clock)
        self._scaleups: CoalescingCache[None, Mapping[str, AnnouncedReplicas]] = CoalescingCache(
            self._prefetch, CACHE_TTL_S, clock
        )
        self._engine_reports: CoalescingCache[EngineEndpoint, EngineReports] = CoalescingCache(
            self._query_engine, CACHE_TTL_S, clock
        )
        self._warm_at = clock() + WARMUP_S
        self._hosts: dict[str, dict[str, float]] = {}
        """Until when each host of a model is asked."""
        self._silent: dict[EngineEndpoint, frozenset[str]] = {}
        self._engine_requests = Counter(
            "rfork_scaler_engine_looks", "Engines asked for their metrics", ["answer"], registry=registry
        )
        self._log = logger("planner.integrations.keda")

    async def read(self, trigger: Trigger) -> TriggerReading:
        """What the trigger measures now."""
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
                f"the planner lists no instance of {trigger.model}: the scaler has just started, "
                "and does not know yet whether there is none"
            )
        return reading

    async def close(self) -> None:
        """End what is under way."""
        for cache in (self._engine_reports, self._instances, self._forks, self._scaleups):
            await cache.close()

    async def _expected_replicas(self, model: str) -> AnnouncedReplicas:
        return (await self._scaleups.get(None)).get(model, signals.NO_SCALEUP)

    async def _list(self, model: str) -> tuple[InstanceInfo, ...]:
        with self._planner_span("/v1/instances"):
            return await self._planner_api.instances(model=model)

    async def _count_forks(self, _: None) -> Mapping[str, int]:
        with self._planner_span("/v1/forks"):
            return signals.forking_ranks(await self._planner_api.forks())

    async def _prefetch(self, _: None) -> Mapping[str, AnnouncedReplicas]:
        with self._planner_span("/v1/scaleups"):
            return signals.expected_replicas(await self._planner_api.scaleups())

    def _planner_span(self, route: str) -> AbstractContextManager[Span]:
        """The span of a look at the planner; of a call for which nothing was known any more, or of none."""
        if current_context() is None:
            return NO_SPAN
        return self._tracer.span(f"GET {route}", kind="client", method="GET", route=route)

    async def _query_engine(self, endpoint: EngineEndpoint) -> EngineReports:
        instances = await self._instances.get(endpoint.model)
        hosts = signals.hosts_to_poll(self._hosts.get(endpoint.model, {}), instances, self._clock(), HOST_RETENTION_S)
        self._hosts[endpoint.model] = hosts
        if not hosts:
            del self._hosts[endpoint.model]
        request_slots = asyncio.Semaphore(MAX_CONCURRENT)
        traced = self._tracer if current_context() is not None else NOOP_TRACER
        with traced.span("ask engines", kind="client", model=endpoint.model, engines=len(hosts)) as span:
            found = await asyncio.gather(*(self._read_engine(host, endpoint, request_slots) for host in hosts))
            span.set(silent=sum(isinstance(result, str) for result in found))
        results = dict(zip(hosts, found, strict=True))
        engines = EngineReports(
            reported={host: page for host, page in results.items() if not isinstance(page, str)},
            # Of one that the planner does not list any more, silence says nothing.
            silent={
                host: reason for host, reason in results.items() if isinstance(reason, str) and hosts[host] == math.inf
            },
            loading_ranks=signals.loading_ranks(instances),
        )
        self._engine_requests.labels("told").inc(len(engines.reported))
        self._engine_requests.labels("silent").inc(len(engines.silent))
        self._log_silent(endpoint, engines)
        return engines

    async def _read_engine(
        self, host: str, endpoint: EngineEndpoint, request_slots: asyncio.Semaphore
    ) -> MetricPage | str:
        """What the engine tells, or why nothing is known of it."""
        async with request_slots:
            try:
                return await self._engines.read(host, scheme=endpoint.scheme, port=endpoint.port, path=endpoint.path)
            except EngineUnreachable as error:
                return str(error)

    def _log_silent(self, endpoint: EngineEndpoint, engines: EngineReports) -> None:
        """A line when other engines are silent than before."""
        silent = frozenset(engines.silent)
        if silent == self._silent.pop(endpoint, frozenset()):
            if silent:
                self._silent[endpoint] = silent  # as the one that was looked at last
            return
        if silent:
            while len(self._silent) >= MAX_SILENT_ENDPOINTS:
                del self._silent[next(iter(self._silent))]
            self._silent[endpoint] = silent
            self._log.warning(
                "engines left out", model=endpoint.model, silent=len(silent), told=len(engines.reported),
                reasons=_sample_reasons(engines.silent),
            )  # fmt: skip
        elif engines.reported:
            self._log.info("all engines answer again", model=endpoint.model, told=len(engines.reported))


def _sample_reasons(reasons: Mapping[str, str], limit: int = 5) -> list[str]:
    return [f"{host} {reason}" for host, reason in sorted(reasons.items())[:limit]]
