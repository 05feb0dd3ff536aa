"""Previews: predicted reads and completion times of hypothetical replicas."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.simulate.runner import SimRun, SimScenario
from planner.dry_run import build_scenario, preview, snapshot_group
from planner.dry_run.flow_simulation import MAX_DELIVERIES, SAME_HOST_RATE, LinkRates, simulate_flows
from planner.plan_service import PlanService
from planner.policy import group_plan
from planner.policy.types import ChunkShare, ForkDemand, GroupView, HostLocation, Source
from rfork.schema import ForkResult, Preview, PreviewRequest
from tests.unit.planner.builders import (
    CHECKPOINT,
    CHUNKS,
    LOADER,
    NOW,
    FakeTime,
    fork_request,
    loading,
    make_service,
    report,
    seed,
    seed_report,
    storage_candidates,
)

IMAGE = CHUNKS << 20
LINK = IMAGE
"""Bytes per second: one image takes a second, one chunk a twelfth."""
RATES = LinkRates(link=LINK, storage=IMAGE / 2)
ALL = ((0, CHUNKS),)
CHUNK_S = 1 / CHUNKS


@pytest.fixture
def service(time: FakeTime) -> PlanService:
    """An empty service."""
    return make_service(time)


def dry_run(service: PlanService, **options: object) -> Preview:
    """Return a preview of the only rank of model `m`, over links that move one image a second."""
    request = PreviewRequest.model_validate({"model": "m", "link_bytes_per_s": LINK} | options)
    (group,) = service.state.groups_of("m")
    snapshot = snapshot_group(service.state, group, request, service.now())
    assert snapshot is not None
    return preview(build_scenario(snapshot))


def shares(result: Preview) -> dict[str, dict[str, tuple[tuple[int, int], ...]]]:
    """Return the chunks by source, by target."""
    return {target.instance_id: {share.source_id: share.chunks for share in target.shares} for target in result.targets}


def seconds(result: Preview) -> list[float | None]:
    """Return the completion time of each target."""
    return [None if each.seconds is None else round(each.seconds, 3) for each in result.targets]


# -- times -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "seeds", "hosts"), [(1, 1, 0), (7, 1, 0), (15, 1, 0), (31, 1, 0), (100, 4, 0), (32, 1, 4)]
)
def test_predictions_match_the_fleet_simulation(targets: int, seeds: int, hosts: int) -> None:
    """They differ by at most a fifth from a simulation with links, reports and replans."""
    simulated = SimRun(SimScenario(targets=targets, seeds=seeds, chunks=64, hosts=hosts)).run().total
    near = ("shared_memory", "http") if hosts else ("http",)
    common = {"chunk_count": 64, "max_readers": 4, "transports": near, "expires_at": math.inf}
    members = {f"s{index}": seed(f"s{index}", verified=((0, 64),), **common) for index in range(seeds)}
    new_targets = [
        loading(f"t{index:03}", location=HostLocation(f"h{index % hosts if hosts else index}"), **common)
        for index in range(targets)
    ]
    demands = [ForkDemand(each.instance_id, each) for each in new_targets]
    decisions = group_plan.plan(GroupView("m", "r", members), demands, NOW)
    reads = {name: decision.shares for name, decision in decisions.items()}
    # The image is large enough for the simulation's ratio of same-host to network speed to apply.
    image = SAME_HOST_RATE / 8
    durations = simulate_flows(
        members | {each.instance_id: each for each in new_targets}, reads, round(image), LinkRates(image, image)
    )
    assert simulated == pytest.approx(max(durations.values()), rel=0.2)


def members(*sources: Source) -> dict[str, Source]:
    """Return sources by instance_id."""
    return {source.instance_id: source for source in sources}


def test_a_chain_costs_one_chunk_per_member() -> None:
    """A relay serves while it receives."""
    fleet = members(seed("s"), loading("a"), loading("b"))
    durations = simulate_flows(fleet, {"a": (ChunkShare("s", ALL),), "b": (ChunkShare("a", ALL),)}, IMAGE, RATES)
    assert {"a": pytest.approx(1.0), "b": pytest.approx(1.0 + CHUNK_S)} == durations


def test_readers_of_one_link_share_its_speed() -> None:
    """Two full readers of one seed take twice as long; two that read half from each of two seeds do not."""
    fleet = members(seed("s"), seed("r"), loading("a"), loading("b"))
    star = simulate_flows(fleet, {"a": (ChunkShare("s", ALL),), "b": (ChunkShare("s", ALL),)}, IMAGE, RATES)
    low, high = ((0, 6),), ((6, 12),)
    striped = simulate_flows(fleet, {"a": (ChunkShare("s", low), ChunkShare("r", high))}, IMAGE, RATES)
    assert {"a": pytest.approx(2.0), "b": pytest.approx(2.0)} == star
    assert {"a": pytest.approx(1.0)} == striped


def test_a_source_serves_at_most_its_egress_rate() -> None:
    """Its limit applies to the total of its readers, including those on its host."""
    slow = seed("s", egress_rate=LINK / 4, transports=("shared_memory", "http"), location=HostLocation("here"))
    near = loading("a", transports=("shared_memory", "http"), location=HostLocation("here"))
    durations = simulate_flows(members(slow, near), {"a": (ChunkShare("s", ALL),)}, IMAGE, RATES)
    assert {"a": pytest.approx(4.0)} == durations


def test_same_host_reads_do_not_use_the_network_link() -> None:
    """Of three targets on one host, one reads over the network, and the others read from it."""
    fleet = members(seed("s"), *(loading(name, location=HostLocation("here")) for name in "abc"))
    reads = {"a": (ChunkShare("s", ALL),), "b": (ChunkShare("a", ALL),), "c": (ChunkShare("b", ALL),)}
    local_s = IMAGE / CHUNKS / SAME_HOST_RATE
    durations = simulate_flows(fleet, reads, IMAGE, RATES)
    assert [1.0, 1.0 + local_s, 1.0 + 2 * local_s] == [pytest.approx(durations[name]) for name in "abc"]


def test_the_members_of_a_ring_read_half_from_storage() -> None:
    """Each reads half from storage at half of the link's speed, and receives the other half meanwhile."""
    fleet = members(loading("a"), loading("b"))
    low, high = ((0, 6),), ((6, 12),)
    reads = {
        "a": (ChunkShare("a", low), ChunkShare("b", high)),
        "b": (ChunkShare("b", high), ChunkShare("a", low)),
    }
    durations = simulate_flows(fleet, reads, IMAGE, RATES)
    assert [1.0 + CHUNK_S] * 2 == [pytest.approx(durations[name]) for name in "ab"]


def test_a_loader_serves_nothing_until_it_is_done() -> None:
    """Its readers start then."""
    fleet = members(loading("a"), loading("b"))
    reads = {"a": (ChunkShare("a", ALL, all_or_nothing=True),), "b": (ChunkShare("a", ALL),)}
    durations = simulate_flows(fleet, reads, IMAGE, RATES)
    assert [2.0, 3.0] == [pytest.approx(durations[name]) for name in "ab"]


def test_targets_without_available_chunks_never_complete() -> None:
    """This covers a relay without reads, a removed source, and a cycle of two."""
    fleet = members(seed("s"), *(loading(name) for name in "abcd"), loading("half", (0, 6)))
    reads = {
        "a": (ChunkShare("half", ALL),),
        "b": (ChunkShare("gone", ALL),),
        "c": (ChunkShare("d", ALL),),
        "d": (ChunkShare("c", ALL),),
    }
    assert {} == simulate_flows(fleet, reads, IMAGE, RATES)


def test_running_forks_continue_from_their_chunks() -> None:
    """A half-complete fork takes half of the time, and its reader receives everything."""
    fleet = members(seed("s"), loading("a", (0, 6)), loading("b"))
    durations = simulate_flows(fleet, {"a": (ChunkShare("s", ALL),), "b": (ChunkShare("a", ALL),)}, IMAGE, RATES)
    assert {"a": pytest.approx(0.5), "b": pytest.approx(1.0 + CHUNK_S, abs=CHUNK_S)} == durations


def test_large_images_are_simulated_in_blocks() -> None:
    """Several chunks form a block, and the predicted time is still that of single chunks."""
    count = 2 * MAX_DELIVERIES
    big = {"chunk_count": count}
    fleet = members(seed("s", verified=((0, count),), **big), *(loading(name, **big) for name in "ab"))
    reads = {"a": (ChunkShare("s", ((0, count),)),), "b": (ChunkShare("a", ((0, count),)),)}
    durations = simulate_flows(fleet, reads, IMAGE, RATES)
    assert {"a": pytest.approx(1.0), "b": pytest.approx(1.0, rel=1e-3)} == durations


# -- plans -------------------------------------------------------------------------------------------


async def test_replicas_form_a_chain(service: PlanService) -> None:
    """Each is on its own host, and the planner's state does not change."""
    await service.report(seed_report("s"))
    result = dry_run(service, targets=3)
    expected = {"preview-1": {"s": ALL}, "preview-2": {"preview-1": ALL}, "preview-3": {"preview-2": ALL}}
    assert expected == shares(result)
    assert [1.0, 1.083, 1.167] == seconds(result)
    assert 1.0 == result.bound_s
    assert 1 == result.seeds
    assert 0 == result.storage_bytes
    assert [{"s": "http"}] == [result.targets[0].transports]
    assert [] == service.state.forks()
    assert ["s"] == [each.report.instance_id for each in service.state.instances()]


async def test_replicas_share_hosts_as_requested(service: PlanService) -> None:
    """Two new hosts have two replicas each, in the requested rack."""
    await service.report(seed_report("s", max_readers=4, transports=("shared_memory", "http")))
    result = dry_run(service, targets=4, per_host=2, rack="r1")
    assert ["preview-host-1", "preview-host-1", "preview-host-2", "preview-host-2"] == [
        target.host for target in result.targets
    ]
    assert {"preview-1": "shared_memory"} == result.targets[1].transports


async def test_a_busy_seed_is_not_read_from(service: PlanService) -> None:
    """The seed's only slot is taken: replicas read from the fork that has it."""
    await service.report(seed_report("s"))
    await service.plan(fork_request("a"))
    result = dry_run(service, targets=1)
    assert {"preview-1": {"a": ALL}} == shares(result)
    assert [1.083] == seconds(result)


async def test_replicas_without_a_slot_start_later(service: PlanService) -> None:
    """If the seed accepts one reader and replicas accept none, each waits for the one before it."""
    await service.report(seed_report("s"))
    (group,) = service.state.groups_of("m")
    request = PreviewRequest(model="m", targets=3, link_bytes_per_s=LINK)
    snapshot = snapshot_group(service.state, group, request, service.now())
    assert snapshot is not None
    found = build_scenario(snapshot)
    alone = [replace(each, target=replace(each.target, max_readers=0)) for each in found.demands]
    result = preview(replace(found, demands=tuple(alone)))
    assert [1.0, 2.0, 3.0] == sorted(each or math.inf for each in seconds(result))


async def test_a_cold_group_reads_the_storage_of_earlier_forks(service: PlanService) -> None:
    """A finished fork read a checkpoint: one replica is predicted to read it for all."""
    await service.report(seed_report("s"))
    result = dry_run(service, targets=2, cold=True)
    assert [None, None] == seconds(result)
    assert 0 == result.seeds
    assert "no instance has version v1 of model m" == result.targets[0].reason
    await service.report(report("a", storage=storage_candidates(CHECKPOINT)))
    result = dry_run(service, targets=2, cold=True, storage_bytes_per_s=IMAGE / 2)
    assert {"preview-1": {"preview-1": ALL}, "preview-2": {"preview-1": ALL}} == shares(result)
    assert IMAGE == result.storage_bytes
    assert [2.0, 2.083] == seconds(result)


@pytest.mark.parametrize(("storage_type", "second"), [("checkpoint", 2.083), ("loader", 3.0)])
async def test_storage_is_inferred_from_finished_forks(service: PlanService, storage_type: str, second: float) -> None:
    """Its type, URI and rate are taken from their reports."""
    await service.plan(
        fork_request("a", storage=storage_candidates(CHECKPOINT if storage_type == "checkpoint" else LOADER))
    )
    finish = ForkResult(outcome="forked", seconds=2.0, bytes_read=IMAGE, sources={f"{storage_type}:x": IMAGE})
    await service.finish("fork-a", finish)
    await service.report(seed_report("a"))
    result = dry_run(service, targets=2, cold=True)
    assert [2.0, second] == seconds(result)
    assert IMAGE / 2 == result.storage_bytes_per_s


async def test_a_storage_rate_implies_a_snapshot(service: PlanService) -> None:
    """A snapshot is assumed if no storage is known."""
    await service.report(seed_report("s", chunk_count=20, verified=((0, 20),), max_readers=4))
    result = dry_run(service, targets=2, cold=True, storage_bytes_per_s=LINK)
    low, high = ((0, 10),), ((10, 20),)
    assert {
        "preview-1": {"preview-1": low, "preview-2": high},
        "preview-2": {"preview-2": high, "preview-1": low},
    } == shares(result)


async def test_the_link_rate_is_the_fastest_measured_one(service: PlanService) -> None:
    """Reads within a host and reads from storage do not count."""
    await service.report(seed_report("s", max_readers=9))
    guess = dry_run(service, link_bytes_per_s=None)
    for name, source, transport, rate in (
        ("a", "s", "http", 3e8),
        ("b", "s", "shared_memory", 9e9),
        ("c", "snapshot:file:///s", "http", 8e9),
    ):
        await service.plan(fork_request(name))
        finish = ForkResult(
            outcome="forked", seconds=1.0, bytes_read=IMAGE, sources={source: IMAGE},
            link_bytes_per_s=rate, transports={source: transport},
        )  # fmt: skip
        await service.finish(f"fork-{name}", finish)
    measured = dry_run(service, link_bytes_per_s=None)
    configured = dry_run(service, link_bytes_per_s=1e6)
    assert 1.25e9 == guess.link_bytes_per_s
    assert not guess.measured
    assert 3e8 == measured.link_bytes_per_s
    assert measured.measured
    assert 1e6 == configured.link_bytes_per_s
    assert not configured.measured


async def test_a_rate_of_almost_nothing_is_not_a_measured_one(service: PlanService) -> None:
    """With the smallest positive rate, which an instance may report, durations would be infinite."""
    await service.report(seed_report("s"))
    await service.plan(fork_request("a"))
    finish = ForkResult(outcome="forked", seconds=1.0, bytes_read=IMAGE, sources={"s": IMAGE}, link_bytes_per_s=5e-324)
    await service.finish("fork-a", finish)
    assert not dry_run(service, link_bytes_per_s=None).measured


async def test_replicas_resemble_the_layout_with_the_most_seeds(service: PlanService) -> None:
    """Loading instances do not count."""
    await service.report(seed_report("s"))
    for name in "ab":
        await service.report(report(name, layout_id="b" * 32))
    assert {"preview-1": {"s": ALL}} == shares(dry_run(service))


async def test_a_snapshot_does_not_change(service: PlanService) -> None:
    """Later reports do not affect a preview that has started."""
    for name in ("s", "u"):
        await service.report(seed_report(name))
    await service.plan(fork_request("a"))
    (group,) = service.state.groups_of("m")
    request = PreviewRequest(model="m", targets=2, link_bytes_per_s=LINK)
    snapshot = snapshot_group(service.state, group, request, service.now())
    assert snapshot is not None
    before = preview(build_scenario(snapshot))
    await service.plan(fork_request("b"))
    await service.report(seed_report("v"))
    for name in ("s", "u", "a"):
        await service.remove(name)
    assert before == preview(build_scenario(snapshot))
