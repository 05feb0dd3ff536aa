"""Chunks of images that are not sealed yet: what belongs together, and what is refused."""

from __future__ import annotations

import pytest

from rfork.errors import NoSource
from rfork.image.chunks import MIB
from rfork.wire import Plan
from tests.unit.fork.cold import (
    ALL,
    ORIGIN,
    Member,
    X,
    Y,
    at_once,
    drafting,
    given,
    leader_that_dies,
    planned,
    wait_for,
)
from tests.unit.fork.fleet import CHUNKS, Files, Fleet, Target, content, image, plan, reads, route, settings


@pytest.mark.parametrize("differs", range(3))
def test_other_files_of_one_origin_are_not_mixed(fleet: Fleet, differs: int) -> None:
    """Where its own files differ from any chunk that it holds, it drops them all and reads everything."""
    held, other = image(1), image(1)
    other.regions[0][differs * MIB + 5] ^= 1
    other.regions[1][MIB + 5] ^= 1
    leader, own = leader_that_dies(fleet, held), Files(other)
    script = planned(
        lambda: plan(route(leader.relay, ALL)),
        plan(storage=[reads(own, (3, 6))]),
        plan(storage=[reads(own, ALL)]),
    )
    follower = Member(fleet, "follower", script, [own])
    at_once(leader, follower)
    assert (content(other), {"leader": 3, "checkpoint:file:///files": 6}) == (
        content(follower.image),
        given(follower.target),
    )
    draft = follower.target.board.draft or ""
    assert (1, True) == (follower.relay.generation, draft.startswith(f"{ORIGIN}-"))


def test_files_of_another_origin_are_not_mixed(fleet: Fleet) -> None:
    """What is held of one origin is dropped when the planner sends the fork to files of another."""
    held, other = image(1), image(2)
    leader, own = leader_that_dies(fleet, held), Files(other, origin="b" * 32)
    script = planned(lambda: plan(route(leader.relay, ALL)), plan(storage=[reads(own, ALL)]))
    follower = Member(fleet, "follower", script, [own])
    at_once(leader, follower)
    assert (content(other), "b" * 32) == (content(follower.image), follower.target.board.draft)


def test_a_manifest_that_differs_drops_what_differs(fleet: Fleet) -> None:
    """Chunks of a draft that a sealed source holds otherwise are read again; equal ones are kept."""
    held, right = image(1), image(1)
    right.regions[0][0] ^= 1
    files = Files(held, fails_at=3 * MIB)
    seed = fleet.source("seed", right)
    script = planned(plan(storage=[reads(files, ALL)]), plan(route(seed, ALL)))
    target = Target(fleet, script, settings(window=1), files=[files])
    target.run()
    assert (content(right), [(0,)], {"checkpoint:file:///files": 3, "seed": 4}) == (
        content(target.image),
        target.relay.dropped,
        given(target),
    )
    assert ([seed.manifest], None) == (target.relay.learnt, target.board.draft)


def test_a_source_of_another_draft_is_refused_while_one_gives(fleet: Fleet) -> None:
    """The first draft stands as long as somebody gives it."""
    held, other = image(1), image(2)
    first = drafting(fleet, "first", held, X, [0, 1, 2])
    second = drafting(fleet, "second", other, Y, [3, 4, 5])

    def rest() -> Plan:
        first.learn(held.manifest())
        for chunk in range(3, CHUNKS):
            first.board.mark(chunk, held.manifest().digests[chunk])
        return plan(route(first, ALL))

    def joined() -> Plan:
        wait_for(target.board, 3)  # so that the first is the first
        return plan(route(first, (0, 4)), route(second, (4, 6)))

    script = planned(plan(route(first, (0, 3)), retry_after_s=0.01), joined, rest)
    target = Target(fleet, script)
    target.run()
    assert (content(held), [("second", "source", "SourceChanged")]) == (content(target.image), script.faults)


def test_a_new_draft_replaces_one_that_nobody_gives(fleet: Fleet) -> None:
    """Where all that gave the first are gone, its chunks are dropped, and the new one is read whole."""
    held, other = image(1), image(2)
    first = drafting(fleet, "first", held, X, [0, 1, 2])
    second = drafting(fleet, "second", other, Y, range(CHUNKS))

    def whole() -> Plan:
        second.learn(other.manifest())
        return plan(route(second, ALL))

    def rest() -> Plan:
        wait_for(target.board, 3)  # so that nothing is wanted of the first any more
        return plan(route(second, (3, 6)))

    script = planned(plan(route(first, (0, 3))), rest, whole)
    target = Target(fleet, script)
    target.run()
    assert (content(other), [(0, 1, 2)]) == (content(target.image), target.relay.dropped)


def test_chunks_without_digests_are_refused(fleet: Fleet) -> None:
    """A source that offers a draft without saying what its chunks hold is corrupt."""
    held = image(1)
    relay = drafting(fleet, "relay", held, X, [0])
    news = relay.news

    def silent(told: tuple[tuple[int, int], ...]) -> object:
        answer = news(told)
        return type(answer)(answer.chunks, answer.draining, (), answer.draft)

    relay.news = silent  # type: ignore[method-assign, assignment]
    script = planned(plan(route(relay, ALL)), plan(reason="nobody else"))
    with pytest.raises(NoSource):
        Target(fleet, script).run()
    assert [("relay", "source", "SourceCorrupt")] == script.faults
