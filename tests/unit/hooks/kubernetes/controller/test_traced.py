"""What the controller does, as spans."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from planner.hooks.fleet import PlannerAway
from planner.hooks.kubernetes.controller.acting import MOST_LOGGED, Acting, Action
from planner.hooks.kubernetes.controller.metrics import Metrics
from rfork.tracing import TraceContext, here
from rfork.wire import ScaleUp, ScaleUpView
from tests.unit.clock import Clock
from tests.unit.hooks.kubernetes.controller.serving import SERVE, serving
from tests.unit.hooks.kubernetes.controller.stage import Stage
from tests.unit.tracing.spans import Kept


def traced(stage: Stage, kept: Kept) -> Stage:
    """The stage, with a controller whose spans are kept."""
    stage.tracer = kept.tracer
    stage.controller = stage.another()
    return stage


async def test_a_scale_up_is_announced_within_a_reconcile(stage: Stage) -> None:
    """With what it is about, by OpenTelemetry's names; the planner's call is made in its trace."""
    kept, contexts = Kept(), list[TraceContext | None]()
    traced(stage, kept)
    announce = stage.fleet.announce

    async def seen(scaleup: ScaleUp) -> ScaleUpView:
        contexts.append(here())
        return await announce(scaleup)

    stage.fleet.announce = seen  # type: ignore[method-assign]
    deployment = stage.cluster.deploy(1, 3)
    await stage.step()
    assert (None, "reconcile", "reconcile") == tuple(
        map(kept.parent, ("reconcile", "announce scale-up", "write event"))
    )
    told = kept.attributes("announce scale-up")
    assert (deployment.namespace, deployment.name, SERVE, 3) == (
        told["k8s.namespace.name"], told["k8s.deployment.name"], told["rfork.scaleup"],
        told["rfork.replicas"],
    )  # fmt: skip
    own = kept.spans["announce scale-up"].context
    assert [TraceContext(f"{own.trace_id:032x}", f"{own.span_id:016x}")] == contexts


async def test_a_pod_is_named_as_others_name_it(stage: Stage) -> None:
    """The condition and the cost that are written, by the Pod's name and UID."""
    kept = Kept()
    _, (pod,) = await serving(traced(stage, kept))
    for name in ("set pod condition", "annotate pod"):
        told = kept.attributes(name)
        assert (pod.namespace, pod.name, pod.uid) == (
            told["k8s.namespace.name"], told["k8s.pod.name"], told["k8s.pod.uid"],
        )  # fmt: skip


async def test_where_nothing_is_done_there_are_no_spans(stage: Stage) -> None:
    """Looks at the planner, every two seconds for ever, are none."""
    kept = Kept()
    await serving(traced(stage, kept))
    before = len(kept.names)
    await stage.step(times=20)
    assert before == len(kept.names)


async def test_what_fails_says_so(stage: Stage) -> None:
    """The reconcile goes on; the action's span says why it failed, and it is none while it has to wait."""
    kept = Kept()
    traced(stage, kept)
    stage.cluster.deploy(1, 3)
    await stage.controller.look()

    async def refuses(scaleup: ScaleUp) -> ScaleUpView:
        raise PlannerAway("it refuses")

    stage.fleet.announce = refuses  # type: ignore[method-assign]
    await stage.controller.reconcile()
    await stage.controller.reconcile()
    (span,) = kept.all_named("announce scale-up")
    assert (False, "PlannerAway: it refuses", True) == (
        span.status.is_ok,
        span.status.description,
        kept.spans["reconcile"].status.is_unset,
    )


async def test_a_permission_that_is_missing_is_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever each reason names, until something succeeds: memory and log are bounded."""
    clock = Clock()
    acting = Acting(clock, Metrics(CollectorRegistry()))

    def action(number: int) -> Action:
        async def call() -> None:
            raise PlannerAway(f"403 for {number}")

        return Action("event", str(number), call)

    for number in range(10 * MOST_LOGGED):
        clock.now += 1
        await acting.do([action(number)], lambda: True)
    assert MOST_LOGGED == len(caplog.records)
