"""Doing what was decided: many calls at once, none of which can stop another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from planner.hooks.fleet import PlannerAway
from planner.hooks.kubernetes.cluster import ClusterUnavailable, Conflict, Gone
from planner.hooks.kubernetes.controller.metrics import Metrics
from planner.hooks.kubernetes.controller.traced import NAMES, Told
from rfork.logs import logger
from rfork.tracing import OFF, Span, Tracer

AT_ONCE: Final = 8
CALL_S: Final = 5.0
"""Most seconds of one call."""
ALL_S: Final = 1.0
"""No call is begun later than that: what is new may matter more, and what is left is found again."""
FIRST_PAUSE_S: Final = 2.0
MOST_PAUSE_S: Final = 120.0
MOST_FAILURES: Final = 10_000
MOST_LOGGED: Final = 20
"""Reasons that are logged of one kind of action until one of the kind succeeds: most name what it is about,
and a permission that is missing fails for every Pod of a cluster."""


@dataclass(frozen=True)
class Action:
    """One call."""

    kind: str
    """As the metrics name it."""
    subject: str
    """What it is about; what fails for it is not tried again at once."""
    call: Callable[[], Awaitable[None]]
    told: Told = field(default_factory=dict)
    """What its span says."""


@dataclass(frozen=True)
class _Failure:
    why: str
    pause_s: float
    until: float


class Acting:
    """Does actions, and remembers which failed: those wait longer and longer.

    Each is a span of its own. A reason is logged once, and of one kind no more than `MOST_LOGGED` until an
    action of the kind succeeds.
    """

    def __init__(self, clock: Callable[[], float], metrics: Metrics, tracer: Tracer = OFF) -> None:
        self._clock = clock
        self._metrics = metrics
        self._tracer = tracer
        self._failures: dict[tuple[str, str], _Failure] = {}
        self._logged: dict[str, set[str]] = {}
        """Reasons that were logged since a call of the kind succeeded."""
        self._log = logger(__name__)

    def due(self, actions: Iterable[Action]) -> tuple[Action, ...]:
        """Those that do not have to wait because they failed."""
        now = self._clock()
        return tuple(action for action in actions if not self._waits(action, now))

    async def do(self, actions: Iterable[Action], allowed: Callable[[], bool]) -> None:
        """Do them, the first first, but those that failed and have to wait. Returns when none is under way.

        `allowed` is asked before each: another replica may lead by then.
        """
        places = asyncio.Semaphore(AT_ONCE)
        until = time.monotonic() + ALL_S
        failed_in_a_row = 0

        async def one(action: Action) -> None:
            nonlocal failed_in_a_row
            async with places:
                # Nobody is at the other end: what is left is found again by the next reconcile.
                hopeless = failed_in_a_row >= 2 * AT_ONCE
                if not hopeless and time.monotonic() < until and allowed():
                    failed_in_a_row = 0 if await self._one(action) else failed_in_a_row + 1

        await asyncio.gather(*map(one, self.due(actions)))

    def _waits(self, action: Action, now: float) -> bool:
        failure = self._failures.get((action.kind, action.subject))
        return failure is not None and now < failure.until

    async def _one(self, action: Action) -> bool:
        """Whether the other end answered."""
        with self._tracer.span(NAMES.get(action.kind, action.kind), kind="client") as span:
            span.set(**action.told)
            return await self._tried(action, span)

    async def _tried(self, action: Action, span: Span) -> bool:
        """Whether the other end answered; what went wrong is told to the span."""
        key = action.kind, action.subject
        try:
            async with asyncio.timeout(CALL_S):
                await action.call()
        except (Gone, Conflict) as error:
            # It is not as it was seen: there will be news of it.
            span.event("gone", detail=str(error))
        except TimeoutError:
            why = f"no answer within {CALL_S:g} s"
            span.fail(why)
            self._failed(action, why)
            return False
        except (ClusterUnavailable, PlannerAway) as error:
            span.fail(error)
            self._failed(action, str(error))
            return False
        except Exception as error:  # one Pod's trouble must not become everybody's
            span.fail(error)
            self._failed(action, f"{type(error).__name__}: {error}", unexpected=True)
            return False
        else:
            self._metrics.actions.labels(action.kind).inc()
        self._failures.pop(key, None)
        self._logged.pop(action.kind, None)
        return True

    def _failed(self, action: Action, why: str, *, unexpected: bool = False) -> None:
        self._metrics.failures.labels(action.kind).inc()
        key = action.kind, action.subject
        before = self._failures.pop(key, None)
        pause_s = min(MOST_PAUSE_S, 2 * before.pause_s) if before else FIRST_PAUSE_S
        while len(self._failures) >= MOST_FAILURES:
            del self._failures[next(iter(self._failures))]
        self._failures[key] = _Failure(why, pause_s, self._clock() + pause_s)
        logged = self._logged.setdefault(action.kind, set())
        new = (before is None or before.why != why) and why not in logged
        if new and len(logged) < MOST_LOGGED:
            logged.add(why)
            self._log.warning(
                "not done", action=action.kind, subject=action.subject, because=why, exc_info=unexpected
            )
