"""Spans of the controller."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from planner.integrations.kubernetes.controller.actions import MAX_LOGGED, Action, ActionExecutor, ControllerMetrics
from planner.integrations.planner_api import PlannerUnavailable
from rfork.schema import ScaleUp, ScaleUpInfo
from rfork.tracing import TraceContext, current_context
from tests.unit.fake_clock import FakeClock
from tests.unit.planner.integrations.kubernetes.controller.controller_harness import ControllerHarness
from tests.unit.planner.integrations.kubernetes.controller.serving_workload import WORKLOAD_UID, deploy_seeds
from tests.unit.tracing.span_recorder import SpanRecorder


def with_recorder(harness: ControllerHarness, recorder: SpanRecorder) -> ControllerHarness:
    """Return the harness with a traced controller."""
    harness.tracer = recorder.tracer
    harness.controller = harness.new_leader()
    return harness


async def test_announcing_is_a_span_within_the_reconcile(harness: ControllerHarness) -> None:
    """With OpenTelemetry's attribute names; the request to the planner is in the same trace."""
    recorder, contexts = SpanRecorder(), list[TraceContext | None]()
    with_recorder(harness, recorder)
    announce = harness.planner_api.announce

    async def seen(scaleup: ScaleUp) -> ScaleUpInfo:
        contexts.append(current_context())
        return await announce(scaleup)

    harness.planner_api.announce = seen  # type: ignore[method-assign]
    deployment = harness.cluster.deploy(1, 3)
    await harness.step()
    assert recorder.parent("reconcile") is None
    assert "reconcile" == recorder.parent("announce scale-up")
    assert "reconcile" == recorder.parent("write event")
    attributes = recorder.attributes("announce scale-up")
    assert deployment.namespace == attributes["k8s.namespace.name"]
    assert deployment.name == attributes["k8s.deployment.name"]
    assert WORKLOAD_UID == attributes["rfork.scaleup"]
    assert 3 == attributes["rfork.replicas"]
    own = recorder.spans["announce scale-up"].context
    assert [TraceContext(f"{own.trace_id:032x}", f"{own.span_id:016x}")] == contexts


async def test_spans_name_their_pod(harness: ControllerHarness) -> None:
    """The spans for a condition and a deletion cost have the Pod's name and UID."""
    recorder = SpanRecorder()
    _, (pod,) = await deploy_seeds(with_recorder(harness, recorder))
    for name in ("set pod condition", "annotate pod"):
        attributes = recorder.attributes(name)
        assert pod.namespace == attributes["k8s.namespace.name"]
        assert pod.name == attributes["k8s.pod.name"]
        assert pod.uid == attributes["k8s.pod.uid"]


async def test_an_idle_reconcile_has_no_span(harness: ControllerHarness) -> None:
    """Polls of the planner every two seconds get no spans."""
    recorder = SpanRecorder()
    await deploy_seeds(with_recorder(harness, recorder))
    before = len(recorder.names)
    await harness.step(times=20)
    assert before == len(recorder.names)


async def test_a_failed_action_fails_its_span(harness: ControllerHarness) -> None:
    """The reconcile continues. The action's span has the reason, and there is none while it backs off."""
    recorder = SpanRecorder()
    with_recorder(harness, recorder)
    harness.cluster.deploy(1, 3)
    await harness.controller.refresh()

    async def refuses(scaleup: ScaleUp) -> ScaleUpInfo:
        raise PlannerUnavailable("rejected")

    harness.planner_api.announce = refuses  # type: ignore[method-assign]
    await harness.controller.reconcile()
    await harness.controller.reconcile()
    (span,) = recorder.all_named("announce scale-up")
    assert not span.status.is_ok
    assert "PlannerUnavailable: rejected" == span.status.description
    assert recorder.spans["reconcile"].status.is_unset


async def test_a_missing_permission_logs_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    """The number of logged reasons is bounded until an action succeeds."""
    clock = FakeClock()
    acting = ActionExecutor(clock, ControllerMetrics(CollectorRegistry()))

    def action(number: int) -> Action:
        async def call() -> None:
            raise PlannerUnavailable(f"403 for {number}")

        return Action("event", str(number), call)

    for number in range(10 * MAX_LOGGED):
        clock.now += 1
        await acting.run([action(number)], lambda: True)
    assert MAX_LOGGED == len(caplog.records)
