"""Which transports a plan goes by, and whom it prefers for them."""

from __future__ import annotations

import pytest

from planner.policy.transports import shared_transports
from planner.policy_types import GroupView, HostLocation, PlanDecision, Source
from tests.unit.planner.builders import decide, group, loading, plan_together, routes, seed

ALL = ((0, 12),)
HERE = HostLocation("here")
LOCAL = ("shared_memory", "http")


def newcomer(*transports: str) -> Source:
    """A target on the host "here"."""
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
def test_the_transports_of_a_route(
    source: tuple[str, ...], target: tuple[str, ...], near: bool, expected: tuple[str, ...]
) -> None:
    """Those of one host only within it, the target's best first, and kernels on the source last of all."""
    there = seed("s", transports=source, location=HERE if near else HostLocation("there"))
    assert expected == shared_transports(there, newcomer(*target))


def first(fleet: GroupView, *transports: str) -> tuple[set[str], str]:
    """Whom the newcomer reads from, and why."""
    decision: PlanDecision = decide(fleet, newcomer(*transports))
    return set(routes(decision)), decision.reason


def test_a_source_of_another_host_with_transports_of_its_own_host_alone_is_unfit() -> None:
    """The reason names the transports and both hosts."""
    there = seed("s", transports=("shared_memory",), location=HostLocation("there"))
    reason = (
        "no source of 1 can be read from: s shares only shared_memory, for two instances of one host: "
        "it runs on there, the target on here"
    )
    assert (set(), reason) == first(group(there), "shared_memory", "http")


def test_a_route_within_the_host_says_so() -> None:
    """Whoever asks which transport a fork uses reads it in its plan."""
    reason = "from seed s (0 other readers) over shared_memory on this host"
    assert ({"s"}, reason) == first(group(seed("s", transports=LOCAL, location=HERE)), *LOCAL)


def test_a_route_that_runs_kernels_says_so() -> None:
    """Of a source that nothing else reaches."""
    reason = "from seed s (0 other readers) over nccl, which runs kernels on the source's GPU"
    assert ({"s"}, reason) == first(group(seed("s", transports=("nccl",))), "nccl", "http")


def test_a_striped_plan_says_of_each_source_what_it_costs() -> None:
    """Both seeds of the host give a half."""
    fleet = group(*(seed(name, transports=LOCAL, location=HERE) for name in "ab"))
    reason = (
        "striped over 2 sources: 6 of 12 chunks from a over shared_memory on this host, "
        "6 of 12 chunks from b over shared_memory on this host"
    )
    assert ({"a", "b"}, reason) == first(fleet, *LOCAL)


PREFERRED: list[tuple[str, Source, Source]] = [
    (
        "the one that shares memory, of two on the host",
        seed("z", location=HERE, transports=LOCAL),
        seed("a", location=HERE),
    ),
    ("the one that runs no kernels", seed("z", transports=("http",)), seed("a", transports=("nccl",))),
    (
        "one elsewhere that runs no kernels, to one here that does",
        seed("z"),
        seed("a", location=HERE, transports=("nccl",)),
    ),
    (
        "a complete one on the host, to a relay elsewhere",
        seed("z", location=HERE, transports=LOCAL),
        loading("a", (0, 11), transports=LOCAL),
    ),
    (
        "a complete one on the host without shared memory, to one elsewhere",
        seed("z", location=HERE),
        seed("a", transports=LOCAL),
    ),
]


@pytest.mark.parametrize(("why", "better", "other"), PREFERRED)
def test_who_is_preferred(why: str, better: Source, other: Source) -> None:
    """And reads from it alone: sources that cost another thing share no work."""
    fleet = group(better, other, reads={"a": {"s": ALL}} if not other.complete else None)
    assert {better.instance_id} == first(fleet, "shared_memory", "nccl", "http")[0]


def test_no_work_is_shared_with_one_that_would_run_kernels_for_it() -> None:
    """The better seed has half of its link to spare, the other is idle: kernels cost more than time."""
    fleet = group(seed("z"), seed("a", transports=("nccl",)), reads={"x": {"z": ((0, 6),)}})
    assert {"z": ALL} == routes(decide(fleet, newcomer("nccl", "http")))


def crowded(readers: int, **changes: object) -> GroupView:
    """A seed with readers on its own host, and one that another target reads over the network."""
    members = [loading(f"r{index}", location=HostLocation("host-a"), transports=LOCAL) for index in range(readers)]
    return group(
        seed("a", **({"max_readers": 4, "transports": LOCAL} | changes)),
        seed("b", max_readers=4, transports=LOCAL),
        *members,
        loading("x", transports=LOCAL),
        reads={member.instance_id: {"a": ALL} for member in members} | {"x": {"b": ALL}},
    )


def test_readers_within_its_host_take_nothing_of_a_seeds_link() -> None:
    """Of two seeds, three read one on its host and one the other over the network: the first is idle."""
    assert {"a": ALL} == routes(decide(crowded(3), newcomer(*LOCAL)))


def test_readers_within_its_host_take_slots() -> None:
    """A seed that takes three readers has no slot for a fourth, wherever it runs."""
    assert "a" not in routes(decide(crowded(3, max_readers=3), newcomer(*LOCAL)))


def test_readers_on_its_host_over_the_network_count() -> None:
    """Over http even a reader of the same host takes its part."""
    assert "a" not in routes(decide(crowded(3, transports=("http",)), newcomer(*LOCAL)))


def test_a_line_stands_behind_a_seed_whose_readers_are_all_on_its_host() -> None:
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
    """There the readers of a host do count: each stands behind the last, and the seed gives to one."""
    members = [seed("s", location=HERE, transports=LOCAL)]
    reads: dict[str, dict[str, tuple[tuple[int, int], ...]]] = {}
    for name in ("t0", "t1", "t2"):
        members.append(loading(name, location=HERE, transports=LOCAL))
        reads[name] = routes(decide(group(*members, reads=reads), members[-1]))
    assert {"t0": {"s": ALL}, "t1": {"t0": ALL}, "t2": {"t1": ALL}} == reads
