"""Background forks: a holder's prefetch never delays the fork of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from planner.policy.background import free_slots, is_waiting, reserved_slots, targets_waited_for
from planner.policy.group_plan import plan, stragglers
from planner.policy.types import ChunkShare, GroupView, HostLocation, PlanDecision, Source
from rfork.image.ranges import Range
from tests.unit.planner.builders import (
    CHECKPOINT,
    CHUNKS,
    NOW,
    Reads,
    apply_decisions,
    decide,
    demand,
    group,
    loading,
    routes,
    seed,
)

ALL = ((0, CHUNKS),)
REST = ((4, CHUNKS),)
FOUR = (0, 4)
TRANSPORTS = ("shared_memory", "http")


def holder_image(name: str, *verified: Range, **changes: object) -> Source:
    """Return a holder's image that is being fetched."""
    return loading(name, *verified, holder=f"holder-of-{name}", transports=TRANSPORTS, **changes)


def engine(name: str, *verified: Range, **changes: object) -> Source:
    """Return an engine's target."""
    return loading(name, *verified, transports=TRANSPORTS, **changes)


def host_of(other: str) -> HostLocation:
    """Return the location of another instance."""
    return HostLocation(f"host-{other}")


def together(fleet: GroupView, *targets: Source) -> tuple[GroupView, dict[str, PlanDecision]]:
    """Return the fleet after these targets were planned in one call, and their plans by target."""
    demands = [demand(target, *fleet.shares.get(target.instance_id, ())) for target in targets]
    decisions = plan(fleet, demands, NOW)
    after = apply_decisions(fleet, demands, decisions)
    return after, {target.instance_id: decisions[f"fork-{target.instance_id}"] for target in targets}


# -- priority inheritance -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        ({"h": {"s": ALL}}, set()),
        ({"h": {"s": ALL}, "e": {"h": ALL}}, {"h"}),
        ({"h": {"s": ALL}, "g": {"h": ALL}, "e": {"g": ALL}}, {"h", "g"}),
        ({"h": {"s": ALL}, "g": {"h": ALL}}, set()),
        ({"h": {"s": REST}, "e": {"h": (FOUR,), "s": REST}}, set()),
        ({"h": {"s": ALL}, "e": {"s": ALL}}, set()),
        ({"h": {"g": ALL}, "g": {"h": ALL}, "e": {"g": ALL}}, {"h", "g"}),
    ],
    ids=["alone", "read", "through a relay", "by a prefetch", "only what it has", "same source", "ring"],
)
def test_engines_wait_for_the_targets_that_they_read_missing_chunks_from(reads: Reads, expected: set[str]) -> None:
    """Directly, or through other holders' images."""
    fleet = group(seed("s"), holder_image("h", FOUR), holder_image("g"), engine("e"), reads=reads)
    assert expected == targets_waited_for(fleet.shares, fleet.sources.get, lambda name: fleet.shares.get(name, ()))


@pytest.mark.parametrize(
    ("target", "shares", "expected"),
    [
        (engine("e"), (), True),
        (engine("e"), (ChunkShare("s", REST),), True),
        (engine("e", FOUR), (ChunkShare("s", REST),), False),
        (holder_image("h"), (), False),
    ],
)
def test_an_engine_waits_while_chunks_have_no_source(
    target: Source, shares: tuple[ChunkShare, ...], expected: bool
) -> None:
    """A holder waits for nothing that matters."""
    assert expected == is_waiting(target, shares)


@pytest.mark.parametrize(
    ("source", "same_host", "engine_waits", "expected"),
    [
        (seed("s", max_readers=2), False, False, 1),
        (seed("s", max_readers=1), False, False, 0),
        (seed("s", max_readers=1), True, False, 0),
        (seed("s", max_readers=1), False, True, 1),
        (holder_image("h", max_readers=2), False, False, 0),
        (holder_image("h", max_readers=2), False, True, 1),
        (holder_image("h", max_readers=2), True, False, 1),
        (holder_image("h", max_readers=3), False, False, 1),
    ],
)
def test_slots_left_to_engines(source: Source, same_host: bool, engine_waits: bool, expected: int) -> None:
    """The only slot of an engine is used until another waits; another holder's fork never uses a host's own slot."""
    assert expected == reserved_slots(source, same_host=same_host, engine_waits=engine_waits)


@pytest.mark.parametrize(
    ("source", "readers", "same_host", "has_own_engine", "expected"),
    [
        (seed("s", max_readers=2), 0, False, False, 2),
        (seed("s", max_readers=2), 2, True, False, 0),
        (holder_image("h", max_readers=2), 0, False, False, 1),
        (holder_image("h", max_readers=2), 1, False, False, 0),
        (holder_image("h", max_readers=2), 1, True, False, 1),
        (holder_image("h", max_readers=2), 1, False, True, 1),
        (holder_image("h", max_readers=2), 2, True, True, 0),
        (holder_image("h", max_readers=0), 0, False, False, 0),
    ],
)
def test_one_slot_of_a_holders_image_is_for_its_host(
    source: Source, readers: int, same_host: bool, has_own_engine: bool, expected: int
) -> None:
    """An engine there reads what its host receives anyway."""
    assert expected == free_slots(source, readers, same_host=same_host, has_own_engine=has_own_engine)


# -- sources of a background fork -----------------------------------------------------------------------


def test_a_prefetch_reads_from_an_idle_seed() -> None:
    """Nothing else needs it."""
    assert {"s": ALL} == routes(decide(group(seed("s"), holder_image("h")), holder_image("h")))


def test_a_prefetch_pauses_while_an_engine_reads_from_its_source() -> None:
    """It has no other source: the engine accepts no readers."""
    reads = {"h": {"s": ALL}, "e": {"s": ALL}}
    decision = decide(
        group(seed("s"), holder_image("h"), engine("e", max_readers=0), reads=reads), holder_image("h", FOUR)
    )
    assert decision.is_paused
    assert {} == routes(decision)
    assert decision.no_free_slot


def test_a_prefetch_prefers_an_idle_seed_to_a_pause() -> None:
    """The other seed serves no engine."""
    reads = {"h": {"s": ALL}, "e": {"s": ALL}}
    fleet = group(seed("s"), seed("other"), holder_image("h"), engine("e", max_readers=0), reads=reads)
    assert {"other": ALL} == routes(decide(fleet, holder_image("h")))


def test_a_prefetch_continues_below_the_engine() -> None:
    """An engine's link sends nothing while it receives."""
    reads = {"h": {"s": ALL}, "e": {"s": ALL}}
    fleet = group(seed("s"), holder_image("h", FOUR), engine("e"), reads=reads)
    assert {"e": REST} == routes(decide(fleet, holder_image("h", FOUR)))


def test_a_prefetch_pauses_while_its_host_receives_for_an_engine() -> None:
    """Also if that engine's fork is of another model."""
    fleet = replace(group(seed("s"), holder_image("h")), receiving_hosts={"host-h"})
    assert decide(fleet, holder_image("h")).is_paused


def test_a_prefetch_pauses_while_the_sources_host_sends_to_an_engine() -> None:
    """Also if that engine reads from another instance there."""
    fleet = replace(group(seed("s"), holder_image("h")), sending_hosts={"host-s"})
    assert decide(fleet, holder_image("h")).is_paused


def test_a_read_within_the_host_is_not_limited() -> None:
    """The engine on the holder's host relays to it what it receives."""
    reads = {"e": {"s": ALL}}
    fleet = group(seed("s"), holder_image("h"), engine("e", FOUR, location=host_of("h")), reads=reads)
    fleet = replace(fleet, receiving_hosts={"host-h"}, sending_hosts={"host-s"})
    assert {"e": ALL} == routes(decide(fleet, holder_image("h")))


def test_a_prefetch_that_an_engine_waits_for_keeps_its_source() -> None:
    """It counts as that engine's fork, even if others use the link."""
    reads = {"h": {"s": ALL}, "e": {"h": ALL}, "other": {"s": ALL}}
    fleet = group(seed("s"), holder_image("h", FOUR), engine("e"), engine("other"), reads=reads)
    fleet = replace(fleet, receiving_hosts={"host-h"}, sending_hosts={"host-s"})
    assert {"s": REST} == routes(decide(fleet, holder_image("h", FOUR)))


@pytest.mark.parametrize(
    ("reads", "max_readers", "is_paused"),
    [
        ({}, 2, False),
        ({}, 1, False),
        ({"g": {"s": ALL}}, 2, True),
        ({"e": {}}, 1, True),
        ({"e": {}}, 2, False),
    ],
    ids=["one of two", "the only one", "the last of two", "the only one, an engine waits", "an engine waits"],
)
def test_a_prefetch_leaves_a_slot_to_engines(reads: Reads, max_readers: int, is_paused: bool) -> None:
    """The only slot is used until an engine waits."""
    fleet = group(seed("s", max_readers=max_readers), holder_image("h"), holder_image("g"), engine("e"), reads=reads)
    fleet = replace(fleet, candidates=("s",))
    assert is_paused == decide(fleet, holder_image("h")).is_paused


def test_a_prefetch_without_any_source_is_not_paused() -> None:
    """Then its fallbacks are next."""
    assert not decide(group(holder_image("h")), holder_image("h")).is_paused


def test_a_paused_prefetch_does_not_accept_other_weights() -> None:
    """A seed of the preferred weights is only busy."""
    busy = [seed(name) for name in ("s1", "s2")]
    fleet = group(*busy, seed("s3", weights_id="2" * 32), holder_image("h"))
    fleet = replace(fleet, sending_hosts={"host-s1", "host-s2"})
    assert decide(fleet, holder_image("h")).is_paused


@pytest.mark.parametrize(("engine_storage", "is_paused"), [((CHECKPOINT,), True), ((), False)])
def test_storage_is_left_to_engines_that_have_some(engine_storage: tuple[object, ...], is_paused: bool) -> None:
    """Without storage of its own, an engine waits for the holder, which is then no prefetch any more."""
    target = holder_image("h", storage=(CHECKPOINT,))
    fleet = group(target, engine("e", storage=engine_storage), reads={"e": {}})
    decision = decide(fleet, target)
    assert is_paused == decision.is_paused
    assert ({} if is_paused else {"checkpoint": ALL}) == routes(decision)


@pytest.mark.parametrize("number", [2, 5])
def test_holders_that_arrive_one_by_one_form_a_chain(number: int) -> None:
    """The seed has one reader."""
    fleet = group(seed("s"))
    sources = []
    for index in range(number):
        fleet, decisions = together(fleet, holder_image(f"h{index}"))
        sources.append(routes(decisions[f"h{index}"]))
    assert [{"s": ALL}, *({f"h{index}": ALL} for index in range(number - 1))] == sources


def test_holders_that_arrive_together_share_one_plan() -> None:
    """As engines do: no more than two read from the seed."""
    fleet, _ = together(
        group(seed("s", max_readers=8)), *(holder_image(f"h{index}", max_readers=8) for index in range(8))
    )
    assert len(fleet.readers["s"]) <= 2


# -- forks of engines with background forks ------------------------------------------------------------


def test_an_engine_ignores_the_load_of_a_prefetch() -> None:
    """The seed is as good as idle, as the prefetch will yield."""
    fleet = group(seed("s"), holder_image("h", FOUR), engine("e"), reads={"h": {"s": ALL}})
    assert {"s": ALL} == routes(decide(fleet, engine("e")))


def test_an_engine_counts_the_load_of_a_prefetch_that_others_wait_for() -> None:
    """It reads below them."""
    reads = {"h": {"s": ALL}, "other": {"h": ALL}}
    fleet = group(seed("s"), holder_image("h"), engine("other"), engine("e"), reads=reads)
    assert {"other": ALL} == routes(decide(fleet, engine("e")))


def test_engines_are_planned_before_prefetches() -> None:
    """Those planned in one call, too."""
    _, decisions = together(group(seed("s")), holder_image("a"), engine("e"))
    assert {"s": ALL} == routes(decisions["e"])
    assert {"e": ALL} == routes(decisions["a"])


def test_an_engine_reads_from_the_relay_on_its_host() -> None:
    """Its host then receives each chunk once."""
    fleet = group(seed("s"), holder_image("h", FOUR), reads={"h": {"s": ALL}})
    after, decisions = together(fleet, engine("e", location=host_of("h")))
    assert {"h": ALL} == routes(decisions["e"])
    assert {"s": REST} == routes(decide(after, holder_image("h", FOUR)))


def test_an_engine_reads_from_a_paused_relay_only_what_it_has() -> None:
    """So it never waits for it; the relay receives the rest from the engine."""
    fleet = group(seed("s"), holder_image("h", FOUR), reads={"h": {}})
    after, decisions = together(fleet, engine("e", location=host_of("h")))
    assert {"h": (FOUR,), "s": REST} == routes(decisions["e"])
    assert {"e": REST} == routes(decide(after, holder_image("h", FOUR)))


def test_an_engine_does_not_rely_on_a_relay_that_is_about_to_pause() -> None:
    """Another engine uses the relay's source, which is below it now."""
    reads = {"h": {"s": ALL}, "other": {"s": ALL}}
    fleet = group(seed("s"), holder_image("h", FOUR), engine("other"), reads=reads)
    assert {"h": (FOUR,), "other": REST} == routes(decide(fleet, engine("e", location=host_of("h"))))


def test_a_relay_and_an_engine_on_one_host_share_its_link() -> None:
    """An engine elsewhere that would read from the relay reads below its reader."""
    reads = {"e": {"h": ALL}, "below": {"e": ALL}}
    fleet = group(holder_image("h", *ALL), engine("e", location=host_of("h")), engine("below"), reads=reads)
    assert {"below": ALL} == routes(decide(fleet, engine("new")))


def test_engines_do_not_divide_among_a_relay_and_its_sources() -> None:
    """The relay's own reads count once engines read from it."""
    reads = {"h": {"s": ALL}, "g": {"h": ALL}}
    fleet = group(seed("s", max_readers=1), holder_image("h", FOUR), holder_image("g", (0, 2)), reads=reads)
    after, _ = together(fleet, engine("e1"), engine("e2"))
    assert 1 == len({share.source_id for name in ("e1", "e2") for share in after.shares[name]} & {"h", "g"})


@pytest.mark.parametrize(
    ("relay", "reader", "expected"),
    [
        (holder_image, holder_image, frozenset()),
        (holder_image, engine, frozenset({"b"})),
        (engine, engine, frozenset({"b"})),
    ],
    ids=["prefetches", "an engine waits", "engines"],
)
def test_a_prefetch_is_no_straggler(
    relay: Callable[..., Source], reader: Callable[..., Source], expected: frozenset[str]
) -> None:
    """It may be slow because it yields, unless an engine waits for it."""
    fast = [engine(name, (0, 10), ingress_rate=1e9, read_rate=1e9) for name in ("a", "c", "d")]
    slow = relay("b", (0, 2), ingress_rate=1e8, read_rate=1e8)
    reads = {"a": {"s": ALL}, "b": {"a": ALL}, "c": {"s": ALL}, "d": {"s": ALL}, "x": {"b": ALL}}
    fleet = group(seed("s"), *fast, slow, reader("x"), reads=reads)
    assert expected == stragglers(fleet, NOW)
