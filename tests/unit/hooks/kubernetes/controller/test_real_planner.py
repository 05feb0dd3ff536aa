"""The controller beside the planner itself, in one process and without sockets: they mean the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest
from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from planner.app import create_app
from planner.hooks.kubernetes import names
from planner.hooks.kubernetes.cluster import PodSeen
from planner.hooks.kubernetes.controller.controller import Controller
from planner.hooks.kubernetes.controller.metrics import Metrics
from planner.hooks.rest import RestFleet
from planner.leases import Clock as PlannerClock
from rfork.settings import HookSettings, PlannerSettings, Settings
from rfork.wire import ForkFinish, ForkRequest, InstanceReport, Plan
from tests.unit.clock import Clock
from tests.unit.hooks.kubernetes.fake_cluster import FakeCluster, uid
from tests.unit.hooks.kubernetes.fake_fleet import IMAGE_BYTES, instance, instance_id

SERVE = uid(1)


@dataclass
class Whole:
    """A cluster in memory, a controller, and a planner behind its REST interface."""

    clock: Clock
    cluster: FakeCluster
    fleet: RestFleet
    web: httpx.AsyncClient
    controller: Controller

    async def step(self, seconds: float = 2.0) -> list[tuple[int, int]]:
        """Time passes; scale-ups as the planner then lists them: replicas, and how many came since."""
        self.clock.now += seconds
        await self.controller.look()
        await self.controller.reconcile()
        return [(view.scaleup.replicas, view.arrived) for view in await self.fleet.scaleups()]

    async def send(self, method: str, path: str, body: BaseModel) -> httpx.Response:
        answer = await self.web.request(method, path, json=body.model_dump(mode="json"))
        return answer.raise_for_status()

    async def reports(self, report: InstanceReport) -> None:
        """A heartbeat."""
        await self.send("PUT", f"/v1/instances/{report.instance_id}", report)

    async def asks(self, pod: PodSeen) -> Plan:
        """The Pod's rank asks for its fork."""
        report = instance(pod.uid, "loading", chunks=0, weights_id=None).report
        asked = ForkRequest(fork_id=f"fork-{pod.uid}", instance=report)
        return Plan.model_validate_json((await self.send("POST", "/v1/forks", asked)).content)

    async def forked(self, pod: PodSeen, source: PodSeen) -> None:
        """Its fork ends, and it serves."""
        finish = ForkFinish(
            outcome="forked",
            seconds=3.1,
            bytes_read=IMAGE_BYTES,
            sources={instance_id(source.uid): IMAGE_BYTES},
        )
        await self.send("POST", f"/v1/forks/fork-{pod.uid}/finish", finish)
        await self.reports(instance(pod.uid).report)


@pytest.fixture
async def whole() -> AsyncIterator[Whole]:
    """A planner that waits for nobody, and looks at the time that the test sets."""
    clock = Clock(1000.0)
    planner_clock = PlannerClock(monotonic=clock, unix=clock)
    app = create_app(PlannerSettings(secret="s" * 32, batch_s=0, gather_s=0), planner_clock)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app)
    fleet = RestFleet(Settings(planner="http://planner"), transport=transport)
    cluster = FakeCluster(clock)
    settings = HookSettings(namespace="rfork", identity="one")
    controller = Controller(settings, cluster, fleet, Metrics(CollectorRegistry()), clock)
    pods, workloads = controller.world.pods, controller.world.workloads
    cluster.watch(lambda news: pods.hear(news, clock.now), lambda news: workloads.hear(news, clock.now))
    controller.begin()
    async with httpx.AsyncClient(transport=transport, base_url="http://planner") as web:
        yield Whole(clock, cluster, fleet, web, controller)
    await fleet.close()


async def test_scaled_from_one_to_four(whole: Whole) -> None:
    """Three are announced, planned and counted down, and a Pod's fork is told with its source's name."""
    deployment = whole.cluster.deploy(1, 1)
    (seed,) = whole.cluster.create(deployment)
    await whole.reports(instance(seed.uid).report)
    whole.cluster.ready(seed)
    seen = [await whole.step()]
    whole.cluster.scale(deployment, 4)
    seen.append(await whole.step())
    pods = whole.cluster.create(deployment, 3)
    plans = [await whole.asks(pod) for pod in pods[:2]]
    seen.append(await whole.step())
    plans.append(await whole.asks(pods[2]))
    seen.append(await whole.step())
    seen += [await whole.step(), await whole.step()]
    assert [[], [(3, 0)], [(3, 2)], [(3, 3)], [], []] == seen
    assert all(plan.routes for plan in plans)
    for pod in pods:
        await whole.forked(pod, seed)
    await whole.reports(instance(seed.uid).report)
    await whole.step()
    told = [f"{event.about} {event.reason}: {event.message}" for event in whole.cluster.events]
    assert [
        "Deployment/serve-1 ScaleUp: 3 replicas are expected: they fork from 1 seed",
        *(
            f"Pod/{pod.name} Forked: forked 15.2 GB from {seed.name} in 3.1 s, 1 source, "
            "version weights:11111111"
            for pod in pods
        ),
    ] == told
    opened = {write.pod for write in whole.cluster.writes if write.value.startswith("True ")}
    assert {pod.name for pod in (seed, *pods)} == opened


async def test_a_killed_pod(whole: Whole) -> None:
    """Its instance and its fork are gone from the planner's lists at once."""
    deployment = whole.cluster.deploy(1, 2)
    seed, pod = whole.cluster.create(deployment, 2)
    await whole.reports(instance(seed.uid).report)
    await whole.asks(pod)
    await whole.step()
    whole.cluster.delete(pod)
    await whole.step(0.1)
    left = [view.report.instance_id for view in await whole.fleet.instances()]
    assert [instance_id(seed.uid)] == left
    assert ["failed"] == [fork.state for fork in await whole.fleet.forks()]
    assert [(1, 0)] == await whole.step(0.1)


async def _exit_reason(whole: Whole, pod: PodSeen) -> str | None:
    """Return why the Pod's instance may not end yet; None: it may."""
    answer = (await whole.web.get(f"/v1/instances/{instance_id(pod.uid)}/exit")).raise_for_status().json()
    return None if answer["may_exit"] else answer["reason"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("v2", None),
        ("v1", "it is the last that holds version v1 of these weights, and 1 replica is expected"),
    ],
    ids=["new weights", "the same weights"],
)
async def test_the_last_seed_waits_for_replicas_of_its_version_only(
    whole: Whole, template: str, expected: str | None
) -> None:
    """A rollout to a new version does not hold back the last Pod of the old one."""
    deployment = whole.cluster.deploy(1, 1, template_annotations={names.VERSION: "v1"})
    annotations = {names.INJECTED: "1", names.VERSION: "v1"}
    (old,) = whole.cluster.create(deployment, annotations=annotations)
    await whole.reports(instance(old.uid).report.model_copy(update={"version": "v1"}))
    whole.cluster.ready(old)
    await whole.step()
    changed = whole.cluster.deploy(1, 1, template_annotations={names.VERSION: template})
    whole.cluster.create(
        changed, template="77777", annotations={names.INJECTED: "1", names.VERSION: template}
    )
    await whole.step()
    assert expected == await _exit_reason(whole, old)


async def test_old_replicas_that_come_are_not_counted_as_new_ones(whole: Whole) -> None:
    """A Deployment is scaled up in the middle of its rollout: each version is a scale-up of its own."""
    deployment = whole.cluster.deploy(1, 4, template_annotations={names.VERSION: "v2"})
    for version, hashed in (("v1", "11111"), ("v2", "22222")):
        annotations = {names.INJECTED: "1", names.VERSION: version}
        whole.cluster.create(deployment, 2, template=hashed, annotations=annotations)
    await whole.step()
    found = {view.scaleup.version: view.scaleup.replicas for view in await whole.fleet.scaleups()}
    assert {"v1": 2, "v2": 2} == found
