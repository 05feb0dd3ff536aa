"""Weights that change in their place while a fork reads them: it has the bytes of one version, or none."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from rfork.errors import NoSource
from rfork.fork.digests import Digests
from rfork.fork.schedule import Schedule
from rfork.image.board import ChunkBoard
from rfork.image.chunks import MIB
from rfork.image.memory import Image
from rfork.seed.seed import Seed
from rfork.transport.memory import Faults
from rfork.wire import Plan, Share, SourceFault
from tests.unit.fork.fleet import (
    CHUNKS,
    NEVER_S,
    Fleet,
    Relay,
    Script,
    Target,
    content,
    image,
    plan,
    route,
    settings,
)

ALL = (0, CHUNKS)
LAST = CHUNKS - 1


def update(seed: Seed, version: int) -> None:
    """Change all weights in place."""
    with seed.updating():
        write(seed.image, version)


def write(held: Image, version: int) -> None:
    """Have the bytes of this version in it."""
    for region, other in zip(held.regions, image(version).regions, strict=True):
        region.copy_(other)


def told(plan: Plan, weights_id: str | None) -> Plan:
    """A plan that names its weights."""
    return plan.model_copy(update={"weights_id": weights_id})


def holds(seed: Seed, target: Target) -> bool:
    """Whether a source may give what the target misses: it has weights, and no others were begun."""
    begun = target.relay.learnt[-1] if len(target.board) else None
    return seed.manifest is not None and begun in (None, seed.manifest)


def scribble(held: Image, chunk: int) -> None:
    """Change one byte of a chunk, without a word."""
    with held.writable(chunk * MIB, chunk * MIB + 1) as (view,):
        view[0] ^= 0xFF


def test_a_silent_write_to_a_seed(fleet: Fleet) -> None:
    """The chunk that changed is read again elsewhere, and the seed is reported."""
    held = image(1)
    wrong = fleet.source("wrong", held)
    right = fleet.source("right", image(1))
    script = Script([lambda: plan(route(wrong, ALL)), lambda: plan(route(right, ALL))])
    target = Target(fleet, script)
    target.board.subscribe(lambda: scribble(held, LAST) if len(target.board) == 1 else None)
    target.run()
    assert (content(image(1)), [("wrong", "source", "SourceCorrupt")]) == (
        content(target.image),
        script.faults,
    )


def test_a_silent_write_to_a_relay(fleet: Fleet) -> None:
    """What a relay verified goes bad in its memory: its reader blames the relay, not the seed above it."""
    held = image(1)
    manifest = held.manifest()
    seed = fleet.source("seed", image(1), manifest=manifest)
    board = ChunkBoard(held.layout.chunks, range(CHUNKS))
    relay = fleet.source("relay", held, board=board, manifest=manifest)
    scribble(held, 2)
    script = Script([lambda: plan(route(relay, ALL)), lambda: plan(route(seed, ALL))])
    target = Target(fleet, script)
    target.run()
    assert (content(image(1)), [("relay", "source", "SourceCorrupt")]) == (
        content(target.image),
        script.faults,
    )


@pytest.mark.parametrize("updates", [(2,), (2, 3)], ids=["once", "twice"])
def test_an_update_of_the_only_seed(fleet: Fleet, updates: Sequence[int]) -> None:
    """Each time what was verified is of no use any more, and all of it is read anew from the same seed."""
    seed = fleet.source("seed", image(1))
    left = list(updates)

    def replan(faults: tuple[SourceFault, ...], current: tuple[Share, ...]) -> Plan:
        reported.extend(fault.error for fault in faults)
        return plan(route(seed, ALL)) if holds(seed, target) else plan(reason="it holds other weights")

    reported: list[str] = []
    target = Target(fleet, replan, settings(window=1))
    target.board.subscribe(lambda: update(seed, left.pop(0)) if left and len(target.board) == 2 else None)
    pulled = target.run()
    over = "the weights changed at the source: started over, 2 chunks are compared anew"
    assert content(image(updates[-1])) == content(target.image)
    assert [over] * len(updates) == [str(error) for error in target.puller.reasons if over in str(error)]
    assert {"SourceChanged"} == set(reported) == set(target.reasons)
    assert 2 * len(updates) <= pulled.bytes_repeated // MIB <= 3 * len(updates)


@pytest.mark.parametrize("named", [True, False], ids=["named", "by version"])
def test_a_plan_of_another_version_starts_the_fork_over(fleet: Fleet, named: bool) -> None:
    """The fork had read two chunks of the old version; the source of the new version is not blamed."""
    seed = fleet.source("seed", image(1))
    versions = ["v1", "v2"]

    def replan(faults: tuple[SourceFault, ...], current: tuple[Share, ...]) -> Plan:
        reported.extend(fault.error for fault in faults)
        if seed.manifest is None:
            return plan()
        version, weights_id = versions[seed.generation > 0], seed.manifest.weights_id if named else None
        return plan(route(seed, ALL)).model_copy(update={"version": version, "weights_id": weights_id})

    reported: list[str] = []
    target = Target(fleet, replan, settings(window=1))
    target.board.subscribe(
        lambda: update(seed, 2) if not seed.generation and len(target.board) == 2 else None
    )
    target.run()
    assert content(image(2)) == content(target.image)
    assert reported == ["SourceChanged"]
    assert "started over" in str(target.puller.reasons)


def test_weights_that_come_back_as_they_were(fleet: Fleet) -> None:
    """What is still in the image is compared with the new manifest, and not read again."""
    seed = fleet.source("seed", image(1))
    updates = [1]

    def replan(faults: tuple[SourceFault, ...], current: tuple[Share, ...]) -> Plan:
        return plan(route(seed, ALL)) if holds(seed, target) else plan(reason="it holds other weights")

    target = Target(fleet, replan, settings(window=1))
    target.board.subscribe(
        lambda: update(seed, updates.pop()) if updates and len(target.board) == 3 else None
    )
    pulled = target.run()
    assert (content(image(1)), {"SourceChanged"}) == (content(target.image), set(target.reasons))
    assert pulled.bytes_repeated <= MIB  # the one that was on its way


def test_what_is_left_is_digested_anew() -> None:
    """A chunk that was written to meanwhile, or is in flight, is read again."""
    held = image(1)
    manifest, board = held.manifest(), ChunkBoard(held.layout.chunks)
    schedule = Schedule(CHUNKS)
    digests = Digests(held, board, schedule, Relay(board))
    digests.learn(manifest)
    for chunk in range(3):
        schedule.found([chunk])
        board.mark(chunk, manifest.digests[chunk])
    digests.start_over()
    scribble(held, 0)
    schedule.adopt({"seed": [(1, 2)]})
    schedule.offer("seed", [(1, 2)])
    schedule.take()
    digests.learn(manifest)
    assert ((2, 3),) == board.verified


def test_a_seed_that_never_serves_again(fleet: Fleet) -> None:
    """What was begun is dropped, others are waited for as long as the setting says, and that is the end."""
    seed = fleet.source("seed", image(1))
    script = Script([lambda: plan(route(seed, ALL)), plan])
    target = Target(fleet, script, settings(patience_s=0.5))
    target.board.subscribe(lambda: seed.fence() if len(target.board) == 2 else None)
    with pytest.raises(NoSource):
        target.run()
    assert ((), True) == (target.board.verified, len(script.asked) > 3)


def test_a_seed_that_fails_otherwise_is_not_waited_for(fleet: Fleet) -> None:
    """Without other weights to come the fork ends at once, with what was verified."""
    seed = fleet.source("seed", image(1), Faults(dies_after=2 * MIB))
    script = Script([lambda: plan(route(seed, ALL)), plan])
    target = Target(fleet, script, settings(window=1))  # another read under way would be waited for
    with pytest.raises(NoSource):
        target.run()
    assert (2, 2) == (len(script.asked), len(target.board))


def test_an_update_under_a_relay(fleet: Fleet) -> None:
    """The relay starts over, whoever reads from it follows, and both end with the new bytes."""
    seed = fleet.source("seed", image(1))
    middle = image()
    board = ChunkBoard(middle.layout.chunks)
    relay = fleet.source("relay", middle, board=board, knows=False)
    below = threading.Event()

    def above(faults: tuple[SourceFault, ...], current: tuple[Share, ...]) -> Plan:
        begun = relay.manifest if len(board) else None
        good = seed.manifest is not None and begun in (None, seed.manifest)
        return plan(route(seed, ALL)) if good else plan()

    def behind(faults: tuple[SourceFault, ...], current: tuple[Share, ...]) -> Plan:
        return plan(route(relay, ALL)) if not relay.generation or holds(relay, lower) else plan()

    def change() -> None:
        if len(board) == 3 and not seed.generation:
            below.wait(NEVER_S)
            update(seed, 2)

    upper = Target(fleet, above, settings(window=1), held=middle, board=board, giving=relay)
    lower = Target(fleet, behind)
    board.subscribe(change)
    lower.board.subscribe(below.set)
    reading = threading.Thread(target=lower.run)
    reading.start()
    upper.run()
    reading.join()
    assert [content(image(2))] * 2 == [content(upper.image), content(lower.image)]
    assert [{"SourceChanged"}] * 2 == [set(upper.reasons), set(lower.reasons)]
    assert seed.manifest == relay.manifest


def test_leftovers_of_the_old_weights_are_not_begun_again(fleet: Fleet) -> None:
    """Who holds some of what was dropped has yet to drop it: the next whole weights are waited for."""
    seed = fleet.source("seed", image(1))
    old = seed.manifest
    assert old is not None
    few = ChunkBoard(old.layout.chunks, range(4))
    leftover = fleet.source("leftover", image(1), board=few, manifest=old)

    def back() -> Plan:
        update(seed, 2)
        return plan(route(seed, ALL))

    partial = told(plan(route(leftover, (0, 4)), retry_after_s=0.01), old.weights_id)
    answers = [lambda: partial, back]

    def replan(faults: tuple[SourceFault, ...], current: tuple[Share, ...]) -> Plan:
        if seed.manifest is not None:
            return told(plan(route(seed, ALL)), seed.manifest.weights_id)
        # What was begun is dropped once nothing of it is under way any more.
        return answers.pop(0)() if not len(target.board) else plan()

    target = Target(fleet, replan)
    target.board.subscribe(lambda: seed.fence() if not seed.generation and len(target.board) == 2 else None)
    target.run()
    assert (content(image(2)), {"seed"}, []) == (
        content(target.image),
        {share.source_id for share in target.puller.shares},
        answers,
    )


def test_weights_that_are_changed_back_are_read_again(fleet: Fleet) -> None:
    """Who holds all of what was dropped is read from."""
    seed = fleet.source("seed", image(1))
    weights_id = image(1).manifest().weights_id

    def back() -> Plan:
        seed.reseal()
        return told(plan(route(seed, ALL)), weights_id)

    script = Script([lambda: told(plan(route(seed, ALL)), weights_id), plan, back])
    target = Target(fleet, script)
    target.board.subscribe(lambda: seed.fence() if script.asked == [()] and len(target.board) == 2 else None)
    target.run()
    assert content(image(1)) == content(target.image)


def test_what_a_spool_holds_of_the_old_weights_is_not_taken() -> None:
    """Who starts over knows of no chunk, and has none claimed."""
    held = image(1)
    board = ChunkBoard(held.layout.chunks)
    board.mark(0, held.digest(0))
    schedule = Schedule(CHUNKS, board.verified)
    digests = Digests(held, board, schedule, Relay(board))
    digests.learn(held.manifest())
    schedule.claim("resume", [1, 2])
    dropped = digests.start_over()
    assert (1, [], True, None, ()) == (
        dropped,
        schedule.claimed,
        schedule.unassigned,
        digests.manifest,
        board.verified,
    )


def test_who_waits_behind_a_fork_hears_of_other_weights() -> None:
    """They were told of the first, though nothing could be read yet: the next are a new generation."""
    held = image(1)
    board = ChunkBoard(held.layout.chunks)
    relay = Relay(board)
    digests = Digests(held, board, Schedule(CHUNKS), relay)
    digests.learn(held.manifest())
    before = list(relay.dropped)
    digests.learn(image(2).manifest())
    assert ([], [()]) == (before, relay.dropped)
