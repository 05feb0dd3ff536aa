"""Detection of targets and sources that are slower than the rest of their line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from planner.policy.group_plan import SlowReports, plan, stragglers
from planner.policy.types import ChunkShare, ForkDemand, GroupView, Source
from rfork.image.ranges import Range
from tests.unit.planner.builders import NOW, Reads, decide, group, loading, routes, seed

ALL = ((0, 12),)
FAST, SLOW = 1e9, 2.5e8
LINE: Reads = {"a": {"s": ALL}, "b": {"a": ALL}, "c": {"b": ALL}, "d": {"c": ALL}, "e": {"d": ALL}}


def member(name: str, chunks: int, rate: float | None = FAST, **changes: object) -> Source:
    """Return a target with this number of chunks that reads at this rate, and has not read faster."""
    verified = [(0, chunks)] if chunks else []
    return loading(name, *verified, **({"read_rate": rate, "ingress_rate": rate} | changes))


def replan(fleet: GroupView, name: str) -> ForkDemand:
    """Return the demand of a member for another plan."""
    current = tuple(ChunkShare(share.source_id, share.chunks) for share in fleet.shares[name])
    return ForkDemand(f"fork-{name}", fleet.sources[name], {}, current)


def line(slow: str = "", **chunks: int) -> frozenset[str]:
    """Return the stragglers of the line s-a-b-c-d-e with these numbers of chunks; `slow` have slow links."""
    members = [member(name, number, SLOW if name in slow else FAST) for name, number in chunks.items()]
    return stragglers(group(seed("s"), *members, reads=LINE), NOW)


def test_a_line_that_progresses_together_has_no_straggler() -> None:
    """Each relay is one chunk after the one before it."""
    assert frozenset() == line(a=10, b=9, c=8, d=7, e=6)


def test_a_lagging_relay_is_found() -> None:
    """It is the relay that reads slowly what its source has; those after it wait for it."""
    assert {"c"} == line(slow="cde", a=10, b=9, c=3, d=2, e=1)


def test_a_slow_relay_is_found_after_the_first_chunks() -> None:
    """One more chunk than the next at its source is enough, though the image has twelve."""
    assert {"c"} == line(slow="c", a=5, b=4, c=2, d=2, e=2)


def test_a_relay_that_lacks_only_the_next_chunk_is_no_straggler() -> None:
    """That chunk is on its way."""
    assert frozenset() == line(slow="c", a=4, b=3, c=2, d=2, e=2)


def test_the_readers_of_a_straggler_are_none() -> None:
    """They also read slowly and lack chunks that it has, but it is behind its own source."""
    assert {"b"} == line(slow="bcd", a=9, b=4, c=2, d=1, e=1)


def test_a_slow_root_is_found_by_the_progress_of_the_other_root() -> None:
    """The seed has everything from the beginning, and each root gets half of its link."""
    low, high = ((0, 6),), ((6, 12),)
    reads: Reads = {"a": {"s": low, "d": high}, "b": {"s": high, "c": low}, "c": {"a": low}, "d": {"b": high}}
    slow = member("a", 2, FAST / 4)
    fast = loading("b", (6, 11), read_rate=FAST / 2, ingress_rate=FAST / 2)
    assert {"a"} == stragglers(group(seed("s"), slow, fast, loading("c"), loading("d"), reads=reads), NOW)


def test_a_relay_that_has_read_most_of_what_its_source_has_is_no_straggler() -> None:
    """It is seven chunks behind, of twenty."""
    layout = {"chunk_count": 24}
    complete: Reads = {name: dict.fromkeys(parts, ((0, 24),)) for name, parts in LINE.items()}
    chunks = {"a": 21, "b": 20, "c": 13, "d": 12, "e": 11}
    members = [member(name, number, SLOW, **layout) for name, number in chunks.items()]
    fleet = group(seed("s", verified=((0, 24),), **layout), *members, reads=complete)
    assert frozenset() == stragglers(fleet, NOW)


def test_a_target_without_a_rate_since_its_plan_is_no_straggler() -> None:
    """A new plan may have changed its rate."""
    members = [member("a", 10), member("b", 9), member("c", 1, None), member("d", 1), member("e", 1)]
    assert frozenset() == stragglers(group(seed("s"), *members, reads=LINE), NOW)


def test_the_readers_of_a_crowded_source_are_no_stragglers() -> None:
    """Each of three readers gets a third of its link."""
    reads: Reads = {"a": {"s": ALL}, **{name: {"a": ALL} for name in "bcd"}, "e": {"b": ALL}}
    members = [member("a", 10), *(member(name, 6, 3e8) for name in "bcd"), member("e", 6)]
    assert frozenset() == stragglers(group(seed("s"), *members, reads=reads), NOW)


def test_the_last_of_a_line_is_no_straggler() -> None:
    """It delays no reader, however far it lags."""
    assert frozenset() == line(a=10, b=9, c=8, d=7, e=0)


# -- rates while chunks are read ----------------------------------------------------------------------------

TREE: Reads = {"a": {"s": ALL}, "b": {"s": ALL}, "c": {"a": ALL}, "d": {"a": ALL}, "e": {"c": ALL}, "f": {"d": ALL}}
HALF = FAST / 2


def tree(rates: Mapping[str, float | None], **changes: Mapping[str, object]) -> frozenset[str]:
    """Return the stragglers of a tree in which s has two readers, as has a; e and f read from c and d.

    `rates` are those at which each target reads from its source while that has chunks for it. All targets have two
    chunks, so that no backlog shows anything.
    """
    members = []
    for name, parts in TREE.items():
        rate = rates.get(name, HALF if name in "abcd" else FAST)
        by_source = {} if rate is None else dict.fromkeys(parts, rate)
        reads: dict[str, object] = {"read_rate": FAST, "active_rate": rate, "source_rates": by_source}
        members.append(loading(name, (0, 2), **(reads | dict(changes.get(name, {})))))
    return stragglers(group(seed("s"), *members, reads=TREE), NOW)


def test_a_tree_whose_reads_have_the_speed_of_their_shares_has_no_straggler() -> None:
    """Two readers of one source get half of its link each."""
    assert frozenset() == tree({})


def test_a_slow_reader_of_a_source_with_a_fast_reader_is_found() -> None:
    """The seed sends half of its link to the other reader, so it is not the slow one."""
    assert {"a"} == tree({"a": FAST / 8})


def test_a_slow_reader_of_a_relay_that_receives_fast_is_found() -> None:
    """The relay receives half a link: what its own source has for it."""
    assert {"c", "d"} == tree({"c": FAST / 8, "d": FAST / 8})


def test_the_readers_of_a_slow_relay_are_none() -> None:
    """Each gets half of its slow link, and it receives slowly too."""
    assert {"a"} == tree({"a": FAST / 4, "c": FAST / 8, "d": FAST / 8})


def test_a_relay_that_a_crowded_source_serves_slowly_proves_nothing() -> None:
    """It receives a quarter of a link, which is all that its source has for it, and all that a slow link carries."""
    reads: Reads = {**{name: {"s": ALL} for name in "abxy"}, "c": {"a": ALL}, "d": {"c": ALL}, "e": {"b": ALL}}
    rates = dict.fromkeys("abxy", FAST / 4) | {"c": FAST / 4, "d": FAST, "e": FAST}
    members = [
        member(name, 2, active_rate=rate, source_rates=dict.fromkeys(reads[name], rate)) for name, rate in rates.items()
    ]
    assert frozenset() == stragglers(group(seed("s", max_readers=4), *members, reads=reads), NOW)


def test_a_relay_that_has_received_nothing_yet_proves_nothing() -> None:
    """Its rate is an upper bound until its first chunk has arrived."""
    assert frozenset() == tree({"c": FAST / 8, "d": FAST / 8}, a={"verified": ()})


def test_a_target_with_one_source_that_may_be_slow_is_no_straggler() -> None:
    """It reads slowly from both, and nothing shows that the second one is fast."""
    reads: Reads = {**TREE, "c": {"a": ((0, 6),), "x": ((6, 12),)}, "x": {"y": ALL}, "g": {"c": ALL}}
    found = []
    for rate_of_x in (FAST / 8, FAST):
        rates = dict.fromkeys("abd", HALF) | dict.fromkeys("ef", FAST) | {"c": FAST / 16, "x": rate_of_x}
        members = [
            member(name, 2, active_rate=rate, source_rates=dict.fromkeys(reads[name], rate))
            for name, rate in rates.items()
        ]
        found.append(stragglers(group(seed("s"), seed("y"), *members, loading("g"), reads=reads), NOW))
    assert [frozenset(), {"c"}] == found


def test_a_target_that_reads_fast_from_all_sources_together_is_no_straggler() -> None:
    """Its own link limits the rate from each."""
    reads: Reads = {**TREE, "e": {"c": ((0, 6),), "d": ((6, 12),)}}
    members = [member(name, 2, active_rate=HALF, source_rates=dict.fromkeys(reads[name], HALF)) for name in "abcdf"]
    both = member("e", 2, active_rate=HALF, source_rates={"c": FAST / 4, "d": FAST / 4})
    assert frozenset() == stragglers(
        group(seed("s"), *members, both, loading("g"), reads={**reads, "g": {"e": ALL}}), NOW
    )


def test_the_readers_of_a_source_with_a_lower_limit_are_no_stragglers() -> None:
    """They read as fast as it may send, and it receives at the speed of a link."""
    assert frozenset() == tree({"c": FAST / 8, "d": FAST / 8}, a={"egress_rate": FAST / 4})


def test_a_backlog_of_a_target_that_reads_fast_shows_nothing() -> None:
    """Its source offered the chunks together, and it reads them at the speed of a link."""
    chunks = {"a": 10, "b": 9, "c": 3, "d": 2, "e": 1}
    for active, expected in ((FAST, frozenset()), (SLOW, {"c"})):
        members = [
            member(name, number, SLOW, active_rate=rate, source_rates=dict.fromkeys(LINE[name], rate))
            for name, number in chunks.items()
            for rate in [active if name == "c" else FAST]
        ]
        assert expected == stragglers(group(seed("s"), *members, reads=LINE), NOW)


def test_a_target_that_reads_slowly_has_to_report_after_its_plan() -> None:
    """The rate at which it read from its previous sources shows nothing about the next ones."""
    assert frozenset() == tree({"a": FAST / 8}, a={"read_rate": None})


def test_a_slow_relay_proves_nothing_about_its_readers() -> None:
    """It is known to be slow, though it receives at half the speed of a link for a moment."""
    relay = {"slow": True, "active_rate": HALF, "source_rates": {"s": SLOW}}
    assert frozenset() == tree({"c": FAST / 8, "d": FAST / 8}, a=relay)


def test_unknown_rates_show_nothing() -> None:
    """A target that reads within its host reports none."""
    assert frozenset() == tree(dict.fromkeys("abcdef"))


def test_expired_and_complete_targets_do_not_count() -> None:
    """Neither is a straggler."""
    members = [loading("a", (0, 12)), loading("b", (0, 1), expires_at=NOW), loading("c")]
    reads: Reads = {"a": {"s": ALL}, "b": {"a": ALL}, "c": {"b": ALL}}
    assert frozenset() == stragglers(group(seed("s"), *members, reads=reads), NOW)


def test_an_empty_group_has_no_stragglers() -> None:
    """There are no forks."""
    assert frozenset() == stragglers(group(seed("s")), NOW)


def test_a_slow_source_is_left_and_chosen_last() -> None:
    """Its reader moves to the busier seed; without another source the slow one is used."""
    reads: Reads = {"a": {"s": ALL}, "t": {"a": ALL}}
    slow = loading("a", (0, 3), slow=True)
    both = [
        decide(group(seed("s", max_readers=max_readers), slow, reads=reads), loading("t")) for max_readers in (2, 1)
    ]
    assert [{"s": ALL}, {"a": ALL}] == [routes(each) for each in both]


def test_a_slow_target_yields_its_sources() -> None:
    """It moves below another slow target that has more, and its reader takes its position."""
    reads: Reads = {"a": {"s": ALL}, "b": {"a": ALL}, "c": {"b": ALL}, "x": {"a": ALL}}
    members = [
        member("a", 10), member("b", 3, SLOW, slow=True), member("c", 3), member("x", 4, SLOW, slow=True),
    ]  # fmt: skip
    fleet = group(seed("s", max_readers=1), *members, reads=reads)
    demands = [
        ForkDemand(f"fork-{name}", fleet.sources[name], {}, (ChunkShare(*next(iter(reads[name].items()))),))
        for name in "bc"
    ]
    decisions = plan(fleet, demands, NOW)
    assert {"x": ((3, 12),)} == routes(decisions["fork-b"])
    assert {"a": ((3, 12),)} == routes(decisions["fork-c"])


def test_a_single_slow_target_moves_to_spare_egress() -> None:
    """Without another slow target it reads from a source that has egress to spare."""
    reads: Reads = {"a": {"s": ALL}, "b": {"a": ALL}, "c": {"b": ALL}, "e": {"a": ALL}}
    members = [member("a", 10, max_readers=4), member("b", 3, SLOW, slow=True), member("c", 3), member("e", 9)]
    fleet = group(seed("s"), *members, reads=reads)
    assert {"e": ((3, 12),)} == routes(decide(fleet, fleet.sources["b"]))


def test_a_slow_target_moves_once() -> None:
    """It keeps the slow source that it moved to."""
    reads: Reads = {"a": {"s": ALL}, "x": {"a": ALL}, "b": {"x": ALL}}
    members = [member("a", 10), member("x", 4, SLOW, slow=True), member("b", 3, SLOW, slow=True), member("e", 9)]
    fleet = group(seed("s"), *members, reads={**reads, "e": {"a": ALL}})
    assert {"x": ((3, 12),)} == routes(decide(fleet, fleet.sources["b"]))


def test_a_slow_root_leaves_the_seed_to_its_readers() -> None:
    """All others received its half through it, so they are planned before it, and it moves behind one of them."""
    low, high = ((0, 6),), ((6, 12),)
    reads: Reads = {"a": {"s": low}, "b": {"s": high}, "c": {"a": low, "b": high}, "d": {"b": high, "c": low}}
    members = [member("a", 2, SLOW, slow=True), loading("b", (6, 11)), member("c", 1), member("d", 1)]
    fleet = group(seed("s"), *members, reads=reads)
    demands = [replan(fleet, name) for name in "ac"]
    decisions = plan(fleet, demands, NOW)
    assert {"s": ((1, 6),), "b": ((6, 12),)} == routes(decisions["fork-c"])
    assert "s" not in routes(decisions["fork-a"])


def test_each_lost_source_is_replaced_by_another() -> None:
    """Chunks of both halves in one queue would delay the readers of the second one."""
    low, high = ((0, 6),), ((6, 12),)
    reads: Reads = {"a": {"s": low}, "b": {"s": high}, "c": {"a": low, "b": high}}
    members = [loading(name, slow=True) for name in "ab"] + [loading("c")]
    seeds = [seed(name, max_readers=4) for name in "xy"]
    fleet = group(seed("s"), *seeds, *members, reads={**reads, **{f"{name}0": {name: low} for name in "xy"}})
    assert {"x": low, "y": high} == routes(plan(fleet, [replan(fleet, "c")], NOW)["fork-c"])


def test_a_target_that_lost_its_source_moves_near_the_seed() -> None:
    """Of two relays with as many readers it chooses the one that receives its chunks over fewer links."""
    reads: Reads = {"a": {"s": ALL}, "b": {"a": ALL}, "c": {"b": ALL}, "d": {"x": ALL}, "x": {"a": ALL}}
    members = [member("a", 6, max_readers=2), member("b", 5), member("c", 4), member("x", 2, slow=True), member("d", 1)]
    fleet = group(seed("s", max_readers=1), *members, reads=reads)
    assert {"c": ((1, 12),)} == routes(plan(fleet, [replan(fleet, "d")], NOW)["fork-d"])


def test_a_lost_source_is_replaced_by_one_with_spare_egress() -> None:
    """The source that the target keeps has everything, but no egress to spare; relays that have one chunk, and will
    receive no other, hide none that can serve all.
    """
    low, high, first = ((0, 6),), ((6, 12),), ((0, 1),)
    partial = [f"p{index}" for index in range(9)]
    reads: dict[str, dict[str, tuple[Range, ...]]] = {
        **{name: {"s": ALL} for name in ("keeps", "above", "x")}, "below": {"above": ALL},
        "t": {"x": low, "keeps": high}, "r0": {"keeps": low}, "r1": {"above": low}, "r2": {"below": low},
        **{f"r-{name}": {name: low} for name in partial},
    }  # fmt: skip
    members = [
        loading("keeps", (0, 3), max_readers=4), loading("above", (0, 3), max_readers=2), loading("below", (0, 2)),
        loading("x", slow=True), loading("t"), *(loading(name, *first) for name in partial),
    ]  # fmt: skip
    fleet = group(seed("s", max_readers=3), *members, reads=reads)
    assert {"below": low, "keeps": high} == routes(plan(fleet, [replan(fleet, "t")], NOW)["fork-t"])


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([{"a": 1.0}], []),
        ([{"a": 1.0}, {"a": 1.0}], []),
        ([{"a": 1.0}, {"a": 2.0}], ["a"]),
        ([{"a": 1.0}, {}, {"a": 3.0}], []),
        ([{"a": 1.0}, {"a": 2.0, "b": 2.0}], ["a"]),
        ([{"a": 1.0}, {"a": 2.0}, {"a": 2.0}], ["a"]),
    ],
    ids=["one report", "the same report", "two reports", "interrupted", "another is new", "still slow"],
)
def test_two_reports_in_a_row_show_a_slow_target(
    reports: Sequence[Mapping[str, float]], expected: Sequence[str]
) -> None:
    """Each step has the suspects, with the times of their last reports."""
    slow = SlowReports()
    assert expected == [slow.confirmed(suspects) for suspects in reports][-1]
