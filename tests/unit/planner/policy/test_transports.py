"""Transports of plans, and the preference between sources that they imply."""

from __future__ import annotations

import pytest

from planner.policy.transports import shared_transports
from planner.policy.types import GroupView, HostLocation, PlanDecision, Source
from tests.unit.planner.builders import decide, group, loading, plan_together, routes, seed

ALL = ((0, 12),)
HERE = HostLocation("here")
LOCAL = ("shared_memory", "http")


def newcomer(*transports: str) -> Source:
    """Return a target on the host "here"."""
    return loading("t", location=HERE, transports=transports)


SHARED = [
    (("cuda_ipc", "http"), ("cuda_ipc", "http"), True, ("cuda_ipc", "http")),
    (("cuda_ipc", "http"), ("cuda_ipc", "http"), False, ("http",)),
    (("http", "shared_memory"), ("shared_memory", "http"), True, ("shared_memory", "http")),
    (("shared_memory", "http"), ("http", "shared_memory"), True, ("http", "shared_memory")),
    (("nccl", "http"), ("nccl", "gloo", "http"), True, ("http", "nccl")),
    (("http", "nccl", "cuda_ipc"), ("nccl", "cuda_ipc", "http"), False, ("http", "nccl")),
    (("nccl",), ("nccl", "http"), False, ("nccl",)),
    (("shared_memory",), ("shared_memory", "http"), False, ()),
    (("http",), ("transfer_engine",), True, ()),
]


@pytest.mark.parametrize(("source", "target", "near", "expected"), SHARED)
def test_transports_of_a_route_are_ordered_with_kernels_last(
    source: tuple[str, ...], target: tuple[str, ...], near: bool, expected: tuple[str, ...]
) -> None:
    """Same-host transports work only within it, in the target's order, with kernels on the source last."""
    there = seed("s", transports=source, location=HERE if near else HostLocation("there"))
    assert expected == shared_transports(there, newcomer(*target))


def first(fleet: GroupView, *transports: str) -> tuple[set[str], str]:
    """Return the newcomer's sources and the reason."""
    decision: PlanDecision = decide(fleet, newcomer(*transports))
    return set(routes(decision)), decision.reason


def test_a_remote_source_with_only_same_host_transports_is_ineligible() -> None:
    """The reason names the transports and both hosts."""
    there = seed("s", transports=("shared_memory",), location=HostLocation("there"))
    reason = (
        "no readable source among 1: s shares only shared_memory, which works within one host: "
        "it runs on there, the target on here"
    )
    assert (set(), reason) == first(group(there), "shared_memory", "http")


def test_the_reason_names_a_same_host_transport() -> None:
    """The plan shows which transport the fork uses."""
    reason = "from seed s (0 other readers) over shared_memory on this host"
    assert ({"s"}, reason) == first(group(seed("s", transports=LOCAL, location=HERE)), *LOCAL)


def test_the_reason_names_a_transport_that_runs_kernels() -> None:
    """It is used for a source that no other transport reaches."""
    reason = "from seed s (0 other readers) over nccl, which runs kernels on the source's GPU"
    assert ({"s"}, reason) == first(group(seed("s", transports=("nccl",))), "nccl", "http")


def test_a_striped_plan_names_the_transport_of_each_source() -> None:
    """Both seeds of the host serve half."""
    fleet = group(*(seed(name, transports=LOCAL, location=HERE) for name in "ab"))
    reason = (
        "striped over 2 sources: 6 of 12 chunks from a over shared_memory on this host, "
        "6 of 12 chunks from b over shared_memory on this host"
    )
    assert ({"a", "b"}, reason) == first(fleet, *LOCAL)


PREFERRED: list[tuple[str, Source, Source]] = [
    (
        "shared memory on the host before http",
        seed("z", location=HERE, transports=LOCAL),
        seed("a", location=HERE),
    ),
    ("no kernels before kernels", seed("z", transports=("http",)), seed("a", transports=("nccl",))),
    (
        "remote without kernels before local with kernels",
        seed("z"),
        seed("a", location=HERE, transports=("nccl",)),
    ),
    (
        "complete local before remote relay",
        seed("z", location=HERE, transports=LOCAL),
        loading("a", (0, 11), transports=LOCAL),
    ),
    (
        "complete local over http before remote",
        seed("z", location=HERE),
        seed("a", transports=LOCAL),
    ),
]


@pytest.mark.parametrize(("case", "better", "other"), PREFERRED)
def test_only_the_better_source_is_read(case: str, better: Source, other: Source) -> None:
    """The target reads from the better source only: sources of different cost share no work."""
    fleet = group(better, other, reads={"a": {"s": ALL}} if not other.complete else None)
    assert {better.instance_id} == first(fleet, "shared_memory", "nccl", "http")[0]


def test_no_work_is_shared_with_a_source_that_would_run_kernels() -> None:
    """The better seed has half of its link to spare, and the other is idle."""
    fleet = group(seed("z"), seed("a", transports=("nccl",)), reads={"x": {"z": ((0, 6),)}})
    assert {"z": ALL} == routes(decide(fleet, newcomer("nccl", "http")))


def crowded(readers: int, **changes: object) -> GroupView:
    """Return a group with a seed that has readers on its own host, and one with a network reader."""
    members = [loading(f"r{index}", location=HostLocation("host-a"), transports=LOCAL) for index in range(readers)]
    return group(
        seed("a", **({"max_readers": 4, "transports": LOCAL} | changes)),
        seed("b", max_readers=4, transports=LOCAL),
        *members,
        loading("x", transports=LOCAL),
        reads={member.instance_id: {"a": ALL} for member in members} | {"x": {"b": ALL}},
    )


def test_same_host_readers_do_not_load_the_seeds_link() -> None:
    """The seed with three same-host readers counts as idle."""
    assert {"a": ALL} == routes(decide(crowded(3), newcomer(*LOCAL)))


def test_same_host_readers_occupy_slots() -> None:
    """A seed with three slots has none for a fourth reader, wherever it runs."""
    assert "a" not in routes(decide(crowded(3, max_readers=3), newcomer(*LOCAL)))


def test_same_host_readers_over_the_network_count() -> None:
    """Over http, a reader on the same host loads the link."""
    assert "a" not in routes(decide(crowded(3, transports=("http",)), newcomer(*LOCAL)))


def test_a_seed_with_only_same_host_readers_feeds_a_line() -> None:
    """Both seeds count as idle: two lines of one."""
    fleet = crowded(2)
    fleet = group(
        *(each for name, each in fleet.sources.items() if name not in ("b", "x")),
        seed("c", transports=LOCAL),
        reads={name: {"a": ALL} for name in ("r0", "r1")},
    )
    expected = {"u": {"a": ALL}, "v": {"c": ALL}}
    assert expected == plan_together(fleet, *(loading(name, transports=LOCAL) for name in "uv"))


def test_within_a_host_targets_that_come_one_by_one_form_a_chain() -> None:
    """Same-host readers count there: each target reads from the last one, and the seed serves one."""
    members = [seed("s", location=HERE, transports=LOCAL)]
    reads: dict[str, dict[str, tuple[tuple[int, int], ...]]] = {}
    for name in ("t0", "t1", "t2"):
        members.append(loading(name, location=HERE, transports=LOCAL))
        reads[name] = routes(decide(group(*members, reads=reads), members[-1]))
    assert {"t0": {"s": ALL}, "t1": {"t0": ALL}, "t2": {"t1": ALL}} == reads
