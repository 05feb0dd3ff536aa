from __future__ import annotations

from dataclasses import replace

import pytest

from planner.policy_types import ChunkShare, GroupView, HostLocation, Source, distance
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
    """Who reads what from whom after targets arrived one after another, each planned at once."""
    reads: dict[str, dict[str, tuple[Range, ...]]] = {}
    sources = list(fleet.sources.values())
    for name in names:
        sources.append(loading(name))
        reads[name] = routes(decide(group(*sources, reads=reads), loading(name)))
    return reads


def test_targets_that_arrive_one_by_one_form_a_chain_behind_one_seed() -> None:
    """Each target reads from the one before it, and the seed gives to one reader only."""
    expected = {"a": {"s": ALL}, "b": {"a": ALL}, "c": {"b": ALL}, "d": {"c": ALL}}
    assert expected == arrive(group(seed("s")), "a", "b", "c", "d")


def test_a_late_joiner_reads_from_finished_instances_that_are_idle() -> None:
    """Once the chain is complete its members are idle seeds, and a newcomer stripes over them."""
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
    ids=["held", "one held", "one held beside who knows what", "slower than both"],
)
def test_who_may_give_less_gives_a_smaller_part(
    rates: tuple[float | None, float], reads_at: float | None, first: int
) -> None:
    """Both end at the same time: by their egress rates, as far as the target's own link lets it notice."""
    fleet = group(*(seed(name, egress_rate=rate) for name, rate in zip("ab", rates, strict=True)))
    expected = {"a": ((0, first),), "b": ((first, 12),)}
    assert expected == routes(decide(fleet, loading("t", ingress_rate=reads_at)))


def test_shares_are_contiguous_among_what_is_missing() -> None:
    """Stripes run over the missing chunks only, and differ by one chunk at most."""
    target = loading("t", (2, 4), (7, 8))
    expected = {"s1": ((0, 2), (4, 7)), "s2": ((8, 12),)}
    assert expected == routes(decide(group(seed("s1"), seed("s2")), target))


def test_no_more_seeds_than_missing_chunks() -> None:
    """One missing chunk is read from one seed."""
    decision = decide(group(seed("s1"), seed("s2")), loading("t", (0, 11)))
    assert ({"s1": ((11, 12),)}, "from seed s1 (0 other readers)") == (routes(decision), decision.reason)


def test_a_far_seed_does_not_join_the_stripe_of_near_ones() -> None:
    """Only seeds equally near share the work."""
    near = {"place": HostLocation("host-t")}
    fleet = group(seed("s1", **near), seed("s2", **near), seed("far"))
    target = loading("t", **near)
    assert {"s1": ((0, 6),), "s2": ((6, 12),)} == routes(decide(fleet, target))


def test_a_dead_relays_child_is_given_the_relays_parent() -> None:
    """When A of seed-A-B-C dies, B goes back to the seed and C stays on B."""
    fleet = group(
        seed("s"), loading("a", (0, 5)), loading("b", (0, 4)), loading("c", (0, 3)),
        reads={"a": {"s": ALL}, "b": {"a": ALL}, "c": {"b": ALL}},
    )  # fmt: skip
    decision = decide(fleet, loading("b", (0, 4)), a="SourceUnavailable")
    assert {"s": ((4, 12),)} == routes(decision)


def test_a_plan_asked_for_again_stays_as_it_is() -> None:
    """A fork that reports no fault keeps its source though another has become idle."""
    fleet = group(seed("s1"), seed("s2"), loading("t", (0, 2)), reads={"t": {"s2": ALL}, "x": {"s2": ALL}})
    assert {"s2": ((2, 12),)} == routes(decide(fleet, loading("t", (0, 2))))


def test_the_relay_that_is_furthest_is_the_better_tail() -> None:
    """Of two idle relays the one with more chunks is read from."""
    half = ((6, 12),)
    fleet = group(
        seed("s", max_readers=2), loading("a", (0, 3)), loading("b", (0, 7)),
        reads={"a": {"s": half}, "b": {"s": half}, "x": {"s": ALL}},
    )  # fmt: skip
    fleet = replace(fleet, shares=dict(fleet.shares) | {"a": (ChunkShare("s", ALL),), "b": (ChunkShare("s", ALL),)})
    decision = decide(fleet, loading("t"))
    assert ({"b": ALL}, "behind relay b (7 of 12 chunks, 0 other readers)") == (
        routes(decision),
        decision.reason,
    )


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
def test_distance(placement: HostLocation, expected: int) -> None:
    """Host before rack before zone; a rack's name counts within its zone only."""
    assert expected == distance(HostLocation("h1", "r1", "z1"), placement)


def test_nearer_wins_among_equally_busy_sources() -> None:
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
    (loading("s"), "s has 0 of 12 chunks and reads from nobody"),
]


@pytest.mark.parametrize(("source", "expected"), UNFIT)
def test_a_source_that_cannot_give_is_named_with_the_reason(source: Source, expected: str) -> None:
    """No routes, and the reason in words."""
    decision = decide(group(source), loading("t"))
    assert ({}, f"no source of 1 can be read from: {expected}") == (routes(decision), decision.reason)


def test_two_seeds_at_capacity_are_both_named() -> None:
    """Capacity full everywhere is no plan, not a plan over capacity."""
    fleet = group(seed("s1", max_readers=1), seed("s2", max_readers=1), reads={"x": {"s1": ALL}, "y": {"s2": ALL}})
    reason = "no source of 2 can be read from: s1 at capacity (1 of 1 readers); s2 at capacity (1 of 1 readers)"
    assert reason == decide(fleet, loading("t")).reason


def test_only_a_full_source_is_worth_waiting_for() -> None:
    """A reader's slot comes free by itself; a draining seed does not come back."""
    fleets = [group(seed("s", max_readers=0)), group(seed("s", state="draining")), group()]
    assert [True, False, False] == [decide(fleet, loading("t")).no_free_slot for fleet in fleets]


def test_where_only_other_layouts_exist_one_is_named_to_compare_with() -> None:
    """The complete instance stands for the others; where the layout fits, nobody has to."""
    others = group(loading("a", layout_id=OTHER_LAYOUT), seed("z", layout_id=OTHER_LAYOUT))
    fleets = [others, group(seed("s")), group()]
    assert ["z", None, None] == [decide(fleet, loading("t")).mismatched_source for fleet in fleets]


def test_a_long_list_of_refusals_is_cut() -> None:
    """A reason names eight instances at most."""
    fleet = group(*(seed(f"s{index:02}", state="draining") for index in range(11)))
    assert decide(fleet, loading("t")).reason.endswith("s07 draining; and 3 more")


def test_a_source_blamed_by_this_fork_is_not_given_again() -> None:
    """The fork goes to the other seed."""
    assert {"s2": ALL} == routes(decide(group(seed("s1"), seed("s2")), loading("t"), s1="SourceTimeout"))


NO_SOURCE = [
    (group(), "no instance holds model m"),
    (group(other_ranks=("r2", "r3")), "no instance holds model m at rank r; other ranks are held: r2, r3"),
    (
        replace(group(other_ranks=("r2",)), version=f"files:{'3' * 32}", other_versions={"v1": 4, "v2": 1}),
        "first of version files:33333333 of model m; 4 instances serve v1, 1 instance serves v2",
    ),
    (
        replace(group(), version="unnamed:x", other_versions={"v1": 1}),
        "no version of model m can be taken over; 1 instance serves v1",
    ),
    (group(seed("s", expires_at=NOW)), "no instance holds model m"),
    (
        group(seed("s", layout_id=OTHER_LAYOUT)),
        f"1 instance holds model m at rank r with another layout ({OTHER_LAYOUT}): "
        "layout differs from instance s at s:1",
    ),
    (
        group(loading("a", layout_id="c" * 32), seed("z", layout_id=OTHER_LAYOUT)),
        f"2 instances hold model m at rank r with another layout ({OTHER_LAYOUT}, {'c' * 32}): "
        "layout differs from instance z at z:1",
    ),
]


@pytest.mark.parametrize(("fleet", "expected"), NO_SOURCE)
def test_where_nobody_holds_the_layout_the_reason_says_what_there_is(fleet: GroupView, expected: str) -> None:
    """Model, rank and layout are told apart, and a differing layout names whom to compare with."""
    assert expected == decide(fleet, loading("t")).reason


def test_the_first_of_a_version_is_told_which_versions_are_served() -> None:
    """Also where other ranks of its own replica are known already."""
    fleet = replace(group(other_ranks=("r2",)), version="v2", other_versions={"v1": 4})
    reason = decide(fleet, loading("t")).reason
    assert "first of version v2 of model m; 4 instances serve v1" == reason
    assert is_first(f"NoSource: {reason}")
    assert not is_first(f"NoSource: {decide(group(), loading('t')).reason}")


def test_a_refusal_tells_of_other_layouts_too() -> None:
    """The operator sees both: one that fits but drains, and one that does not fit."""
    fleet = group(seed("s1", state="draining"), seed("s2", layout_id=OTHER_LAYOUT))
    expected = (
        "no source of 1 can be read from: s1 draining; 1 instance holds this model and rank with another "
        f"layout ({OTHER_LAYOUT}): layout differs from instance s2 at s2:1"
    )
    assert expected == decide(fleet, loading("t")).reason


def test_the_weights_that_most_seeds_hold_are_chosen() -> None:
    """Two against one; the odd one is not mixed in."""
    fleet = group(seed("n", weights_id=OTHER_WEIGHTS, generation=9), seed("s1"), seed("s2"))
    decision = decide(fleet, loading("t"))
    assert (WEIGHTS, {"s1", "s2"}) == (decision.weights_id, set(routes(decision)))


def test_of_weights_held_equally_often_the_newest_generation_is_chosen() -> None:
    """One against one: the higher generation."""
    fleet = group(seed("n", weights_id=OTHER_WEIGHTS, generation=1), seed("s"))
    decision = decide(fleet, loading("t"))
    assert (OTHER_WEIGHTS, {"n"}) == (decision.weights_id, set(routes(decision)))


def test_verified_chunks_pin_the_weights() -> None:
    """A fork that has begun goes on with the weights that it began with, though more seeds hold others."""
    fleet = group(seed("n1", weights_id=OTHER_WEIGHTS), seed("n2", weights_id=OTHER_WEIGHTS), seed("s"))
    assert {"s": ((3, 12),)} == routes(decide(fleet, loading("t", (0, 3))))


def test_pinned_weights_that_nobody_holds_any_more_give_no_routes() -> None:
    """The reason names the other weights."""
    decision = decide(group(seed("n", weights_id=OTHER_WEIGHTS)), loading("t", (0, 3)))
    expected = f"no source of 1 can be read from: n holds other weights ({OTHER_WEIGHTS})"
    assert ({}, expected) == (routes(decision), decision.reason)


def test_chunks_of_weights_without_a_name_are_read_again() -> None:
    """Without a weights_id, verified chunks may be those of other weights: all is assigned."""
    assert {"s": ALL} == routes(decide(group(seed("s")), loading("t", (0, 3), weights_id=None)))


def test_nothing_missing_needs_no_routes() -> None:
    """A target that has everything is told so."""
    decision = decide(group(seed("s")), loading("t", (0, 12)))
    assert ({}, "every chunk is verified already") == (routes(decision), decision.reason)


UNFED = [
    ({"a": {"t": ALL}}, "a has 0 of 12 chunks and waits for the target itself"),
    ({"a": {"b": ALL}, "b": {"t": ALL}}, "a has 0 of 12 chunks and waits for the target itself"),
    ({"a": {"dead": ALL}}, "a has 0 of 12 chunks and its own source dead is gone"),
    ({"a": {"ghost": ALL}}, "a has 0 of 12 chunks and its own source ghost is gone"),
    ({"a": {"b": ALL}}, "a has 0 of 12 chunks and waits for the target itself, or for one"),
]


@pytest.mark.parametrize(("reads", "expected"), UNFED)
def test_a_relay_that_will_never_have_anything_is_not_read_from(reads: Reads, expected: str) -> None:
    """A relay counts only with an unbroken line to who has the chunks, and not through the target."""
    fleet = group(
        loading("a"), loading("b"), loading("t"), seed("dead", expires_at=NOW), seed("s", state="draining"),
        reads=reads,
    )  # fmt: skip
    decision = decide(fleet, loading("t"))
    assert {} == routes(decision)
    assert expected in decision.reason


def test_survivors_that_hold_all_chunks_only_between_them_are_combined() -> None:
    """The seed is gone; each of three relays gives what the ones with less cannot."""
    fleet = group(loading("a", (0, 5)), loading("b", (3, 9)), loading("c", (8, 12)))
    expected = {"a": ((2, 5),), "b": ((5, 8),), "c": ((8, 12),)}
    assert expected == routes(decide(fleet, loading("t", (0, 2))))


def test_what_nobody_can_give_yet_is_asked_for_again_soon() -> None:
    """Part of the chunks have a source: the plan takes these, and says that asking again is worth it."""
    decision = decide(group(loading("a", (0, 5))), loading("t"))
    assert ({"a": ((0, 5),)}, True) == (routes(decision), decision.no_free_slot)


def test_two_relays_may_read_different_chunks_from_one_another() -> None:
    """Circles are told apart by chunk; a third, coming late, takes a half from each."""
    first, second = ((0, 6),), ((6, 12),)
    fleet = group(
        seed("s", max_readers=0), loading("a"), loading("b"),
        reads={"a": {"s": first, "b": second}, "b": {"s": second, "a": first}},
    )  # fmt: skip
    assert {"a": first, "b": second} == routes(decide(fleet, loading("t")))


def test_a_relay_with_all_that_is_missing_is_read_from_though_its_own_source_died() -> None:
    """What it holds is enough for this target."""
    fleet = group(loading("a", (0, 9)), reads={"a": {"gone": ALL}})
    assert {"a": ((6, 9),)} == routes(decide(fleet, loading("t", (0, 6), (9, 12))))


def test_a_relay_behind_a_draining_seed_can_be_joined() -> None:
    """The seed takes no new reader itself, but goes on giving to the relay."""
    fleet = group(seed("s", state="draining"), loading("a", (0, 1)), reads={"a": {"s": ALL}})
    assert {"a": ALL} == routes(decide(fleet, loading("t")))


def test_a_relay_that_has_not_learnt_its_weights_is_joined_by_its_sources() -> None:
    """Its line ends in a seed of the chosen weights."""
    fleet = group(seed("s"), loading("a"), reads={"a": {"s": ALL}})
    assert {"a": ALL} == routes(decide(fleet, loading("t")))


def test_relays_that_read_from_one_another_are_not_read_from() -> None:
    """A circle, left by a planner that restarted, waits for ever: nobody may join it."""
    fleet = group(loading("a"), loading("b"), reads={"a": {"b": ALL}, "b": {"a": ALL}})
    assert {} == routes(decide(fleet, loading("t")))


def test_another_chunk_count_is_another_layout() -> None:
    """Chunk indices of images that are cut differently do not mean the same bytes."""
    decision = decide(group(seed("s", chunk_count=6, verified=((0, 6),))), loading("t"))
    assert ({}, True) == (routes(decision), f"another layout ({LAYOUT})" in decision.reason)


def test_transports_come_in_the_targets_order() -> None:
    """Only what both offer, the target's best first."""
    source = seed("s", transports=("http", "memory", "transfer_engine"))
    target = loading("t", transports=("transfer_engine", "http"))
    assert ("transfer_engine", "http") == decide(group(source), target).assignments[0].transports


def test_the_target_is_not_its_own_source() -> None:
    """Not even where the fleet lists it as complete under the weights in question."""
    assert {} == routes(decide(group(seed("t")), replace(loading("t"))))
