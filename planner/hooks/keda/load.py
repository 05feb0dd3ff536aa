"""Answers triggers: asks the planner, and the engines that it lists, once a second for all of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Counter

from planner.hooks.fleet import Fleet
from planner.hooks.keda import signals
from planner.hooks.keda.engines import EngineSilent
from planner.hooks.keda.sharing import Clock, Shared
from planner.hooks.keda.signals import Announced, Engines, NothingTold, Page, Reading
from planner.hooks.keda.triggers import OF_ENGINES, Scheme, Trigger
from rfork.logs import logger
from rfork.tracing import NO_SPAN, OFF, Span, Tracer, here
from rfork.wire import InstanceView

KEEP_S: Final = 1.0
"""How old an answer may be."""
REMEMBER_S: Final = 20.0
"""How long an engine is asked that the planner does not list any more: some heartbeats."""
SETTLE_S: Final = 10.0
"""How long after its start the scaler takes "no engine" for "none yet": a planner that started with it (an
upgrade, a lost node) lists nobody until their next heartbeats."""


AT_ONCE: Final = 64
"""Engines of one model that are asked at one time: where they do not answer, those of another go on."""
MOST_SILENT: Final = 1000
"""Ways in which engines are asked of which it is remembered who was silent: any caller may name others."""


class Asks(Protocol):
    """How an engine is asked."""

    async def read(self, host: str, *, scheme: str, port: int, path: str) -> Page:
        """What it tells. Raises EngineSilent."""


@dataclass(frozen=True, slots=True)
class Where:
    """The engines of one model, and how they are asked."""

    model: str
    scheme: Scheme
    port: int
    path: str


class Load:
    """What triggers ask for. Of one event loop; what it raises is PlannerAway, or signals.NothingTold."""

    def __init__(
        self,
        fleet: Fleet,
        engines: Asks,
        clock: Clock,
        registry: CollectorRegistry,
        tracer: Tracer = OFF,
    ) -> None:
        self._fleet = fleet
        self._tracer = tracer
        self._engines = engines
        self._clock = clock
        self._instances: Shared[str, tuple[InstanceView, ...]] = Shared(self._list, KEEP_S, clock)
        self._forks: Shared[None, Mapping[str, int]] = Shared(self._count_forks, KEEP_S, clock)
        self._scaleups: Shared[None, Mapping[str, Announced]] = Shared(self._look_ahead, KEEP_S, clock)
        self._asked: Shared[Where, Engines] = Shared(self._ask, KEEP_S, clock)
        self._settled_at = clock() + SETTLE_S
        self._hosts: dict[str, dict[str, float]] = {}
        """Until when each host of a model is asked."""
        self._silent: dict[Where, frozenset[str]] = {}
        self._looks = Counter(
            "rfork_scaler_engine_looks", "Engines asked for their metrics", ["answer"], registry=registry
        )
        self._log = logger("planner.hooks.keda")

    async def read(self, trigger: Trigger) -> Reading:
        """What the trigger measures now."""
        if trigger.metric == "forks":
            return signals.of_forks(trigger, (await self._forks.get(None)).get(trigger.model, 0))
        if trigger.metric not in OF_ENGINES:
            return signals.of_scaleups(trigger, await self._awaited(trigger.model))
        engines = await self._asked.get(Where(trigger.model, trigger.scheme, trigger.port, trigger.path))
        if engines.told or engines.silent:
            return signals.of_engines(trigger, engines)
        reading = signals.without_engines(await self._awaited(trigger.model), engines.coming)
        if not reading.active and self._clock() < self._settled_at:
            raise NothingTold(
                f"the planner lists no instance of {trigger.model}: the scaler has just started, "
                "and does not know yet whether there is none"
            )
        return reading

    async def close(self) -> None:
        """End what is under way."""
        for shared in (self._asked, self._instances, self._forks, self._scaleups):
            await shared.close()

    async def _awaited(self, model: str) -> Announced:
        return (await self._scaleups.get(None)).get(model, signals.NOBODY)

    async def _list(self, model: str) -> tuple[InstanceView, ...]:
        with self._planner_asked("/v1/instances"):
            return await self._fleet.instances(model=model)

    async def _count_forks(self, _: None) -> Mapping[str, int]:
        with self._planner_asked("/v1/forks"):
            return signals.forking(await self._fleet.forks())

    async def _look_ahead(self, _: None) -> Mapping[str, Announced]:
        with self._planner_asked("/v1/scaleups"):
            return signals.announced(await self._fleet.scaleups())

    def _planner_asked(self, route: str) -> AbstractContextManager[Span]:
        """The span of a look at the planner; of a call for which nothing was known any more, or of none."""
        if here() is None:
            return NO_SPAN
        return self._tracer.span(f"GET {route}", kind="client", method="GET", route=route)

    async def _ask(self, where: Where) -> Engines:
        instances = await self._instances.get(where.model)
        hosts = signals.remembered(self._hosts.get(where.model, {}), instances, self._clock(), REMEMBER_S)
        self._hosts[where.model] = hosts
        if not hosts:
            del self._hosts[where.model]
        places = asyncio.Semaphore(AT_ONCE)
        traced = self._tracer if here() is not None else OFF
        with traced.span("ask engines", kind="client", model=where.model, engines=len(hosts)) as span:
            found = await asyncio.gather(*(self._answer(host, where, places) for host in hosts))
            span.set(silent=sum(isinstance(answer, str) for answer in found))
        answers = dict(zip(hosts, found, strict=True))
        engines = Engines(
            told={host: page for host, page in answers.items() if not isinstance(page, str)},
            # Of one that the planner does not list any more, silence says nothing.
            silent={
                host: why for host, why in answers.items() if isinstance(why, str) and hosts[host] == math.inf
            },
            coming=signals.coming(instances),
        )
        self._looks.labels("told").inc(len(engines.told))
        self._looks.labels("silent").inc(len(engines.silent))
        self._say(where, engines)
        return engines

    async def _answer(self, host: str, where: Where, places: asyncio.Semaphore) -> Page | str:
        """What the engine tells, or why nothing is known of it."""
        async with places:
            try:
                return await self._engines.read(host, scheme=where.scheme, port=where.port, path=where.path)
            except EngineSilent as error:
                return str(error)

    def _say(self, where: Where, engines: Engines) -> None:
        """A line when other engines are silent than before."""
        silent = frozenset(engines.silent)
        if silent == self._silent.pop(where, frozenset()):
            if silent:
                self._silent[where] = silent  # as the one that was looked at last
            return
        if silent:
            while len(self._silent) >= MOST_SILENT:
                del self._silent[next(iter(self._silent))]
            self._silent[where] = silent
            self._log.warning(
                "engines left out", model=where.model, silent=len(silent), told=len(engines.told),
                reasons=_some(engines.silent),
            )  # fmt: skip
        elif engines.told:
            self._log.info("all engines answer again", model=where.model, told=len(engines.told))


def _some(reasons: Mapping[str, str], most: int = 5) -> list[str]:
    return [f"{host} {why}" for host, why in sorted(reasons.items())[:most]]
