"""How long storage, and who reads it, are waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from rfork.errors import DeadlinePassed, NoSource, StorageError
from rfork.image.board import ChunkBoard
from rfork.wire import Plan
from tests.unit.fork.cold import ALL, Member, at_once, given, planned
from tests.unit.fork.fleet import (
    CHUNKS,
    NEVER_S,
    Files,
    Fleet,
    Target,
    content,
    image,
    plan,
    reads,
    route,
    settings,
    working_threads,
)


@pytest.mark.parametrize(
    ("read_at", "ended", "stall_s"),
    [
        (None, NoSource, 0.1),
        (lambda: 0.0, NoSource, 0.1),
        # Not to be taken for silent while this machine has too much to do.
        (time.monotonic, DeadlinePassed, 0.5),
    ],
    ids=["reads nothing", "stuck", "slow"],
)
def test_how_long_a_leader_without_chunks_is_waited_for(
    fleet: Fleet, read_at: Callable[[], float] | None, ended: type[Exception], stall_s: float
) -> None:
    """As long as its storage gives something; one that is stuck is given up, and another asked for."""
    held = image(1)
    leader = fleet.source("leader", held, board=ChunkBoard(held.layout.chunks), knows=False)
    leader.say_reading(read_at)
    script = planned(plan(route(leader, ALL)), plan(reason="nobody else"))
    chosen = settings(stall_s=stall_s, storage_stall_s=3 * stall_s)
    target = Target(fleet, script, chosen, deadline_s=3.5 * stall_s if ended is DeadlinePassed else NEVER_S)
    with pytest.raises(ended):
        target.run()
    faults = [("leader", "source", "SourceStalled")] if ended is NoSource else []
    assert faults == script.faults


def test_a_follower_of_a_leader_whose_disk_hangs_reads_its_own(fleet: Fleet) -> None:
    """It waits for what the settings allow, then the planner elects it; what it holds is kept."""
    held, go_on = image(1), threading.Event()
    hanging, own = Files(held), Files(held)
    hanging.before_read = lambda chunk: go_on.wait(NEVER_S) if chunk == 2 else True
    script = planned(plan(storage=[reads(hanging, ALL)]), plan(reason="nobody else"))
    leader = Member(fleet, "leader", script, [hanging], chosen=settings(window=1, storage_stall_s=1.0))
    behind = planned(lambda: plan(route(leader.relay, ALL)), lambda: plan(storage=[reads(own, (2, CHUNKS))]))
    # It is not silent, and its storage is its own: how long that is waited for is the other setting.
    chosen = settings(window=1, stall_s=1.0, storage_stall_s=0.5)
    follower = Member(fleet, "follower", behind, [own], chosen=chosen)
    ended = at_once(leader, follower)
    go_on.set()
    assert (NoSource, [("target", "storage", "StorageError")]) == (type(ended[0]), script.faults)
    assert (content(held), [("leader", "source", "SourceStalled")], {"leader": 2}) == (
        content(follower.image),
        behind.faults,
        {name: count for name, count in given(follower.target).items() if name == "leader"},
    )


def test_two_that_wait_for_each_other_end(fleet: Fleet) -> None:
    """In a circle nobody's word keeps another waiting: what was last read grows old everywhere."""
    held = image(1)
    disks = [Files(held, kind="snapshot", manifest=held.manifest()) for _ in range(2)]
    members: list[Member] = []
    chosen = settings(window=1, stall_s=0.2, storage_stall_s=0.4)

    def share(mine: int) -> Plan:
        return plan(route(members[1 - mine].relay, (3, 6)), storage=[reads(disks[mine], (0, 3))])

    scripts = [planned(partial(share, mine), plan(reason="nobody else")) for mine in range(2)]
    for mine, name in enumerate(("one", "two")):
        members.append(Member(fleet, name, scripts[mine], [disks[mine]], chosen=chosen))
    ended = at_once(*members)
    assert [NoSource, NoSource] == [type(each) for each in ended]
    told = {(script.faults[0][1], script.faults[0][2]) for script in scripts if script.faults}
    assert {("source", "SourceStalled"), ("source", "SourceGone")} >= told > set()


def test_a_disk_that_hangs_does_not_hang_the_fork(fleet: Fleet) -> None:
    """It is told as stalled and somebody else gives; what it gives later changes nothing."""
    held, go_on, late = image(1), threading.Event(), threading.Event()
    rotten = Files(image(2))

    def hang(chunk: int) -> bool:
        late.set() if go_on.wait(NEVER_S) else None
        return True

    rotten.before_read = hang
    seed = fleet.source("seed", held)
    script = planned(plan(storage=[reads(rotten, ALL)]), plan(route(seed, ALL)))
    target = Target(fleet, script, settings(storage_stall_s=0.3), files=[rotten])
    target.run()
    threads = working_threads()
    go_on.set()
    assert late.wait(NEVER_S)
    assert (content(held), [("target", "storage", "StorageError")], []) == (
        content(target.image),
        script.faults,
        threads,
    )


def test_a_disk_that_never_gave_anything_does_not_outlive_the_deadline(fleet: Fleet) -> None:
    """The deadline is put off only for storage that advances."""
    files, go_on = Files(image(1)), threading.Event()
    files.before_read = lambda chunk: go_on.wait(NEVER_S)
    target = Target(fleet, planned(plan(storage=[reads(files, ALL)])), deadline_s=0.3, files=[files])
    with pytest.raises(DeadlinePassed):
        target.run()
    go_on.set()
    assert ([], 0) == (working_threads(), len(target.board))


def test_the_deadline_waits_for_own_storage_that_advances(fleet: Fleet) -> None:
    """Whoever reads for all that wait reads to the end, since it would have to begin anew otherwise."""
    held = image(1)
    files, pause = Files(held), threading.Event()
    target = Target(
        fleet,
        planned(plan(storage=[reads(files, ALL)])),
        settings(window=1, storage_stall_s=30.0),
        deadline_s=1.0,
        files=[files],
    )
    over = time.monotonic() + 1.1
    # The first comes at once, all others once the deadline would have passed.
    files.before_read = lambda chunk: pause.wait(max(0.0, over - time.monotonic())) if chunk else None
    target.run()
    assert (content(held), list(range(CHUNKS)), True) == (
        content(target.image),
        sorted(files.chunks_read),
        time.monotonic() > over,
    )


def test_a_deadline_ends_a_read_of_storage(fleet: Fleet) -> None:
    """Past the deadline nothing more is read, and nobody is blamed."""
    files = Files(image(1))
    target = Target(fleet, planned(plan(storage=[reads(files, ALL)])), deadline_s=0.2, files=[files])
    ended = threading.Event()
    files.before_read = lambda chunk: ended.wait(NEVER_S)
    with pytest.raises(DeadlinePassed):
        target.run()
    ended.set()
    assert ([], []) == (target.reasons, working_threads())
    assert StorageError.__name__ not in target.reasons
