"""Scale-ups as the controller sees them go: announced, counted down, withdrawn."""

from __future__ import annotations

from tests.unit.hooks.kubernetes.controller.serving import SERVE, serving
from tests.unit.hooks.kubernetes.controller.stage import Stage


async def test_a_scale_up_is_announced_before_its_pods_exist(stage: Stage) -> None:
    """As soon as spec.replicas rises from 1 to 4, three are announced; people are told on the workload."""
    deployment, _ = await serving(stage)
    stage.cluster.scale(deployment, 4)
    await stage.news()
    assert [f"announce {SERVE} 3"] == stage.calls()
    assert ["Deployment/serve-1 ScaleUp: 3 replicas are expected: they fork from 2 seeds"] == stage.events()
    assert stage.fleet.scaleup_views[SERVE].scaleup.by == "deployment/default/serve-1"
    assert stage.fleet.scaleup_views[SERVE].scaleup.expires_in_s == stage.settings.scaleup_s


async def test_what_could_not_be_told_is_told_later(stage: Stage) -> None:
    """The API server takes no Event for a while: once it does, people are told, once."""
    deployment, _ = await serving(stage)
    stage.cluster.away = True
    stage.cluster.scale(deployment, 4)
    await stage.step(times=3)
    stage.cluster.away = False
    await stage.step(times=20)
    assert [f"announce {SERVE} 3"] == stage.calls()
    assert ["Deployment/serve-1 ScaleUp: 3 replicas are expected: they fork from 2 seeds"] == stage.events()


async def test_what_is_gone_is_not_told_of_for_ever(stage: Stage) -> None:
    """A workload that went before it could be told: its namespace may be gone, which takes no Event again."""
    deployment, _ = await serving(stage)
    stage.cluster.away = True
    stage.cluster.scale(deployment, 4)
    await stage.step()
    stage.cluster.remove_workload(deployment)
    await stage.step()
    failed = stage.metric("failed_actions_total", action="event")
    await stage.step(times=200)
    assert failed == stage.metric("failed_actions_total", action="event")


async def test_pods_that_are_made_change_nothing_that_was_announced(stage: Stage) -> None:
    """The Pods of an announced scale-up are those that were announced."""
    deployment, _ = await serving(stage)
    stage.cluster.scale(deployment, 4)
    await stage.news()
    stage.calls()
    stage.cluster.create(deployment, 2)
    await stage.step()
    stage.cluster.create(deployment)
    await stage.step()
    assert [] == stage.calls()


async def test_arrivals_are_counted_down(stage: Stage) -> None:
    """The planner does it by itself: it is told only that nobody is waited for any more."""
    deployment, _ = await serving(stage)
    stage.cluster.scale(deployment, 4)
    await stage.news()
    pods = stage.cluster.create(deployment, 3)
    stage.calls(), stage.events()
    told: list[list[str]] = []
    for pod in pods:
        stage.fleet.asks(pod)
        await stage.step(times=2)
        told.append(stage.calls())
    assert [[], [], [f"withdraw {SERVE}"]] == told
    assert [] == [event for event in stage.events() if "ScaleUp" in event]


async def test_a_fork_is_followed_to_its_end(stage: Stage) -> None:
    """The gate says how far it is, and opens; the Event names a source; then the Pod is worth keeping."""
    deployment, seeds = await serving(stage, 2)
    stage.cluster.scale(deployment, 3)
    (pod,) = stage.cluster.create(deployment)
    await stage.step()
    stage.fleet.asks(pod, *seeds)
    await stage.step(6)
    stage.fleet.receives(pod, 43, *seeds)
    await stage.step(6)
    stage.fleet.forked(pod, *seeds)
    await stage.step(0.4)
    assert [
        f"{pod.name} False Waiting: no rank has asked for its weights yet",
        f"{pod.name} False Receiving: receiving: 0 % of 15.2 GB",
        f"{pod.name} False Receiving: receiving: 43 % of 15.2 GB",
        f"{pod.name} True Forked: 1 rank is whole: 15.2 GB",
    ] == stage.conditions()
    first = min(seeds, key=lambda seed: seed.name)
    assert f"Pod/{pod.name} Forked: forked 15.2 GB from {first.name} in 12.0 s, 2 sources" in stage.events()
    await stage.step(10, times=3)
    read, idle = [f"{seed.name} 87002" for seed in seeds], [f"{seed.name} 87001" for seed in seeds]
    assert [*read, f"{pod.name} 87001", *idle] == stage.costs()
    assert [] == stage.events()


async def test_a_new_start_of_the_controller_goes_on(stage: Stage) -> None:
    """In the middle of a scale-up it announces and tells nothing a second time, and counts on."""
    deployment, seeds = await serving(stage, 2)
    stage.cluster.scale(deployment, 5)
    await stage.news()
    pods = stage.cluster.create(deployment, 3)
    for pod in pods[:2]:
        stage.fleet.asks(pod, *seeds)
    await stage.step(12)
    stage.fleet.forked(pods[0], *seeds)
    await stage.step()
    stage.calls(), stage.events(), stage.costs()
    stage.controller = stage.another()
    await stage.step(times=2)
    assert ([], [], []) == (stage.calls(), stage.events(), stage.costs())
    stage.fleet.asks(pods[2], *seeds)
    stage.fleet.forked(pods[1], *seeds)
    await stage.step(times=2)
    assert [f"withdraw {SERVE}"] == stage.calls()
    assert [f"Pod/{pods[1].name} Forked"] == [event.partition(":")[0] for event in stage.events()]


async def test_the_lead_is_handed_over(stage: Stage) -> None:
    """Who leads no more does nothing; who leads now does it once."""
    deployment, _ = await serving(stage)
    before = stage.controller
    stage.controller = stage.another()
    stage.cluster.scale(deployment, 2)
    await before.look()
    await before.reconcile(lambda: False)
    assert [] == stage.calls()
    await stage.step()
    assert [f"announce {SERVE} 1"] == stage.calls()


async def test_a_scale_up_that_falls_is_withdrawn(stage: Stage) -> None:
    """Scaled up, and down again before any Pod came."""
    deployment, _ = await serving(stage)
    stage.cluster.scale(deployment, 4)
    await stage.news()
    stage.cluster.scale(deployment, 1)
    await stage.news()
    await stage.step()
    assert [f"announce {SERVE} 3", f"withdraw {SERVE}"] == stage.calls()


async def test_what_a_workload_that_is_gone_announced_is_withdrawn(stage: Stage) -> None:
    """Also by a controller that started anew in between."""
    deployment, _ = await serving(stage)
    stage.cluster.scale(deployment, 4)
    await stage.news()
    stage.calls()
    stage.controller = stage.another()
    stage.cluster.remove_workload(deployment)
    await stage.step(times=2)
    assert f"withdraw {SERVE}" in stage.calls()


async def test_replicas_that_never_come_are_not_waited_for_any_more(stage: Stage) -> None:
    """After `scaleup_s` nothing is announced, though they are still wanted, until more are."""
    deployment, _ = await serving(stage)
    stage.cluster.scale(deployment, 3)
    await stage.news()
    stage.calls()
    await stage.step(stage.settings.scaleup_s - 1)
    assert [] == stage.calls()
    await stage.step(times=2)
    assert [f"withdraw {SERVE}"] == stage.calls()
    stage.cluster.scale(deployment, 4)
    await stage.news()
    assert [f"announce {SERVE} 3"] == stage.calls()


async def test_a_planner_that_lost_its_memory_is_told_again(stage: Stage) -> None:
    """A scale-up that it does not know is announced once more, for the time that is left; people are not."""
    deployment, pods = await serving(stage)
    stage.cluster.scale(deployment, 4)
    await stage.news()
    stage.calls(), stage.events()
    stage.fleet.restart()
    stage.fleet.serves(pods[0])
    await stage.step(100)
    assert [f"announce {SERVE} 3"] == stage.calls()
    assert stage.settings.scaleup_s - 100 == stage.fleet.scaleup_views[SERVE].scaleup.expires_in_s
    assert [] == stage.events()


async def test_a_planner_that_was_started_anew_is_no_scale_up(stage: Stage) -> None:
    """It knows nobody for a moment: nothing is announced, written or told because of that."""
    deployment, seeds = await serving(stage, 2)
    stage.cluster.scale(deployment, 3)
    (pod,) = stage.cluster.create(deployment)
    await stage.step()
    stage.fleet.asks(pod, *seeds)
    await stage.step(10, times=2)
    stage.calls(), stage.events(), stage.conditions(), stage.costs()
    stage.fleet.restart()
    await stage.step()
    assert ([], [], []) == (stage.calls(), stage.events(), stage.costs())
    for seed in seeds:
        stage.fleet.serves(seed)
    stage.fleet.asks(pod, *seeds)
    await stage.step(times=10)
    assert ([], [], []) == (stage.calls(), stage.events(), stage.costs())


async def test_a_fall_is_told_after_two_looks(stage: Stage) -> None:
    """One that is over by the next look was none: the planner's lists were fetched at different moments."""
    deployment, _ = await serving(stage)
    stage.cluster.scale(deployment, 4)
    await stage.news()
    stage.cluster.scale(deployment, 3)
    await stage.news()
    stage.cluster.scale(deployment, 4)
    await stage.step()
    assert [f"announce {SERVE} 3"] == stage.calls()
    stage.cluster.scale(deployment, 3)
    await stage.news()
    await stage.news()
    assert [] == stage.calls()
    await stage.step()
    assert [f"announce {SERVE} 2"] == stage.calls()
    assert 1 == len(stage.events())


async def test_pods_that_no_node_takes_are_not_waited_for(stage: Stage) -> None:
    """Those that have a node come without them; once they get one too, they are announced."""
    deployment, _ = await serving(stage)
    stage.cluster.scale(deployment, 4)
    await stage.news()
    pods = stage.cluster.create(deployment, 3)
    for pod in pods[1:]:
        stage.cluster.change(pod, conditions={"PodScheduled": False})
    await stage.step(times=2)
    assert [f"announce {SERVE} 3", f"announce {SERVE} 1"] == stage.calls()
    stage.fleet.asks(pods[0])
    await stage.step(stage.settings.scaleup_s, times=2)
    assert [f"withdraw {SERVE}"] == stage.calls()
    for pod in pods[1:]:
        stage.cluster.change(
            pod, node="node-2", conditions={"PodScheduled": True}, scheduled_at=stage.clock.now
        )
    await stage.step(times=2)
    assert [f"announce {SERVE} 2"] == stage.calls()
    assert 1 == sum("ScaleUp" in event for event in stage.events())
