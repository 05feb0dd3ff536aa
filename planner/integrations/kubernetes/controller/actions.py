"""Doing what was decided: many calls at once, none of which can stop another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from planner.integrations.kubernetes.cluster import ClusterUnavailable, NotFound, ResourceConflict
from planner.integrations.kubernetes.controller.metrics import ControllerMetrics
from planner.integrations.kubernetes.controller.tracing import NAMES, SpanAttributes
from planner.integrations.planner_api import PlannerUnavailable
from rfork.logs import logger
from rfork.tracing import NOOP_TRACER, Span, Tracer

MAX_CONCURRENT: Final = 8
CALL_TIMEOUT_S: Final = 5.0
"""Most seconds of one call."""
TOTAL_TIMEOUT_S: Final = 1.0
"""No call is begun later than that: what is new may matter more, and what is left is found again."""
FIRST_PAUSE_S: Final = 2.0
MAX_BACKOFF_S: Final = 120.0
MAX_FAILURES: Final = 10_000
MAX_LOGGED: Final = 20
"""Reasons that are logged of one kind of action until one of the kind succeeds: most name what it is about,
and a permission that is missing fails for every Pod of a cluster."""


@dataclass(frozen=True)
class Action:
    """One call."""

    action_type: str
    """As the metrics name it."""
    subject: str
    """What it is about; what fails for it is not tried again at once."""
    call: Callable[[], Awaitable[None]]
    span_attributes: SpanAttributes = field(default_factory=dict)
    """What its span says."""


@dataclass(frozen=True)
class _Failure:
    reason: str
    pause_s: float
    until: float


class ActionExecutor:
    """Does actions, and remembers which failed: those wait longer and longer.

    Each is a span of its own. A reason is logged once, and of one kind no more than `MAX_LOGGED` until an
    action of the kind succeeds.
    """

    def __init__(self, clock: Callable[[], float], metrics: ControllerMetrics, tracer: Tracer = NOOP_TRACER) -> None:
        self._clock = clock
        self._metrics = metrics
        self._tracer = tracer
        self._failures: dict[tuple[str, str], _Failure] = {}
        self._logged: dict[str, set[str]] = {}
        """Reasons that were logged since a call of the kind succeeded."""
        self._log = logger(__name__)

    def is_due(self, actions: Iterable[Action]) -> tuple[Action, ...]:
        """Those that do not have to wait because they failed."""
        now = self._clock()
        return tuple(action for action in actions if not self._is_backing_off(action, now))

    async def run(self, actions: Iterable[Action], allowed: Callable[[], bool]) -> None:
        """Do them, the first first, but those that failed and have to wait. Returns when none is under way.

        `allowed` is asked before each: another replica may lead by then.
        """
        call_slots = asyncio.Semaphore(MAX_CONCURRENT)
        until = time.monotonic() + TOTAL_TIMEOUT_S
        failed_in_a_row = 0

        async def one(action: Action) -> None:
            nonlocal failed_in_a_row
            async with call_slots:
                # Nobody is at the other end: what is left is found again by the next reconcile.
                too_many_failures = failed_in_a_row >= 2 * MAX_CONCURRENT
                if not too_many_failures and time.monotonic() < until and allowed():
                    failed_in_a_row = 0 if await self._run_one(action) else failed_in_a_row + 1

        await asyncio.gather(*map(one, self.is_due(actions)))

    def _is_backing_off(self, action: Action, now: float) -> bool:
        failure = self._failures.get((action.action_type, action.subject))
        return failure is not None and now < failure.until

    async def _run_one(self, action: Action) -> bool:
        """Whether the other end answered."""
        with self._tracer.span(NAMES.get(action.action_type, action.action_type), kind="client") as span:
            span.set(**action.span_attributes)
            return await self._try(action, span)

    async def _try(self, action: Action, span: Span) -> bool:
        """Whether the other end answered; what went wrong is told to the span."""
        key = action.action_type, action.subject
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await action.call()
        except (NotFound, ResourceConflict) as error:
            # It is not as it was seen: there will be news of it.
            span.event("gone", detail=str(error))
        except TimeoutError:
            reason = f"no answer within {CALL_TIMEOUT_S:g} s"
            span.fail(reason)
            self._failed(action, reason)
            return False
        except (ClusterUnavailable, PlannerUnavailable) as error:
            span.fail(error)
            self._failed(action, str(error))
            return False
        except Exception as error:  # one Pod's trouble must not become everybody's
            span.fail(error)
            self._failed(action, f"{type(error).__name__}: {error}", unexpected=True)
            return False
        else:
            self._metrics.actions.labels(action.action_type).inc()
        self._failures.pop(key, None)
        self._logged.pop(action.action_type, None)
        return True

    def _failed(self, action: Action, reason: str, *, unexpected: bool = False) -> None:
        self._metrics.failures.labels(action.action_type).inc()
        key = action.action_type, action.subject
        before = self._failures.pop(key, None)
        pause_s = min(MAX_BACKOFF_S, 2 * before.pause_s) if before else FIRST_PAUSE_S
        while len(self._failures) >= MAX_FAILURES:
            del self._failures[next(iter(self._failures))]
        self._failures[key] = _Failure(reason, pause_s, self._clock() + pause_s)
        logged = self._logged.setdefault(action.action_type, set())
        new = (before is None or before.reason != reason) and reason not in logged
        if new and len(logged) < MAX_LOGGED:
            logged.add(reason)
            self._log.warning(
                "not done",
                action=action.action_type,
                subject=action.subject,
                because=reason,
                exc_info=unexpected,
            )
