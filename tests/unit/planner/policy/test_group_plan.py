"""Plans of single targets: selection of sources, shares of chunks, and reasons for a refusal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.policy.types import ChunkShare, GroupView, HostLocation, Source, distance
from rfork.image.ranges import Range
from rfork.weights_version import is_first
from tests.unit.planner.builders import (
    LAYOUT,
    NOW,
    OTHER_LAYOUT,
    OTHER_WEIGHTS,
    WEIGHTS,
    Reads,
    decide,
    group,
    loading,
    routes,
    seed,
)

ALL = ((0, 12),)


def arrive(fleet: GroupView, *names: str) -> dict[str, dict[str, tuple[Range, ...]]]:
    """Return the reads of targets that arrive one after another, each planned immediately."""
    reads: dict[str, dict[str, tuple[Range, ...]]] = {}
    sources = list(fleet.sources.values())
    for name in names:
        sources.append(loading(name))
        reads[name] = routes(decide(group(*sources, reads=reads), loading(name)))
    return reads


def test_targets_that_arrive_one_by_one_form_a_chain() -> None:
    """Each target reads from the one before it, and the seed serves one reader only."""
    expected = {"a": {"s": ALL}, "b": {"a": ALL}, "c": {"b": ALL}, "d": {"c": ALL}}
    assert expected == arrive(group(seed("s")), "a", "b", "c", "d")


def test_a_late_target_stripes_over_finished_instances() -> None:
    """Once the chain is complete, its members are idle seeds."""
    fleet = group(seed("a"), seed("b"), seed("s"))
    expected = {"a": ((0, 4),), "b": ((4, 8),), "s": ((8, 12),)}
    assert expected == routes(decide(fleet, loading("t")))


def test_at_most_four_idle_seeds_share_a_fork() -> None:
    """A fifth idle seed stays free for the next target."""
    fleet = group(*(seed(f"s{index}") for index in range(5)))
    expected = {"s0": ((0, 3),), "s1": ((3, 6),), "s2": ((6, 9),), "s3": ((9, 12),)}
    assert expected == routes(decide(fleet, loading("t")))


@pytest.mark.parametrize(
    ("rates", "reads_at", "first"),
    [((12e6, 4e6), None, 9), ((None, 4e6), 12e6, 9), ((None, 4e6), None, 6), ((12e6, 4e6), 4e6, 6)],
    ids=["both limited", "limited rate", "one limited, one unknown", "slower than both"],
)
def test_a_rate_limited_source_gets_a_smaller_part(
    rates: tuple[float | None, float], reads_at: float | None, first: int
) -> None:
    """Both sources finish at the same time, given their egress rates and the target's own link."""
    fleet = group(*(seed(name, egress_rate=rate) for name, rate in zip("ab", rates, strict=True)))
    expected = {"a": ((0, first),), "b": ((first, 12),)}
    assert expected == routes(decide(fleet, loading("t", ingress_rate=reads_at)))


def test_shares_of_missing_chunks_are_contiguous() -> None:
    """Stripes cover only missing chunks, and their sizes differ by at most one."""
    target = loading("t", (2, 4), (7, 8))
    expected = {"s1": ((0, 2), (4, 7)), "s2": ((8, 12),)}
    assert expected == routes(decide(group(seed("s1"), seed("s2")), target))


def test_no_more_seeds_are_read_than_chunks_are_missing() -> None:
    """One missing chunk is read from one seed."""
    decision = decide(group(seed("s1"), seed("s2")), loading("t", (0, 11)))
    assert {"s1": ((11, 12),)} == routes(decision)
    assert "from seed s1 (0 other readers)" == decision.reason


def test_a_distant_seed_does_not_join_a_stripe_of_near_ones() -> None:
    """Only seeds at the same distance share the work."""
    near = {"location": HostLocation("host-t")}
    fleet = group(seed("s1", **near), seed("s2", **near), seed("far"))
    target = loading("t", **near)
    assert {"s1": ((0, 6),), "s2": ((6, 12),)} == routes(decide(fleet, target))


def test_a_child_of_a_removed_relay_reads_from_the_relays_parent() -> None:
    """When A of seed-A-B-C is removed, B reads from the seed and C stays with B."""
    fleet = group(
        seed("s"), loading("a", (0, 5)), loading("b", (0, 4)), loading("c", (0, 3)),
        reads={"a": {"s": ALL}, "b": {"a": ALL}, "c": {"b": ALL}},
    )  # fmt: skip
    decision = decide(fleet, loading("b", (0, 4)), a="SourceUnavailable")
    assert {"s": ((4, 12),)} == routes(decision)


def test_a_repeated_request_keeps_its_plan() -> None:
    """A fork without faults keeps its source though another has become idle."""
    fleet = group(seed("s1"), seed("s2"), loading("t", (0, 2)), reads={"t": {"s2": ALL}, "x": {"s2": ALL}})
    assert {"s2": ((2, 12),)} == routes(decide(fleet, loading("t", (0, 2))))


def test_the_relay_with_the_most_progress_is_preferred() -> None:
    """Of two idle relays, the one with more chunks is read from."""
    half = ((6, 12),)
    fleet = group(
        seed("s", max_readers=2), loading("a", (0, 3)), loading("b", (0, 7)),
        reads={"a": {"s": half}, "b": {"s": half}, "x": {"s": ALL}},
    )  # fmt: skip
    fleet = replace(fleet, shares=dict(fleet.shares) | {"a": (ChunkShare("s", ALL),), "b": (ChunkShare("s", ALL),)})
    decision = decide(fleet, loading("t"))
    assert {"b": ALL} == routes(decision)
    assert "from relay b (7 of 12 chunks, 0 other readers)" == decision.reason


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        (HostLocation("h1", "r1", "z1"), 0),
        (HostLocation("h2", "r1", "z1"), 1),
        (HostLocation("h2", "r2", "z1"), 2),
        (HostLocation("h2", None, "z1"), 2),
        (HostLocation("h2", "r1", "z2"), 3),
        (HostLocation("h2"), 3),
    ],
)
def test_host_rack_and_zone_determine_the_distance(placement: HostLocation, expected: int) -> None:
    """Host comes before rack before zone; a rack's name counts only within its zone."""
    assert expected == distance(HostLocation("h1", "r1", "z1"), placement)


def test_the_nearest_of_equally_busy_sources_is_preferred() -> None:
    """With one reader on each, the seed in the same rack is read from."""
    fleet = group(
        seed("far"),
        seed("near", location=HostLocation("h2", "r1")),
        reads={"x": {"far": ALL}, "y": {"near": ALL}},
    )
    assert {"near": ALL} == routes(decide(fleet, loading("t", location=HostLocation("h1", "r1"))))


UNFIT = [
    (seed("s", state="draining"), "s draining"),
    (seed("s", quarantined_until=NOW + 1, quarantine="SourceCorrupt"), "s quarantined: SourceCorrupt"),
    (seed("s", transports=("transfer_engine",)), "s offers only transfer_engine"),
    (seed("s", transports=()), "s offers only no transport"),
    (seed("s", max_readers=0), "s at capacity (0 of 0 readers)"),
    (loading("s"), "s has 0 of 12 chunks and no source of its own"),
]


@pytest.mark.parametrize(("source", "expected"), UNFIT)
def test_an_unusable_source_is_named_with_the_reason(source: Source, expected: str) -> None:
    """There are no routes, and the reason explains why."""
    decision = decide(group(source), loading("t"))
    assert {} == routes(decision)
    assert f"no readable source among 1: {expected}" == decision.reason


def test_two_seeds_at_capacity_are_both_named() -> None:
    """Full sources are not overloaded."""
    fleet = group(seed("s1", max_readers=1), seed("s2", max_readers=1), reads={"x": {"s1": ALL}, "y": {"s2": ALL}})
    reason = "no readable source among 2: s1 at capacity (1 of 1 readers); s2 at capacity (1 of 1 readers)"
    assert reason == decide(fleet, loading("t")).reason


def test_only_a_full_source_allows_a_retry() -> None:
    """A reader's slot becomes free; a draining seed does not come back."""
    assert decide(group(seed("s", max_readers=0)), loading("t")).no_free_slot
    assert not decide(group(seed("s", state="draining")), loading("t")).no_free_slot
    assert not decide(group(), loading("t")).no_free_slot


def test_an_instance_with_another_layout_is_named_for_comparison() -> None:
    """A complete instance is named; none is named if the layout matches."""
    others = group(loading("a", layout_id=OTHER_LAYOUT), seed("z", layout_id=OTHER_LAYOUT))
    fleets = [others, group(seed("s")), group()]
    assert ["z", None, None] == [decide(fleet, loading("t")).mismatched_source for fleet in fleets]


def test_a_long_list_of_reasons_is_truncated() -> None:
    """A reason names at most eight instances."""
    fleet = group(*(seed(f"s{index:02}", state="draining") for index in range(11)))
    assert decide(fleet, loading("t")).reason.endswith("s07 draining; and 3 more")


def test_an_excluded_source_is_not_assigned_again() -> None:
    """The fork reads from the other seed."""
    assert {"s2": ALL} == routes(decide(group(seed("s1"), seed("s2")), loading("t"), s1="SourceTimeout"))


NO_SOURCE = [
    (group(), "no instance has model m"),
    (group(other_ranks=("r2", "r3")), "no instance has model m at rank r; other ranks are available: r2, r3"),
    (
        replace(group(other_ranks=("r2",)), version=f"files:{'3' * 32}", other_versions={"v1": 4, "v2": 1}),
        "first of version files:33333333 of model m; 4 instances serve v1, 1 instance serves v2",
    ),
    (
        replace(group(), version="unnamed:x", other_versions={"v1": 1}),
        "no version of model m can be adopted; 1 instance serves v1",
    ),
    (group(seed("s", expires_at=NOW)), "no instance has model m"),
    (
        group(seed("s", layout_id=OTHER_LAYOUT)),
        f"1 instance has model m at rank r with another layout ({OTHER_LAYOUT}): layout differs from instance s at s:1",
    ),
    (
        group(loading("a", layout_id="c" * 32), seed("z", layout_id=OTHER_LAYOUT)),
        f"2 instances have model m at rank r with another layout ({OTHER_LAYOUT}, {'c' * 32}): "
        "layout differs from instance z at z:1",
    ),
]


@pytest.mark.parametrize(("fleet", "expected"), NO_SOURCE)
def test_the_reason_explains_a_missing_layout(fleet: GroupView, expected: str) -> None:
    """Model, rank and layout are distinguished, and an instance with another layout is named."""
    assert expected == decide(fleet, loading("t")).reason


def test_the_first_target_of_a_version_sees_the_served_versions() -> None:
    """This also applies if other ranks of its replica are already known."""
    fleet = replace(group(other_ranks=("r2",)), version="v2", other_versions={"v1": 4})
    reason = decide(fleet, loading("t")).reason
    assert "first of version v2 of model m; 4 instances serve v1" == reason
    assert is_first(f"NoSource: {reason}")
    assert not is_first(f"NoSource: {decide(group(), loading('t')).reason}")


def test_a_refusal_also_names_other_layouts() -> None:
    """The reason lists the draining source and the one with another layout."""
    fleet = group(seed("s1", state="draining"), seed("s2", layout_id=OTHER_LAYOUT))
    expected = (
        "no readable source among 1: s1 draining; 1 instance has this model and rank with another "
        f"layout ({OTHER_LAYOUT}): layout differs from instance s2 at s2:1"
    )
    assert expected == decide(fleet, loading("t")).reason


def test_the_weights_with_the_most_seeds_are_chosen() -> None:
    """Two seeds win against one, which is not mixed in."""
    fleet = group(seed("n", weights_id=OTHER_WEIGHTS, generation=9), seed("s1"), seed("s2"))
    decision = decide(fleet, loading("t"))
    assert WEIGHTS == decision.weights_id
    assert {"s1", "s2"} == set(routes(decision))


def test_of_equally_common_weights_the_newest_generation_is_chosen() -> None:
    """With one seed each, the higher generation wins."""
    fleet = group(seed("n", weights_id=OTHER_WEIGHTS, generation=1), seed("s"))
    decision = decide(fleet, loading("t"))
    assert OTHER_WEIGHTS == decision.weights_id
    assert {"n"} == set(routes(decision))


def test_verified_chunks_pin_the_weights() -> None:
    """A fork that has begun keeps its weights, though more seeds have others."""
    fleet = group(seed("n1", weights_id=OTHER_WEIGHTS), seed("n2", weights_id=OTHER_WEIGHTS), seed("s"))
    assert {"s": ((3, 12),)} == routes(decide(fleet, loading("t", (0, 3))))


def test_pinned_weights_without_holders_have_no_routes() -> None:
    """The reason names the other weights."""
    decision = decide(group(seed("n", weights_id=OTHER_WEIGHTS)), loading("t", (0, 3)))
    expected = f"no readable source among 1: n has other weights ({OTHER_WEIGHTS})"
    assert {} == routes(decision)
    assert expected == decision.reason


def test_chunks_of_unknown_weights_are_read_again() -> None:
    """Without a weights_id, verified chunks may be of other weights: everything is assigned."""
    assert {"s": ALL} == routes(decide(group(seed("s")), loading("t", (0, 3), weights_id=None)))


def test_a_complete_target_needs_no_routes() -> None:
    """The reason states that nothing is missing."""
    decision = decide(group(seed("s")), loading("t", (0, 12)))
    assert {} == routes(decision)
    assert "every chunk is already verified" == decision.reason


UNFED = [
    ({"a": {"t": ALL}}, "a has 0 of 12 chunks and depends on the target itself"),
    ({"a": {"b": ALL}, "b": {"t": ALL}}, "a has 0 of 12 chunks and depends on the target itself"),
    ({"a": {"dead": ALL}}, "a has 0 of 12 chunks and its source dead was removed"),
    ({"a": {"ghost": ALL}}, "a has 0 of 12 chunks and its source ghost was removed"),
    ({"a": {"b": ALL}}, "a has 0 of 12 chunks and depends on the target itself, or on a relay"),
]


@pytest.mark.parametrize(("reads", "expected"), UNFED)
def test_a_relay_without_a_path_to_the_chunks_is_not_read_from(reads: Reads, expected: str) -> None:
    """A relay needs an unbroken path to the chunks that does not pass through the target."""
    fleet = group(
        loading("a"), loading("b"), loading("t"), seed("dead", expires_at=NOW), seed("s", state="draining"),
        reads=reads,
    )  # fmt: skip
    decision = decide(fleet, loading("t"))
    assert {} == routes(decision)
    assert expected in decision.reason


def test_incomplete_relays_are_combined() -> None:
    """The seed is removed; each of three relays serves what those with less do not have."""
    fleet = group(loading("a", (0, 5)), loading("b", (3, 9)), loading("c", (8, 12)))
    expected = {"a": ((2, 5),), "b": ((5, 8),), "c": ((8, 12),)}
    assert expected == routes(decide(fleet, loading("t", (0, 2))))


def test_unavailable_chunks_cause_a_retry() -> None:
    """The plan covers the available chunks, and a retry is suggested for the rest."""
    decision = decide(group(loading("a", (0, 5))), loading("t"))
    assert {"a": ((0, 5),)} == routes(decision)
    assert decision.no_free_slot


def test_two_relays_may_read_different_chunks_from_each_other() -> None:
    """Cycles are detected per chunk; a third, later target reads half from each, in turns: both receive in order."""
    first, second = ((0, 6),), ((6, 12),)
    fleet = group(
        seed("s", max_readers=0), loading("a"), loading("b"),
        reads={"a": {"s": first, "b": second}, "b": {"s": second, "a": first}},
    )  # fmt: skip
    even, odd = (tuple((chunk, chunk + 1) for chunk in range(begin, 12, 2)) for begin in (0, 1))
    assert {"a": even, "b": odd} == routes(decide(fleet, loading("t")))


def test_a_relay_with_the_missing_chunks_needs_no_source() -> None:
    """Its own source was removed, but its chunks are enough for this target."""
    fleet = group(loading("a", (0, 9)), reads={"a": {"gone": ALL}})
    assert {"a": ((6, 9),)} == routes(decide(fleet, loading("t", (0, 6), (9, 12))))


def test_a_relay_of_a_draining_seed_can_be_read_from() -> None:
    """The seed accepts no new reader, but continues to serve the relay."""
    fleet = group(seed("s", state="draining"), loading("a", (0, 1)), reads={"a": {"s": ALL}})
    assert {"a": ALL} == routes(decide(fleet, loading("t")))


def test_a_relay_without_known_weights_counts_by_its_sources() -> None:
    """Its path ends at a seed of the chosen weights."""
    fleet = group(seed("s"), loading("a"), reads={"a": {"s": ALL}})
    assert {"a": ALL} == routes(decide(fleet, loading("t")))


def test_relays_in_a_cycle_are_not_read_from() -> None:
    """A cycle left by a planner restart never makes progress."""
    fleet = group(loading("a"), loading("b"), reads={"a": {"b": ALL}, "b": {"a": ALL}})
    assert {} == routes(decide(fleet, loading("t")))


def test_another_chunk_count_is_another_layout() -> None:
    """Chunk indices of images with different chunk sizes do not match."""
    decision = decide(group(seed("s", chunk_count=6, verified=((0, 6),))), loading("t"))
    assert {} == routes(decision)
    assert f"another layout ({LAYOUT})" in decision.reason


def test_transports_are_in_the_targets_order() -> None:
    """Only shared transports are listed, in the target's order of preference."""
    source = seed("s", transports=("http", "memory", "transfer_engine"))
    target = loading("t", transports=("transfer_engine", "http"))
    assert ("transfer_engine", "http") == decide(group(source), target).assignments[0].transports


def test_the_target_is_not_its_own_source() -> None:
    """This is true even if the fleet lists it as complete with the requested weights."""
    assert {} == routes(decide(group(seed("t")), replace(loading("t"))))
