"""Previews: whom the policy would have read from whom, and when each would be whole."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.sim_run import Run, Scenario
from planner import policy
from planner.fleet import Demand, Group, Place, Share, Source
from planner.previews import known, preview, snapshot
from planner.previews.predicting import MOST_DELIVERIES, WITHIN_HOST, Rates, predict
from planner.registry import Registry
from rfork.wire import ForkFinish, Preview, PreviewRequest
from tests.unit.planner.builders import (
    CHECKPOINT,
    CHUNKS,
    LOADER,
    NOW,
    FakeTime,
    ask,
    loading,
    make_registry,
    offers,
    report,
    seed,
    whole,
)

IMAGE = CHUNKS << 20
LINK = IMAGE
"""Bytes a second: one image takes a second, one chunk a twelfth."""
RATES = Rates(link=LINK, storage=IMAGE / 2)
ALL = ((0, CHUNKS),)
CHUNK_S = 1 / CHUNKS


@pytest.fixture
def registry(time: FakeTime) -> Registry:
    """A registry that nobody told anything."""
    return make_registry(time)


def would(registry: Registry, **asked: object) -> Preview:
    """What would happen to the one rank of the model `m`, over links that move one image a second."""
    request = PreviewRequest.model_validate({"model": "m", "link_bytes_per_s": LINK} | asked)
    (group,) = registry.state.groups_of("m")
    taken = snapshot(registry.state, group, request, registry.now())
    assert taken is not None
    return preview(known(taken))


def shares(made: Preview) -> dict[str, dict[str, tuple[tuple[int, int], ...]]]:
    """Chunks by source, by target."""
    return {
        target.instance_id: {share.source_id: share.chunks for share in target.shares}
        for target in made.targets
    }


def seconds(made: Preview) -> list[float | None]:
    """When each target is whole."""
    return [None if each.seconds is None else round(each.seconds, 3) for each in made.targets]


# -- times -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "seeds", "hosts"), [(1, 1, 0), (7, 1, 0), (15, 1, 0), (31, 1, 0), (100, 4, 0), (32, 1, 4)]
)
def test_predicted_as_simulated(targets: int, seeds: int, hosts: int) -> None:
    """Within a fifth of what the simulation of links, reports and new plans takes."""
    simulated = Run(Scenario(targets=targets, seeds=seeds, chunks=64, hosts=hosts)).run().total
    near = ("shared_memory", "http") if hosts else ("http",)
    alike = {"chunk_count": 64, "max_readers": 4, "transports": near, "expires_at": math.inf}
    members = {f"s{index}": seed(f"s{index}", verified=((0, 64),), **alike) for index in range(seeds)}
    coming = [
        loading(f"t{index:03}", place=Place(f"h{index % hosts if hosts else index}"), **alike)
        for index in range(targets)
    ]
    demands = [Demand(each.instance_id, each) for each in coming]
    decisions = policy.plan(Group("m", "r", members), demands, NOW)
    reads = {name: decision.shares for name, decision in decisions.items()}
    # Of a size at which what stays within a host is as much faster as it is in the simulation.
    image = WITHIN_HOST / 8
    took = predict(
        members | {each.instance_id: each for each in coming}, reads, round(image), Rates(image, image)
    )
    assert simulated == pytest.approx(max(took.values()), rel=0.2)


def members(*sources: Source) -> dict[str, Source]:
    """By instance_id."""
    return {source.instance_id: source for source in sources}


def test_a_chain_costs_a_chunk_for_each_that_stands_in_it() -> None:
    """A relay gives what it has while it receives."""
    fleet = members(seed("s"), loading("a"), loading("b"))
    took = predict(fleet, {"a": (Share("s", ALL),), "b": (Share("a", ALL),)}, IMAGE, RATES)
    assert {"a": pytest.approx(1.0), "b": pytest.approx(1.0 + CHUNK_S)} == took


def test_those_that_share_a_link_share_its_speed() -> None:
    """Two that read everything from one seed take twice as long; half from each of two seeds does not."""
    fleet = members(seed("s"), seed("r"), loading("a"), loading("b"))
    star = predict(fleet, {"a": (Share("s", ALL),), "b": (Share("s", ALL),)}, IMAGE, RATES)
    low, high = ((0, 6),), ((6, 12),)
    striped = predict(fleet, {"a": (Share("s", low), Share("r", high))}, IMAGE, RATES)
    assert [2.0, 2.0, 1.0] == [pytest.approx(each) for each in (*star.values(), *striped.values())]


def test_a_source_gives_no_more_than_it_says() -> None:
    """Its own cap counts for all of its readers together, and for those of its host too."""
    slow = seed("s", egress_rate=LINK / 4, transports=("shared_memory", "http"), place=Place("here"))
    near = loading("a", transports=("shared_memory", "http"), place=Place("here"))
    took = predict(members(slow, near), {"a": (Share("s", ALL),)}, IMAGE, RATES)
    assert {"a": pytest.approx(4.0)} == took


def test_what_stays_within_a_host_takes_nothing_of_its_link() -> None:
    """Three on one host: one reads over the network, the others from it."""
    fleet = members(seed("s"), *(loading(name, place=Place("here")) for name in "abc"))
    reads = {"a": (Share("s", ALL),), "b": (Share("a", ALL),), "c": (Share("b", ALL),)}
    local_s = IMAGE / CHUNKS / WITHIN_HOST
    took = predict(fleet, reads, IMAGE, RATES)
    assert [1.0, 1.0 + local_s, 1.0 + 2 * local_s] == [pytest.approx(took[name]) for name in "abc"]


def test_a_ring_over_storage() -> None:
    """Each reads its half from storage at half a link's speed, and gets the other as it comes."""
    fleet = members(loading("a"), loading("b"))
    low, high = ((0, 6),), ((6, 12),)
    reads = {"a": (Share("a", low), Share("b", high)), "b": (Share("b", high), Share("a", low))}
    took = predict(fleet, reads, IMAGE, RATES)
    assert [1.0 + CHUNK_S] * 2 == [pytest.approx(took[name]) for name in "ab"]


def test_a_loader_gives_nothing_before_its_end() -> None:
    """Who stands behind it begins then."""
    fleet = members(loading("a"), loading("b"))
    reads = {"a": (Share("a", ALL, whole=True),), "b": (Share("a", ALL),)}
    took = predict(fleet, reads, IMAGE, RATES)
    assert [2.0, 3.0] == [pytest.approx(took[name]) for name in "ab"]


def test_who_waits_for_what_nobody_gives_is_never_whole() -> None:
    """A relay that reads nothing, a source that is gone, and two that wait for one another."""
    fleet = members(seed("s"), *(loading(name) for name in "abcd"), loading("half", (0, 6)))
    reads = {
        "a": (Share("half", ALL),),
        "b": (Share("gone", ALL),),
        "c": (Share("d", ALL),),
        "d": (Share("c", ALL),),
    }
    assert {} == predict(fleet, reads, IMAGE, RATES)


def test_forks_under_way_go_on_from_what_they_have() -> None:
    """Half is there: the rest comes in half of the time, and the next gets all of it."""
    fleet = members(seed("s"), loading("a", (0, 6)), loading("b"))
    took = predict(fleet, {"a": (Share("s", ALL),), "b": (Share("a", ALL),)}, IMAGE, RATES)
    assert {"a": pytest.approx(0.5), "b": pytest.approx(1.0 + CHUNK_S, abs=CHUNK_S)} == took


def test_large_images_are_told_in_blocks() -> None:
    """Of many chunks, several make one, and the time is still that of the chunks."""
    count = 2 * MOST_DELIVERIES
    big = {"chunk_count": count}
    fleet = members(seed("s", verified=((0, count),), **big), *(loading(name, **big) for name in "ab"))
    reads = {"a": (Share("s", ((0, count),)),), "b": (Share("a", ((0, count),)),)}
    took = predict(fleet, reads, IMAGE, RATES)
    assert {"a": pytest.approx(1.0), "b": pytest.approx(1.0, rel=1e-3)} == took


# -- plans -------------------------------------------------------------------------------------------


async def test_those_that_come_stand_in_a_chain(registry: Registry) -> None:
    """Each on a host of its own, as the policy has it; and nothing comes of it."""
    await registry.report(whole("s"))
    made = would(registry, targets=3)
    expected = {"preview-1": {"s": ALL}, "preview-2": {"preview-1": ALL}, "preview-3": {"preview-2": ALL}}
    assert (expected, [1.0, 1.083, 1.167], 1.0, 1, 0, [{"s": "http"}]) == (
        shares(made), seconds(made), made.bound_s, made.seeds, made.storage_bytes,
        [made.targets[0].transports],
    )  # fmt: skip
    assert ([], ["s"]) == (
        registry.state.forks(), [each.report.instance_id for each in registry.state.instances()],
    )  # fmt: skip


async def test_replicas_that_share_a_host_are_placed_so(registry: Registry) -> None:
    """Two hosts of two, none of which is known, in the rack that was named."""
    await registry.report(whole("s", max_readers=4, transports=("shared_memory", "http")))
    made = would(registry, targets=4, per_host=2, rack="r1")
    assert ["preview-host-1", "preview-host-1", "preview-host-2", "preview-host-2"] == [
        target.host for target in made.targets
    ]
    assert {"preview-1": "shared_memory"} == made.targets[1].transports


async def test_a_busy_seed_is_not_read_from(registry: Registry) -> None:
    """It has one slot: who comes stands behind the fork that has it, and goes on with that."""
    await registry.report(whole("s"))
    await registry.ask(ask("a"))
    made = would(registry, targets=1)
    assert ({"preview-1": {"a": ALL}}, [1.083]) == (shares(made), seconds(made))


async def test_those_without_a_slot_come_after_the_others(registry: Registry) -> None:
    """The seed takes one reader, and those that come none: each waits until the one before it is whole."""
    await registry.report(whole("s"))
    (group,) = registry.state.groups_of("m")
    request = PreviewRequest(model="m", targets=3, link_bytes_per_s=LINK)
    taken = snapshot(registry.state, group, request, registry.now())
    assert taken is not None
    found = known(taken)
    alone = [replace(each, target=replace(each.target, max_readers=0)) for each in found.demands]
    made = preview(replace(found, demands=tuple(alone)))
    assert [1.0, 2.0, 3.0] == sorted(each or math.inf for each in seconds(made))


async def test_a_cold_group_reads_what_was_read_before(registry: Registry) -> None:
    """A fork that ended had read a checkpoint: so could those that come, and one of them does for all."""
    await registry.report(whole("s"))
    made = would(registry, targets=2, cold=True)
    assert ([None, None], 0, "no instance holds version v1 of model m") == (
        seconds(made), made.seeds, made.targets[0].reason,
    )  # fmt: skip
    await registry.report(report("a", storage=offers(CHECKPOINT)))
    made = would(registry, targets=2, cold=True, storage_bytes_per_s=IMAGE / 2)
    assert ({"preview-1": {"preview-1": ALL}, "preview-2": {"preview-1": ALL}}, IMAGE) == (
        shares(made), made.storage_bytes,
    )  # fmt: skip
    assert [2.0, 2.083] == seconds(made)


@pytest.mark.parametrize(("kind", "second"), [("checkpoint", 2.083), ("loader", 3.0)])
async def test_storage_is_known_from_forks_that_ended(registry: Registry, kind: str, second: float) -> None:
    """By what they told of their sources; how fast it was too."""
    await registry.ask(ask("a", storage=offers(CHECKPOINT if kind == "checkpoint" else LOADER)))
    finish = ForkFinish(outcome="forked", seconds=2.0, bytes_read=IMAGE, sources={f"{kind}:x": IMAGE})
    await registry.finish("fork-a", finish)
    await registry.report(whole("a"))
    made = would(registry, targets=2, cold=True)
    assert ([2.0, second], IMAGE / 2) == (seconds(made), made.storage_bytes_per_s)


async def test_with_a_rate_of_storage_there_is_a_snapshot(registry: Registry) -> None:
    """Where nothing is known of any."""
    await registry.report(whole("s", chunk_count=20, verified=((0, 20),), max_readers=4))
    made = would(registry, targets=2, cold=True, storage_bytes_per_s=LINK)
    low, high = ((0, 10),), ((10, 20),)
    assert {
        "preview-1": {"preview-1": low, "preview-2": high},
        "preview-2": {"preview-2": high, "preview-1": low},
    } == shares(made)


async def test_the_link_is_the_fastest_that_forks_measured(registry: Registry) -> None:
    """Not what they read within their host, and not what they read from storage."""
    await registry.report(whole("s", max_readers=9))
    guess = would(registry, link_bytes_per_s=None)
    for name, source, transport, rate in (
        ("a", "s", "http", 3e8),
        ("b", "s", "shared_memory", 9e9),
        ("c", "snapshot:file:///s", "http", 8e9),
    ):
        await registry.ask(ask(name))
        finish = ForkFinish(
            outcome="forked", seconds=1.0, bytes_read=IMAGE, sources={source: IMAGE},
            link_bytes_per_s=rate, transports={source: transport},
        )  # fmt: skip
        await registry.finish(f"fork-{name}", finish)
    measured = would(registry, link_bytes_per_s=None)
    told = would(registry, link_bytes_per_s=1e6)
    assert [(1.25e9, False), (3e8, True), (1e6, False)] == [
        (made.link_bytes_per_s, made.measured) for made in (guess, measured, told)
    ]


async def test_most_replicas_are_like_the_layout_that_is_held(registry: Registry) -> None:
    """Of two layouts the one with more seeds, whatever is loading."""
    await registry.report(whole("s"))
    for name in "ab":
        await registry.report(report(name, layout_id="b" * 32))
    assert {"preview-1": {"s": ALL}} == shares(would(registry))


async def test_a_snapshot_stays_as_it_was(registry: Registry) -> None:
    """Whatever is told meanwhile, the preview is of the moment that was asked about."""
    for name in ("s", "u"):
        await registry.report(whole(name))
    await registry.ask(ask("a"))
    (group,) = registry.state.groups_of("m")
    request = PreviewRequest(model="m", targets=2, link_bytes_per_s=LINK)
    taken = snapshot(registry.state, group, request, registry.now())
    assert taken is not None
    before = preview(known(taken))
    await registry.ask(ask("b"))
    await registry.report(whole("v"))
    for name in ("s", "u", "a"):
        await registry.remove(name)
    assert before == preview(known(taken))
