"""Pulls of images that nobody holds yet: one reads storage, the others get it from there meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from rfork.errors import NoSource, UserError
from rfork.image import ranges
from rfork.image.board import ChunkBoard
from rfork.image.chunks import MIB
from rfork.transport.memory import Faults
from rfork.wire import Plan, Share
from tests.unit.fork.cold import (
    ALL,
    ORIGIN,
    Member,
    at_once,
    drafting,
    given,
    leader_that_dies,
    planned,
    wait_for,
)
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


def test_the_elected_reads_its_files(fleet: Fleet) -> None:
    """Every byte is the files', the digests are the manifest, and the bytes are told by the files' name."""
    held = image(1)
    files = Files(held)
    target = Target(fleet, planned(plan(storage=[reads(files, ALL)])), files=[files])
    pulled = target.run()
    assert (content(held), [held.manifest()]) == (content(target.image), target.relay.learnt)
    assert [("checkpoint:file:///files", "node", "checkpoint", CHUNKS, CHUNKS * MIB)] == [
        (share.source_id, share.host, share.transport, share.verified_chunks, share.verified_bytes)
        for share in pulled.sources
    ]
    assert (list(range(CHUNKS)), CHUNKS * MIB, ORIGIN) == (
        sorted(files.chunks_read),
        pulled.bytes_read,
        target.board.draft,
    )


def test_while_it_reads_its_files_it_says_so(fleet: Fleet) -> None:
    """Those that wait behind it hear that chunks may be long in coming, until all are there."""
    held = image(1)
    files = Files(held)
    target = Target(fleet, planned(plan(storage=[reads(files, ALL)])), settings(window=1), files=[files])
    told = threading.Event()
    note = target.relay.say_reading

    def say_reading(read_at: Callable[[], float] | None, *, relayed: bool = False) -> None:
        note(read_at, relayed=relayed)
        if read_at is not None:
            told.set()

    target.relay.say_reading = say_reading  # type: ignore[method-assign]
    files.before_read = lambda chunk: told.wait(NEVER_S)
    target.run()
    assert [True, False] == target.relay.reading


def test_a_follower_reads_while_the_leader_reads(fleet: Fleet) -> None:
    """The leader's disk gives a chunk only once the follower has the one before: neither waits for all."""
    held = image(1)
    files = Files(held)
    leader = Member(fleet, "leader", planned(plan(storage=[reads(files, ALL)])), [files])
    follower = Member(fleet, "follower", planned(plan(route(leader.relay, ALL))))
    steps: list[bool] = []
    files.before_read = lambda chunk: steps.append(wait_for(follower.target.board, chunk))
    at_once(leader, follower)
    assert ([True] * CHUNKS, [content(held)] * 2) == (
        steps,
        [content(leader.image), content(follower.image)],
    )
    assert ({"leader": CHUNKS}, [held.manifest().weights_id] * 2) == (
        given(follower.target),
        [leader.weights_id, follower.weights_id],
    )


def test_digests_pass_from_relay_to_relay(fleet: Fleet) -> None:
    """Three in a chain, none of which knows the manifest: storage is read once, and all agree."""
    held = image(1)
    files = Files(held)
    first = Member(fleet, "first", planned(plan(storage=[reads(files, ALL)])), [files])
    second = Member(fleet, "second", planned(plan(route(first.relay, ALL))))
    third = Member(fleet, "third", planned(plan(route(second.relay, ALL))))
    files.before_read = lambda chunk: wait_for(third.target.board, chunk)
    at_once(first, second, third)
    assert ([content(held)] * 3, {"second": CHUNKS}, CHUNKS) == (
        [content(member.image) for member in (first, second, third)],
        given(third.target),
        len(files.chunks_read),
    )


def test_a_relay_of_a_draft_that_gives_wrong_bytes(fleet: Fleet) -> None:
    """Bytes that do not match the digest that came with them are thrown away, and the relay is blamed."""
    held = image(1)
    files = Files(held)
    leader = Member(
        fleet,
        "leader",
        planned(plan(storage=[reads(files, ALL)])),
        [files],
        faults=Faults(corrupt_chunks={2}),
    )
    script = planned(plan(route(leader.relay, ALL)), plan(reason="nobody else"))
    follower = Member(fleet, "follower", script)
    files.before_read = lambda chunk: wait_for(follower.target.board, chunk) if chunk < 3 else True
    ended = at_once(leader, follower)[1]
    assert ([("leader", "source", "SourceCorrupt")], 2) == (script.faults, len(follower.target.board))
    assert NoSource is type(ended)


def test_files_that_fail_are_the_reader_s_own_fault(fleet: Fleet) -> None:
    """The planner hears of a fault of storage under this instance's own id; what is verified is kept."""
    held = image(1)
    files = Files(held, fails_at=3 * MIB)
    seed = fleet.source("seed", held)
    script = planned(plan(storage=[reads(files, ALL)]), plan(route(seed, ALL)))
    target = Target(fleet, script, settings(window=1), files=[files])
    target.run()
    assert ([("target", "storage", "StorageError")], content(held)) == (script.faults, content(target.image))
    assert ({"checkpoint:file:///files": 3, "seed": 3}, []) == (given(target), target.relay.dropped)


@pytest.mark.parametrize(
    "error", [UserError("bad"), ZeroDivisionError("a bug")], ids=["of another kind", "a bug"]
)
def test_whatever_a_reader_of_files_raises(fleet: Fleet, error: Exception) -> None:
    """It is a fault of storage, and no hang."""
    files = Files(image(1), error=error, fails_at=0)
    script = planned(plan(storage=[reads(files, ALL)]), plan(reason="nobody else"))
    with pytest.raises(NoSource):
        Target(fleet, script, files=[files]).run()
    assert [("target", "storage")] == [(name, fault) for name, fault, _ in script.faults]


def test_a_snapshot_s_chunks_are_verified(fleet: Fleet) -> None:
    """Its manifest is told before its first chunk, and bytes that do not match it are its fault."""
    held, rotten = image(1), image(1)
    rotten.regions[1][0] ^= 1
    files = Files(rotten, kind="snapshot", manifest=held.manifest())
    seed = fleet.source("seed", held)
    script = planned(plan(storage=[reads(files, ALL)]), plan(route(seed, ALL)))
    target = Target(fleet, script, settings(window=1), files=[files])
    target.run()
    assert ([("target", "storage", "StorageError")], content(held)) == (script.faults, content(target.image))
    assert ({"snapshot:file:///files": 3, "seed": 3}, None) == (given(target), target.board.draft)


def test_two_share_a_snapshot(fleet: Fleet) -> None:
    """Each reads its half from storage and takes the other half from its partner."""
    held = image(1)
    manifest = held.manifest()
    disks = [Files(held, kind="snapshot", manifest=manifest) for _ in range(2)]
    halves = [(0, 3), (3, 6)]
    members: list[Member] = []

    def share(mine: int) -> Plan:
        other = members[1 - mine].relay
        return plan(route(other, halves[1 - mine]), storage=[reads(disks[mine], halves[mine])])

    members.append(Member(fleet, "one", planned(lambda: share(0)), [disks[0]]))
    members.append(Member(fleet, "two", planned(lambda: share(1)), [disks[1]]))
    at_once(*members)
    assert [content(held)] * 2 == [content(member.image) for member in members]
    assert [[0, 1, 2], [3, 4, 5]] == [sorted(disk.chunks_read) for disk in disks]


def test_a_follower_goes_on_where_the_leader_died(fleet: Fleet) -> None:
    """It gives the missing chunks alone, once it found in its files all that it holds."""
    held = image(1)
    leader, own = leader_that_dies(fleet, held), Files(held)
    script = planned(lambda: plan(route(leader.relay, ALL)), plan(storage=[reads(own, (3, 6))]))
    follower = Member(fleet, "follower", script, [own])
    at_once(leader, follower)
    assert (content(held), {"leader": 3, "checkpoint:file:///files": 3}) == (
        content(follower.image),
        given(follower.target),
    )
    # What is compared is read one by one; what is read after it comes on several threads.
    assert ([0, 1, 2], [3, 4, 5], 0, held.manifest().weights_id) == (
        own.chunks_read[:3],
        sorted(own.chunks_read[3:]),
        follower.relay.generation,
        follower.weights_id,
    )


def test_two_reads_of_one_storage_are_one(fleet: Fleet) -> None:
    """A plan that names a storage twice means all the chunks that it names."""
    held = image(1)
    files = Files(held)
    script = planned(plan(storage=[reads(files, (0, 3)), reads(files, (3, CHUNKS))]))
    Target(fleet, script, files=[files]).run()
    assert (1, list(range(CHUNKS))) == (len(script.asked), sorted(files.chunks_read))


def test_the_planner_is_told_what_is_read_now(fleet: Fleet) -> None:
    """Asking again names each source and its chunks; this instance's own id stands for its storage."""
    held = image(1)
    files, seed = Files(held), fleet.source("seed", held, board=ChunkBoard(held.layout.chunks), knows=False)
    go_on = threading.Event()
    files.before_read = lambda chunk: go_on.wait(NEVER_S)

    def alone() -> Plan:
        go_on.set()
        return plan(storage=[reads(files, ALL)])

    shared = plan(route(seed, (0, 2)), storage=[reads(files, (2, 5))], retry_after_s=0.01)
    script = planned(shared, alone)
    Target(fleet, script, files=[files]).run()
    assert [
        (),
        (Share(source_id="seed", chunks=((0, 2),)), Share(source_id="target", chunks=((2, 5),))),
    ] == [tuple(sorted(current, key=lambda share: share.source_id)) for current in script.current]


def test_a_plan_that_names_no_storage_of_ours(fleet: Fleet) -> None:
    """A plan that is not to be followed is told as such, and nothing hangs."""
    script = planned(plan(storage=[reads(Files(image(1)), ALL)]), plan(reason="nobody else"))
    with pytest.raises(NoSource):
        Target(fleet, script).run()
    assert ([("target", "storage")], []) == (
        [(name, fault) for name, fault, _ in script.faults],
        working_threads(),
    )


def test_nobody_seals_what_it_did_not_read(fleet: Fleet) -> None:
    """Where the reader dies before it says what all its chunks are, one that has files looks into them."""
    held = image(1)
    leader, own = drafting(fleet, "leader", held, ORIGIN, range(CHUNKS)), Files(held)

    def look() -> Plan:
        return plan(storage=[reads(own, *ranges.subtract([ALL], follower.target.board.verified))])

    script = planned(lambda: plan(route(leader, ALL)), look)
    follower = Member(fleet, "follower", script, [own])
    running = threading.Thread(target=follower.target.run)
    running.start()
    whole = wait_for(follower.target.board, CHUNKS)
    before = follower.weights_id
    for channel in list(leader._leases._channels):
        leader.close_channel(channel)
    running.join()
    assert (True, None, held.manifest().weights_id) == (whole, before, follower.weights_id)
    assert ({"leader": CHUNKS, "checkpoint:file:///files": 1}, [*range(CHUNKS)]) == (
        given(follower.target),
        own.chunks_read,
    )
