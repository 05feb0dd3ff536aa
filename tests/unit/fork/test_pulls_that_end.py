"""When a pull ends that has no source, no time, or is interrupted."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from rfork.errors import DeadlinePassed, NoSource, PlannerRefused, PlannerUnreachable, RforkError
from rfork.fork.puller import TICK_S
from rfork.image.chunks import MIB
from rfork.transport.memory import Faults
from rfork.wire import Plan
from tests.unit.fork.fleet import CHUNKS, Fleet, Script, Target, image, plan, route, settings, working_threads
from tests.unit.fork.pulling import ALL, given, refusing


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (lambda: plan(reason="nobody holds it"), NoSource, "nobody holds it"),
        (lambda: plan(), NoSource, "knows no source"),
        (lambda: refusing(NoSource("another layout")), NoSource, "another layout"),
        (lambda: refusing(PlannerUnreachable("away")), PlannerUnreachable, "away"),
        (lambda: refusing(PlannerRefused("no", status=401, problem="x")), PlannerRefused, "no"),
    ],
)
def test_no_route_at_the_start_ends_at_once(
    fleet: Fleet, answer: Callable[[], Plan], error: type[RforkError], said: str
) -> None:
    """Where asking again is no use it is not done: the fallback starts at once."""
    script = Script([answer])
    with pytest.raises(error, match=said):
        Target(fleet, script).run()
    assert 1 == len(script.asked)


def test_a_place_that_frees_up_is_taken(fleet: Fleet) -> None:
    """While all places are taken the fork asks again when the planner says so."""
    seed = fleet.source("a", image(1))
    script = Script([lambda: plan(retry_after_s=0.01), lambda: plan(route(seed, ALL))])
    target = Target(fleet, script)
    target.run()
    assert ({"a": CHUNKS}, 2) == (given(target), len(script.asked))


def test_patience_runs_out(fleet: Fleet) -> None:
    """A fork without any route waits no longer than its patience."""
    script = Script([lambda: plan(reason="all are busy", retry_after_s=0.01)])
    with pytest.raises(NoSource, match="all are busy"):
        Target(fleet, script, settings(patience_s=0.05)).run()
    assert len(script.asked) > 1


def test_the_last_source_gone_ends_in_no_source(fleet: Fleet) -> None:
    """When the only source dies and no other is known, the fork ends, and says what happened."""
    seed = fleet.source("a", image(1), Faults(dies_after=2 * MIB))
    script = Script([lambda: plan(route(seed, ALL)), lambda: plan(reason="nobody is left")])
    target = Target(fleet, script)
    with pytest.raises(NoSource, match="nobody is left"):
        target.run()
    assert (["SourceGone"], 2) == (target.reasons, len(target.board))


def test_the_deadline_ends_a_fork(fleet: Fleet) -> None:
    """Past the deadline the fork ends, and nothing can write to the image any more."""
    seed = fleet.source("a", image(1), Faults(stalls_after=2 * MIB))
    target = Target(fleet, Script([lambda: plan(route(seed, ALL))]))
    deadline = target.puller._deadline

    def over() -> None:
        if len(target.board) == 2:
            deadline.at = time.monotonic()

    target.board.subscribe(over)
    with pytest.raises(DeadlinePassed, match="2 of 6 chunks"):
        target.run()
    assert [] == working_threads()


def test_an_interrupt_ends_a_fork(fleet: Fleet) -> None:
    """An interrupt in the caller's thread leaves no thread behind, and gives the place back."""
    seed = fleet.source("a", image(1), Faults(stalls_after=MIB))
    script = Script([lambda: plan(route(seed, (0, 2))), interrupt])
    target = Target(fleet, script)
    with pytest.raises(KeyboardInterrupt):
        target.run()
    assert ([], ()) == (working_threads(), seed.report().readers)


def interrupt() -> Plan:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("spoke", "expected"), [(True, []), (False, ["SourceStalled"])])
def test_who_stood_still_itself_blames_no_source(fleet: Fleet, spoke: bool, expected: list[str]) -> None:
    """What a source said meanwhile is heard first; one that said nothing has stalled a moment later."""
    target = Target(fleet, Script([plan]), settings(stall_s=1.0))
    puller, seed = target.puller, fleet.source("a", image(1))
    feed = puller._sources._opening.peer(route(seed, ALL), puller._intake)  # not started
    puller._sources._feeds["a"] = feed
    puller._schedule.adopt({"a": [ALL]})
    began = feed.heard_at
    stalled: list[list[str]] = []
    with puller._changed:
        for later in (0.0, 0.2, 9.0, 9.1, 9.0 + TICK_S):
            if spoke and later == 9.1:
                feed.heard_at = feed.advanced_at = began + later
            puller._look(began + later)
            stalled.append(target.reasons)
    assert [[]] * 4 + [expected] == stalled
