"""The controller with the real planner, in one process and without sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest
from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from planner.app import create_app
from planner.clock import Clock as PlannerClock
from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.cluster import ObservedPod
from planner.integrations.kubernetes.controller.actions import ControllerMetrics
from planner.integrations.kubernetes.controller.controller import Controller
from planner.integrations.planner_api import AsyncPlannerClient
from rfork.schema import ForkRequest, ForkResult, InstanceReport, Plan
from rfork.settings import InstanceSettings, KubernetesSettings, PlannerSettings
from tests.unit.fake_clock import FakeClock
from tests.unit.planner.integrations.kubernetes.fake_cluster import FakeCluster, uid
from tests.unit.planner.integrations.kubernetes.fake_planner_api import IMAGE_BYTES, instance, instance_id
from tests.unit.planner.threadsafe_asgi_transport import ThreadsafeAsgiTransport

WORKLOAD_UID = uid(1)


@dataclass
class RealPlannerHarness:
    """A cluster in memory, a controller, and a planner with its REST API."""

    clock: FakeClock
    cluster: FakeCluster
    planner_api: AsyncPlannerClient
    web: httpx.AsyncClient
    controller: Controller

    async def step(self, seconds: float = 2.0) -> list[tuple[int, int]]:
        """Advance the clock. Return the planner's scale-ups: replicas, and how many have arrived."""
        self.clock.now += seconds
        await self.controller.refresh()
        await self.controller.reconcile()
        return [(view.scaleup.replicas, view.arrived_count) for view in await self.planner_api.scaleups()]

    async def send(self, method: str, path: str, body: BaseModel) -> httpx.Response:
        response = await self.web.request(method, path, json=body.model_dump(mode="json"))
        return response.raise_for_status()

    async def report_instance(self, report: InstanceReport) -> None:
        """Send a heartbeat."""
        await self.send("PUT", f"/v1/instances/{report.instance_id}", report)

    async def request_fork(self, pod: ObservedPod) -> Plan:
        """Request a fork for the Pod's rank."""
        report = instance(pod.uid, "loading", chunks=0, weights_id=None).report
        request = ForkRequest(fork_id=f"fork-{pod.uid}", instance=report)
        return Plan.model_validate_json((await self.send("POST", "/v1/forks", request)).content)

    async def finish_fork(self, pod: ObservedPod, source: ObservedPod) -> None:
        """Finish its fork; it serves."""
        finish = ForkResult(
            outcome="forked",
            seconds=3.1,
            bytes_read=IMAGE_BYTES,
            sources={instance_id(source.uid): IMAGE_BYTES},
        )
        await self.send("POST", f"/v1/forks/fork-{pod.uid}/finish", finish)
        await self.report_instance(instance(pod.uid).report)


@pytest.fixture
async def harness() -> AsyncIterator[RealPlannerHarness]:
    """A planner without batching delays, with the test's clock."""
    clock = FakeClock(1000.0)
    planner_clock = PlannerClock(monotonic=clock, unix=clock)
    app = create_app(PlannerSettings(lease_keys="s" * 32, batch_window_s=0, scaleup_wait_s=0), planner_clock)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app)
    planner_api = AsyncPlannerClient(InstanceSettings(planner="http://planner"), ThreadsafeAsgiTransport(app))
    cluster = FakeCluster(clock)
    settings = KubernetesSettings(namespace="rfork", identity="one")
    controller = Controller(settings, cluster, planner_api, ControllerMetrics(CollectorRegistry()), clock)
    cluster.watch(controller.caches)
    controller.begin()
    async with httpx.AsyncClient(transport=transport, base_url="http://planner") as web:
        yield RealPlannerHarness(clock, cluster, planner_api, web, controller)
    await planner_api.close()


async def test_the_replicas_of_a_scale_up_are_announced_and_counted_down(harness: RealPlannerHarness) -> None:
    """Three replicas are announced, planned and counted down; the Event of a fork names its source."""
    deployment = harness.cluster.deploy(1, 1)
    (seed,) = harness.cluster.create(deployment)
    await harness.report_instance(instance(seed.uid).report)
    harness.cluster.ready(seed)
    seen = [await harness.step()]
    harness.cluster.scale(deployment, 4)
    seen.append(await harness.step())
    pods = harness.cluster.create(deployment, 3)
    plans = [await harness.request_fork(pod) for pod in pods[:2]]
    seen.append(await harness.step())
    plans.append(await harness.request_fork(pods[2]))
    seen.append(await harness.step())
    seen += [await harness.step(), await harness.step()]
    assert [[], [(3, 0)], [(3, 2)], [(3, 3)], [], []] == seen
    assert all(plan.routes for plan in plans)
    for pod in pods:
        await harness.finish_fork(pod, seed)
    await harness.report_instance(instance(seed.uid).report)
    await harness.step()
    event_log = [f"{event.about} {event.reason}: {event.message}" for event in harness.cluster.events]
    assert [
        "Deployment/serve-1 ScaleUp: 3 replicas are expected: they fork from 1 seed",
        *(
            f"Pod/{pod.name} Forked: forked 15.2 GB from {seed.name} in 3.1 s, 1 source, version weights:11111111"
            for pod in pods
        ),
    ] == event_log
    opened = {write.pod for write in harness.cluster.writes if write.value.startswith("True ")}
    assert {pod.name for pod in (seed, *pods)} == opened


async def test_the_instance_of_a_killed_pod_is_removed(harness: RealPlannerHarness) -> None:
    """Its instance and its fork are removed from the planner's lists immediately."""
    deployment = harness.cluster.deploy(1, 2)
    seed, pod = harness.cluster.create(deployment, 2)
    await harness.report_instance(instance(seed.uid).report)
    await harness.request_fork(pod)
    await harness.step()
    harness.cluster.delete(pod)
    await harness.step(0.1)
    left = [view.report.instance_id for view in await harness.planner_api.instances()]
    assert [instance_id(seed.uid)] == left
    assert ["failed"] == [fork.state for fork in await harness.planner_api.forks()]
    assert [(1, 0)] == await harness.step(0.1)


async def _exit_reason(harness: RealPlannerHarness, pod: ObservedPod) -> str | None:
    """Return why the Pod's instance may not exit yet. None: it may."""
    response = (await harness.web.get(f"/v1/instances/{instance_id(pod.uid)}/exit")).raise_for_status().json()
    return None if response["can_exit"] else response["reason"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("v2", None),
        ("v1", "it is the last seed of version v1 of these weights, and 1 replica is expected"),
    ],
    ids=["new weights", "the same weights"],
)
async def test_the_last_seed_waits_only_for_replicas_of_its_version(
    harness: RealPlannerHarness, template: str, expected: str | None
) -> None:
    """A rollout to a new version does not delay the last Pod of the old one."""
    deployment = harness.cluster.deploy(1, 1, template_annotations={names.VERSION: "v1"})
    annotations = {names.INJECTED: "1", names.VERSION: "v1"}
    (old,) = harness.cluster.create(deployment, annotations=annotations)
    await harness.report_instance(instance(old.uid).report.model_copy(update={"version": "v1"}))
    harness.cluster.ready(old)
    await harness.step()
    changed = harness.cluster.deploy(1, 1, template_annotations={names.VERSION: template})
    harness.cluster.create(changed, template="77777", annotations={names.INJECTED: "1", names.VERSION: template})
    await harness.step()
    assert expected == await _exit_reason(harness, old)


async def test_replicas_of_different_versions_are_counted_separately(harness: RealPlannerHarness) -> None:
    """A Deployment is scaled up during its rollout: each version is a separate scale-up."""
    deployment = harness.cluster.deploy(1, 4, template_annotations={names.VERSION: "v2"})
    for version, hashed in (("v1", "11111"), ("v2", "22222")):
        annotations = {names.INJECTED: "1", names.VERSION: version}
        harness.cluster.create(deployment, 2, template=hashed, annotations=annotations)
    await harness.step()
    found = {view.scaleup.version: view.scaleup.replicas for view in await harness.planner_api.scaleups()}
    assert {"v1": 2, "v2": 2} == found
