"""Executes the controller's actions: concurrent calls that cannot block each other; and its metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from planner.integrations.kubernetes.api_server import ClusterUnavailable, NotFound, ResourceConflict
from planner.integrations.kubernetes.cluster import ObjectRef, ObservedPod
from planner.integrations.planner_api import PlannerUnavailable
from rfork.asyncio_timeout import timeout
from rfork.logs import logger
from rfork.tracing import NOOP_TRACER, Span, Tracer, Value

SPAN_NAMES: Final[Mapping[str, str]] = {
    "announce": "announce scale-up",
    "withdraw": "withdraw scale-up",
    "remove": "remove instance",
    "annotate": "annotate pod",
    "condition": "set pod condition",
    "event": "write event",
}
"""Span name of each action type."""
RESOURCE_NAMES: Final[Mapping[str, str]] = {
    "Deployment": "deployment",
    "StatefulSet": "statefulset",
    "Pod": "pod",
}
"""Kinds for which OpenTelemetry has name attributes."""

SpanAttributes = Mapping[str, Value]
"""Attributes of a span."""
RECONCILE_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
ACTIONS: Final = ("announce", "withdraw", "remove", "annotate", "condition", "event")
MAX_CONCURRENT: Final = 8
CALL_TIMEOUT_S: Final = 5.0
"""Timeout of one call."""
TOTAL_TIMEOUT_S: Final = 1.0
"""No call starts later than this: newer decisions may matter more, and the next reconcile repeats what is
left.
"""
MIN_BACKOFF_S: Final = 2.0
MAX_BACKOFF_S: Final = 120.0
MAX_FAILURES: Final = 10_000
MAX_LOGGED: Final = 20
"""Maximum number of reasons logged per action type until one action of the type succeeds. Most reasons
contain the subject, and a missing permission fails for every Pod of a cluster.
"""


def object_attributes(subject: ObjectRef) -> SpanAttributes:
    """Attributes of any object."""
    attributes = {"namespace": subject.namespace, "object": f"{subject.kind}/{subject.name}"}
    if subject.kind in RESOURCE_NAMES:
        attributes[RESOURCE_NAMES[subject.kind]] = subject.name
    return attributes | ({"pod_uid": subject.uid} if subject.kind == "Pod" else {})


def pod_attributes(pod: ObservedPod) -> SpanAttributes:
    """Attributes of a Pod."""
    return object_attributes(pod.ref)


class ControllerMetrics:
    """The controller's metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.leader = Gauge("rfork_controller_leader", "1 if this replica is the leader", registry=registry)
        self.planner_down = Gauge(
            "rfork_controller_planner_unavailable", "1 if the planner does not respond", registry=registry
        )
        self.pods = Gauge("rfork_controller_pods", "Watched Pods", registry=registry)
        self.pending_replicas = Gauge(
            "rfork_controller_pending_replicas", "Replicas that are expected to fork", registry=registry
        )
        self.mixed_versions = Gauge(
            "rfork_controller_mixed_versions",
            "Workloads whose Pods have had several versions of a model for more than an hour",
            registry=registry,
        )
        self.actions = Counter(
            "rfork_controller_actions", "Completed actions: scale-ups announced, Events written, …", ("action",),
            registry=registry,
        )  # fmt: skip
        self.failures = Counter(
            "rfork_controller_failed_actions", "Failed actions, which are retried", ("action",),
            registry=registry,
        )  # fmt: skip
        self.decide_seconds = Histogram(
            "rfork_controller_decide_seconds", "Time to decide the actions", buckets=RECONCILE_S,
            registry=registry,
        )  # fmt: skip
        self.reconcile_seconds = Histogram(
            "rfork_controller_reconcile_seconds", "Time to decide and run the actions", buckets=RECONCILE_S,
            registry=registry,
        )  # fmt: skip
        for action in ACTIONS:
            self.actions.labels(action)
            self.failures.labels(action)


@dataclass(frozen=True)
class Action:
    """One call."""

    action_type: str
    """Label in the metrics."""
    subject: str
    """Object of the action. Failures back off per object."""
    call: Callable[[], Awaitable[None]]
    span_attributes: SpanAttributes = field(default_factory=dict)
    """Attributes of its span."""


@dataclass(frozen=True)
class _Failure:
    reason: str
    pause_s: float
    until: float


class ActionExecutor:
    """Runs actions with exponential backoff per object, and one span per action.

    Each reason is logged once, and at most `MAX_LOGGED` reasons of one type until an action of that type
    succeeds.
    """

    def __init__(self, clock: Callable[[], float], metrics: ControllerMetrics, tracer: Tracer = NOOP_TRACER) -> None:
        self._clock = clock
        self._metrics = metrics
        self._tracer = tracer
        self._failures: dict[tuple[str, str], _Failure] = {}
        self._logged: dict[str, set[str]] = {}
        """Reasons logged since the last success, by action type."""
        self._log = logger(__name__)

    def due(self, actions: Iterable[Action]) -> tuple[Action, ...]:
        """Return the actions that are not backing off."""
        now = self._clock()
        return tuple(action for action in actions if not self._is_backing_off(action, now))

    async def run(self, actions: Iterable[Action], allowed: Callable[[], bool]) -> None:
        """Run the due actions in order, several at a time. Returns when all have finished.

        `allowed` is called before each action, because another replica may have become the leader.
        """
        call_slots = asyncio.Semaphore(MAX_CONCURRENT)
        until = time.monotonic() + TOTAL_TIMEOUT_S
        failed_in_a_row = 0

        async def one(action: Action) -> None:
            nonlocal failed_in_a_row
            async with call_slots:
                # The other side is down. The next reconcile repeats what is left.
                too_many_failures = failed_in_a_row >= 2 * MAX_CONCURRENT
                if not too_many_failures and time.monotonic() < until and allowed():
                    failed_in_a_row = 0 if await self._run_one(action) else failed_in_a_row + 1

        await asyncio.gather(*map(one, self.due(actions)))

    def _is_backing_off(self, action: Action, now: float) -> bool:
        failure = self._failures.get((action.action_type, action.subject))
        return failure is not None and now < failure.until

    async def _run_one(self, action: Action) -> bool:
        """Return True if the other side responded."""
        with self._tracer.span(SPAN_NAMES.get(action.action_type, action.action_type), kind="client") as span:
            span.set(**action.span_attributes)
            return await self._try(action, span)

    async def _try(self, action: Action, span: Span) -> bool:
        """Return True if the other side responded. Records failures in the span."""
        key = action.action_type, action.subject
        try:
            async with timeout(CALL_TIMEOUT_S):
                await action.call()
        except (NotFound, ResourceConflict) as error:
            # The object changed since it was observed: a watch event will follow.
            span.event("object changed or deleted", detail=str(error))
        except TimeoutError:
            reason = f"no response within {CALL_TIMEOUT_S:g} s"
            span.fail(reason)
            self._failed(action, reason)
            return False
        except (ClusterUnavailable, PlannerUnavailable) as error:
            span.fail(error)
            self._failed(action, str(error))
            return False
        except Exception as error:  # an error about one Pod must not affect the others
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
        pause_s = min(MAX_BACKOFF_S, 2 * before.pause_s) if before else MIN_BACKOFF_S
        while len(self._failures) >= MAX_FAILURES:
            del self._failures[next(iter(self._failures))]
        self._failures[key] = _Failure(reason, pause_s, self._clock() + pause_s)
        logged = self._logged.setdefault(action.action_type, set())
        new = (before is None or before.reason != reason) and reason not in logged
        if new and len(logged) < MAX_LOGGED:
            logged.add(reason)
            self._log.warning(
                "controller action failed, retrying",
                action=action.action_type,
                subject=action.subject,
                reason=reason,
                exc_info=unexpected,
            )
