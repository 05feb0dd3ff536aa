"""Pulls whose leases the planner renews, loses or refuses, or whose planner is away."""

from __future__ import annotations

import threading

import pytest

from rfork.control.lease import derive_key
from rfork.errors import PlannerRefused, PlannerUnreachable
from rfork.image.board import ChunkBoard
from rfork.image.chunks import MIB
from rfork.transport.memory import Faults
from rfork.wire import Plan, Share, SourceFault
from tests.unit.fork.fleet import CHUNKS, Fleet, Script, Target, content, image, lease, plan, route
from tests.unit.fork.pulling import ALL, IMAGE_BYTES, given, refusing


def test_a_lease_refused_thrice_excludes_the_source(fleet: Fleet) -> None:
    """The target takes two refusals on itself; the third asks for another source, without blame."""
    held = image(1)
    a = fleet.source("a", held, Faults(refuses=True))
    b = fleet.source("b", held)

    def replan(faults: tuple[SourceFault, ...], current: tuple[Share, ...]) -> Plan:
        reported.extend((fault.instance_id, fault.fault, fault.error) for fault in faults)
        excluded = any(fault == "network" for _, fault, _ in reported)
        return plan(route(b if excluded else a, ALL))

    reported: list[tuple[str, str, str]] = []
    target = Target(fleet, replan)
    target.run()
    assert {"b": CHUNKS} == given(target)
    assert [
        ("a", "target", "LeaseRefused"),
        ("a", "target", "LeaseRefused"),
        ("a", "network", "LeaseRefused"),
    ] == reported


@pytest.mark.parametrize("lost", ["expired", "forged", "generation"])
def test_a_bad_lease_is_replaced_by_the_next_plan(fleet: Fleet, lost: str) -> None:
    """A source that refuses the token at its door is asked again with the token of the next plan."""
    held = image(1)
    seed = fleet.source("a", held)
    good = route(seed, ALL)
    tokens = {
        "expired": lease(seed, lives_s=-1).token,
        "forged": "forged",
        "generation": lease(seed, generation=3).token,
    }
    bad = good.model_copy(update={"lease": good.lease.model_copy(update={"token": tokens[lost]})})
    script = Script([lambda: plan(bad), lambda: plan(good)])
    target = Target(fleet, script)
    target.run()
    expected = ("source", "SourceChanged") if lost == "generation" else ("target", "LeaseRefused")
    assert ([("a", *expected)], content(held)) == (script.faults, content(target.image))


def test_renewed_leases_are_shown_from_then_on(fleet: Fleet) -> None:
    """A lease that is renewed in mid-fork outlives the first one."""
    held = image(1)
    board = ChunkBoard(held.layout.chunks, [0])
    relay = fleet.source("a", held, board=board, manifest=held.manifest())
    target = Target(fleet, Script([lambda: plan(route(relay, ALL))]))
    rotated = threading.Event()

    def rotate() -> None:
        if not rotated.is_set():
            rotated.set()
            newest = lease(relay, secret=b"3" * 32)
            relay.learn_keys([derive_key(b"3" * 32, "a")])
            target.puller.renew({"a": newest, "unknown": newest})
            for index in range(1, CHUNKS):
                board.mark(index)

    target.board.subscribe(rotate)
    target.run()
    assert (content(held), []) == (content(target.image), target.reasons)


def test_the_planner_may_go_while_sources_give(fleet: Fleet) -> None:
    """A fork whose sources live goes on while the planner is away, and asks again for what is left."""
    held = image(1)
    manifest = held.manifest()
    a, b = (fleet.source(name, held, manifest=manifest) for name in "ab")
    script = Script(
        [
            lambda: plan(route(a, (0, 3))),
            lambda: refusing(PlannerUnreachable("away")),
            lambda: refusing(PlannerRefused("confused", status=500, problem="internal")),
            lambda: plan(route(b, (3, 6))),
        ]
    )
    target = Target(fleet, script)
    target.run()
    assert (content(held), {"a": 3, "b": 3}, []) == (content(target.image), given(target), target.reasons)


def test_faults_reach_a_planner_that_was_away(fleet: Fleet) -> None:
    """A fault that could not be told is told with the next request."""
    held = image(1)
    a = fleet.source("a", held, Faults(dies_after=MIB))
    b = fleet.source("b", held)
    script = Script(
        [
            lambda: plan(route(a, ALL)),
            lambda: refusing(PlannerUnreachable("away")),
            lambda: plan(route(b, ALL)),
        ]
    )
    Target(fleet, script).run()
    assert [0, 1, 1] == [len(faults) for faults in script.asked]


def test_a_planner_that_forgot_is_asked_anew(fleet: Fleet) -> None:
    """After `plan_again` the rest is planned anew, what is verified is kept, and the source stays open."""
    held = image(1)
    board = ChunkBoard(held.layout.chunks, [0, 1])
    seed = fleet.source("a", held, board=board, manifest=held.manifest())

    def whole() -> Plan:
        for index in range(CHUNKS):
            board.mark(index)
        return plan(route(seed, ALL))

    script = Script([lambda: plan(route(seed, ALL)), whole])
    target = Target(fleet, script)
    target.board.subscribe(lambda: target.puller.plan_again("forgotten") if len(target.board) == 2 else None)
    pulled = target.run()
    assert (content(held), IMAGE_BYTES, 1) == (content(target.image), pulled.bytes_read, pulled.replans)


def test_while_a_planner_that_forgot_knows_no_source_the_old_plan_holds(fleet: Fleet) -> None:
    """A restarted planner that has not heard of the seeds yet does not end a fork whose source gives."""
    held = image(1)
    board = ChunkBoard(held.layout.chunks, [0, 1])
    seed = fleet.source("a", held, board=board, manifest=held.manifest())

    def nothing_yet() -> Plan:
        for index in range(CHUNKS):
            board.mark(index)
        return plan(reason="no instance holds model")

    target = Target(fleet, Script([lambda: plan(route(seed, ALL)), nothing_yet]))
    target.board.subscribe(lambda: target.puller.plan_again("forgotten") if len(target.board) == 2 else None)
    target.run()
    assert (content(held), []) == (content(target.image), target.reasons)
