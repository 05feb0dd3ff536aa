"""Several targets on each of several hosts: one network transfer per host, the rest within it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from planner.policy.group_plan import plan
from planner.policy.types import ForkDemand, GroupView, HostLocation, Source, Storage
from rfork.image.ranges import count
from tests.unit.planner.builders import (
    CHECKPOINT,
    LOADER,
    NOW,
    SNAPSHOT,
    apply_decisions,
    demand,
    group,
    loading,
    seed,
)
from tests.unit.planner.policy.invariants import violations

CHUNK_COUNT = 64
ALL_CHUNKS = ((0, CHUNK_COUNT),)
GPU, CPU = ("cuda_ipc", "http"), ("shared_memory", "http")
HOSTS, TARGETS_PER_HOST = 4, 8


def source(name: str, **changes: object) -> Source:
    """Return a seed with 64 chunks and four reader slots."""
    usual = {
        "chunk_count": CHUNK_COUNT,
        "verified": ALL_CHUNKS,
        "max_readers": 4,
        "transports": ("cuda_ipc", *CPU),
    }
    return seed(name, **(usual | changes))


def arrivals(hosts: int, per_host: int, *transports: tuple[str, ...], **changes: object) -> list[Source]:
    """Return targets t00, t01, …, distributed round robin over hosts and transports."""
    return [
        loading(
            f"t{index:02}",
            **(
                {
                    "chunk_count": CHUNK_COUNT,
                    "max_readers": 4,
                    "location": HostLocation(f"h{index % hosts}"),
                    "transports": transports[index // hosts % len(transports)],
                }
                | changes
            ),
        )
        for index in range(hosts * per_host)
    ]


def plan_arrivals(fleet: GroupView, *new_targets: Source, **blamed: str) -> GroupView:
    """Plan these targets in one call and return the fleet; the plan must satisfy the invariants."""
    demands = [
        ForkDemand(f"fork-{each.instance_id}", each, blamed, fleet.shares.get(each.instance_id, ()))
        for each in new_targets
    ]
    decisions = plan(fleet, demands, NOW)
    assert [] == violations(fleet, demands, decisions, NOW)
    return apply_decisions(fleet, demands, decisions)


def crossings(fleet: GroupView) -> tuple[dict[str, float], dict[str, float]]:
    """Return the images that each host reads from others, and that each sends to others."""
    read: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for target, shares in fleet.shares.items():
        for share in shares:
            here, there = fleet.sources[target].location.host, fleet.sources[share.source_id].location.host
            if here != there:
                read[here] += count(share.chunks)
                sent[there] += count(share.chunks)
    return {host: chunks / CHUNK_COUNT for host, chunks in read.items()}, {
        host: chunks / CHUNK_COUNT for host, chunks in sent.items()
    }


def served(fleet: GroupView) -> set[int]:
    """Return the distinct numbers of chunks that targets receive."""
    return {sum(count(share.chunks) for share in shares) for shares in fleet.shares.values()}


@pytest.mark.parametrize("transports", [(GPU,), (CPU,), (GPU, CPU), (("http",),)])
def test_one_target_per_host_reads_over_the_network(
    transports: tuple[tuple[str, ...], ...],
) -> None:
    """With 32 targets on four hosts, each host reads the image once and sends it once."""
    after = plan_arrivals(group(source("s")), *arrivals(HOSTS, TARGETS_PER_HOST, *transports))
    read, sent = crossings(after)
    assert {f"h{index}": 1.0 for index in range(HOSTS)} == read
    assert 1.0 == max(sent.values())
    assert {CHUNK_COUNT} == served(after)


@pytest.mark.parametrize("transports", [(GPU,), (GPU, CPU)])
def test_late_targets_read_within_their_host(transports: tuple[tuple[str, ...], ...]) -> None:
    """If targets arrive one by one, only the first of each host reads over the network."""
    fleet = group(source("s"))
    for target in arrivals(HOSTS, TARGETS_PER_HOST, *transports):
        fleet = plan_arrivals(fleet, target)
    assert {f"h{index}": 1.0 for index in range(HOSTS)} == crossings(fleet)[0]
    assert {CHUNK_COUNT} == served(fleet)


def test_a_removed_leader_is_replaced_on_its_host() -> None:
    """Its readers replan: one target of the host reads the rest over the network."""
    targets = arrivals(2, 4, GPU)
    before = plan_arrivals(group(source("s")), *targets)
    dead = next(share.source_id for share in before.shares["t02"])
    half = {
        each.instance_id: replace(each, verified=((0, 16),), weights_id=source("s").weights_id)
        for each in targets
        if each.instance_id != dead
    }
    orphans = [name for name in half if any(share.source_id == dead for share in before.shares[name])]
    fleet = replace(
        before,
        sources={"s": source("s"), **half},
        shares={name: shares for name, shares in before.shares.items() if name != dead},
        readers={
            name: {fork: part for fork, part in there.items() if fork != f"fork-{dead}"}
            for name, there in before.readers.items()
            if name != dead
        },
    )
    for name in orphans:
        fleet = plan_arrivals(fleet, half[name], **{dead: "SourceUnavailable"})
    read = crossings(fleet)[0]
    assert dead in ("t00", "t01")
    assert max(read.values()) <= 1.0


def test_a_target_without_slots_does_not_lead() -> None:
    """A target that accepts readers comes first, though its name sorts last."""
    targets = arrivals(1, 4, GPU)
    targets = [replace(each, max_readers=0) for each in targets[:3]] + targets[3:]
    after = plan_arrivals(group(source("s")), *targets)
    assert {"s"} == {share.source_id for share in after.shares["t03"]}
    assert {"h0": 1.0} == crossings(after)[0]


def test_if_no_target_accepts_readers_each_reads_over_the_network() -> None:
    """Four targets of one host use four slots of the seed."""
    after = plan_arrivals(group(source("s")), *arrivals(1, 4, GPU, max_readers=0))
    assert {"h0": 4.0} == crossings(after)[0]
    assert {CHUNK_COUNT} == served(after)


def test_targets_of_an_nvlink_domain_are_grouped_by_host() -> None:
    """With two hosts in one domain, the bytes cross hosts once."""
    targets = [replace(each, location=replace(each.location, nvlink="n")) for each in arrivals(2, 4, GPU)]
    assert [1.0, 1.0] == sorted(crossings(plan_arrivals(group(source("s")), *targets))[0].values())
    assert 1.0 == max(crossings(plan_arrivals(group(source("s")), *targets))[1].values())


@pytest.mark.parametrize("storage", [SNAPSHOT, CHECKPOINT, LOADER])
@pytest.mark.parametrize("hosts", [1, 2, 4, 9])
def test_in_a_cold_group_each_host_reads_the_image_once(storage: Storage, hosts: int) -> None:
    """Storage serves every byte once, and no host reads more than one image from the others."""
    after = plan_arrivals(group(), *arrivals(hosts, TARGETS_PER_HOST, GPU, storage=(storage,)))
    own = sum(
        count(share.chunks) for name, shares in after.shares.items() for share in shares if share.source_id == name
    )
    assert CHUNK_COUNT == own
    assert {CHUNK_COUNT} == served(after)
    assert max(crossings(after)[0].values(), default=0.0) <= 1.0


def test_same_host_transports_form_one_line_per_host() -> None:
    """Targets on the seed's host read there; the others get the reason why they cannot."""
    bound = ("shared_memory",)
    targets = arrivals(2, 3, bound)
    fleet = group(source("s", location=HostLocation("h0"), transports=bound))
    demands = [demand(each) for each in targets]
    decisions = plan(fleet, demands, NOW)
    assert [] == violations(fleet, demands, decisions, NOW)
    here = [decisions[f"fork-t{index:02}"] for index in (0, 2, 4)]
    there = [decisions[f"fork-t{index:02}"].reason for index in (1, 3, 5)]
    assert [["s"], ["t00"], ["t02"]] == [[each.source_id for each in decision.assignments] for decision in here]
    assert [True] * 3 == ["it runs on h0, the target on h1" in reason for reason in there]


@pytest.mark.parametrize("storage", [SNAPSHOT, CHECKPOINT, LOADER])
def test_same_host_transports_read_storage_once_per_host(storage: Storage) -> None:
    """No target can wait for another host."""
    after = plan_arrivals(group(), *arrivals(3, 4, ("cuda_ipc", "shared_memory"), storage=(storage,)))
    own: Counter[str] = Counter()
    for name, shares in after.shares.items():
        own[after.sources[name].location.host] += sum(
            count(share.chunks) for share in shares if share.source_id == name
        )
    assert dict.fromkeys(("h0", "h1", "h2"), CHUNK_COUNT) == own
    assert {} == crossings(after)[0]
    assert {CHUNK_COUNT} == served(after)
