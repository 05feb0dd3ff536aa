"""Pulls of images that nobody holds yet: one reads storage, the others get it from there meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial

import pytest

from rfork.errors import DeadlinePassed, NoSource, StorageError, UserError
from rfork.fork.report import Pulled
from rfork.image import ranges
from rfork.image.board import ChunkBoard
from rfork.image.chunks import MIB
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.seed.seed import Seed
from rfork.settings import Settings
from rfork.transport.memory import Faults
from rfork.wire import Plan, Share, StorageRead
from tests.unit.fork.fleet import (
    CHUNKS,
    NEVER_S,
    Files,
    Fleet,
    Script,
    Target,
    content,
    image,
    plan,
    reads,
    route,
    settings,
    working_threads,
)

ALL = (0, CHUNKS)
ORIGIN = "a" * 32
X, Y = "c" * 32, "d" * 32


def given(target: Target) -> dict[str, int]:
    """Verified chunks by source."""
    return {share.source_id: share.verified_chunks for share in target.puller.shares}


def planned(*answers: Plan | Callable[[], Plan]) -> Script:
    return Script([answer if callable(answer) else partial(copy, answer) for answer in answers])


class Member:
    """A target whose giving side others can read from."""

    def __init__(
        self,
        fleet: Fleet,
        name: str,
        script: Script,
        files: Sequence[Files] = (),
        *,
        faults: Faults | None = None,
        chosen: Settings | None = None,
    ) -> None:
        self.image = image()
        board = ChunkBoard(self.image.layout.chunks)
        self.relay = fleet.source(name, self.image, faults, board=board, knows=False)
        self.target = Target(
            fleet,
            script,
            chosen or settings(window=1),
            held=self.image,
            board=board,
            giving=self.relay,
            files=files,
        )

    @property
    def weights_id(self) -> str | None:
        return self.relay.report().weights_id


def at_once(*members: Member) -> list[Pulled | BaseException]:
    """Run all of them side by side; what each ended with."""
    ended: dict[Member, Pulled | BaseException] = {}

    def run(member: Member) -> None:
        try:
            ended[member] = member.target.run()
        except BaseException as error:
            ended[member] = error

    threads = [threading.Thread(target=run, args=(member,)) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [ended[member] for member in members]


def wait_for(board: ChunkBoard, count: int) -> bool:
    """Until the board holds so many chunks."""
    enough = threading.Event()
    leave = board.subscribe(lambda: enough.set() if len(board) >= count else None)
    if len(board) >= count:
        enough.set()
    try:
        return enough.wait(NEVER_S)
    finally:
        leave()


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


def leader_that_dies(fleet: Fleet, held: Image) -> Member:
    """A leader that dies once it gave three chunks, before it read all."""
    files = Files(held, fails_at=4 * MIB)
    script = planned(plan(storage=[reads(files, ALL)]), plan(reason="nobody else"))
    return Member(fleet, "leader", script, [files], faults=Faults(dies_after=3 * MIB))


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
    assert (list(range(CHUNKS)), 0, held.manifest().weights_id) == (
        own.chunks_read,
        follower.relay.generation,
        follower.weights_id,
    )


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


def drafting(fleet: Fleet, name: str, held: Image, draft: str, chunks: Sequence[int]) -> Seed:
    """A relay of a draft that holds these chunks, and gets no more."""
    digests = held.manifest().digests
    board = ChunkBoard(held.layout.chunks)
    board.begin(draft)
    for chunk in chunks:
        board.mark(chunk, digests[chunk])
    return fleet.source(name, held, board=board, knows=False)


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

    joined = plan(route(first, (0, 4)), route(second, (4, 6)))
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

    script = planned(plan(route(first, (0, 3))), plan(route(second, (3, 6))), whole)
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


@pytest.mark.parametrize(
    ("read_at", "ended"),
    [(None, NoSource), (lambda: 0.0, NoSource), (time.monotonic, DeadlinePassed)],
    ids=["reads nothing", "stuck", "slow"],
)
def test_how_long_a_leader_without_chunks_is_waited_for(
    fleet: Fleet, read_at: Callable[[], float] | None, ended: type[Exception]
) -> None:
    """As long as its storage gives something; one that is stuck is given up, and another asked for."""
    held = image(1)
    leader = fleet.source("leader", held, board=ChunkBoard(held.layout.chunks), knows=False)
    leader.say_reading(read_at)
    script = planned(plan(route(leader, ALL)), plan(reason="nobody else"))
    target = Target(fleet, script, settings(stall_s=0.1, storage_stall_s=0.3), deadline_s=1.0)
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
    chosen = settings(window=1, stall_s=0.2, storage_stall_s=0.5)
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
    files.before_read = lambda chunk: pause.wait(0.1)
    target = Target(
        fleet,
        planned(plan(storage=[reads(files, ALL)])),
        settings(window=1, storage_stall_s=30.0),
        deadline_s=0.3,
        files=[files],
    )
    target.run()
    assert (content(held), list(range(CHUNKS))) == (content(target.image), sorted(files.chunks_read))


def test_two_reads_of_one_storage_are_one(fleet: Fleet) -> None:
    """A plan that names a storage twice means all the chunks that it names."""
    held = image(1)
    files = Files(held)
    script = planned(plan(storage=[reads(files, (0, 3)), reads(files, (3, CHUNKS))]))
    Target(fleet, script, files=[files]).run()
    assert (1, list(range(CHUNKS))) == (len(script.asked), sorted(files.chunks_read))


def is_relayed(seed: Seed) -> bool:
    reading = seed.news(()).reading
    return reading is not None and reading.relayed


def test_a_relay_passes_on_that_its_source_loads(fleet: Fleet) -> None:
    """Whoever waits behind one that waits behind the leader is told so too."""
    held = image(1)
    leader = fleet.source("leader", held, board=ChunkBoard(held.layout.chunks), knows=False)
    leader.say_reading(time.monotonic)
    relay = Member(fleet, "relay", planned(plan(route(leader, ALL))))
    told = threading.Event()
    with relay.relay.on_change(lambda: told.set() if is_relayed(relay.relay) else None):
        running = threading.Thread(target=relay.target.run)
        running.start()
        heard = told.wait(NEVER_S)
        manifest = held.manifest()
        leader.learn(manifest)
        for chunk, digest in enumerate(manifest.digests):
            leader.board.mark(chunk, digest)
        running.join()
    assert (True, False, content(held)) == (heard, is_relayed(relay.relay), content(relay.image))


LOADER = StorageRead(kind="loader", uri="", chunks=(ALL,))


def test_the_elected_runs_its_loader(fleet: Fleet) -> None:
    """It fills the whole image on the caller's thread, and every byte counts as read from storage."""
    held = image(1)
    threads: list[str] = []
    target = Target(fleet, planned(plan(storage=[LOADER])), load_whole=lambda read: load(read))

    def load(read: StorageRead) -> Manifest:
        threads.append(threading.current_thread().name)
        for own, right in zip(target.image.regions, held.regions, strict=True):
            own.copy_(right)
        return target.image.manifest()

    pulled = target.run()
    assert ([threading.current_thread().name], [True, False]) == (threads, target.relay.reading)
    assert ([held.manifest()], {"loader:": CHUNKS}, CHUNKS * MIB, ALL) == (
        target.relay.learnt,
        given(target),
        pulled.bytes_read,
        target.board.verified[0],
    )


def test_a_loader_that_fails_is_told_and_another_source_asked(fleet: Fleet) -> None:
    """The planner hears of a fault of storage; a seed that came up meanwhile gives everything."""
    held = image(1)
    seed = fleet.source("seed", held)
    script = planned(plan(storage=[LOADER]), plan(route(seed, ALL)))
    target = Target(fleet, script)
    target.run()
    assert ([("target", "storage", "StorageError")], content(held)) == (script.faults, content(target.image))


def test_a_loader_starts_from_nothing(fleet: Fleet) -> None:
    """What was verified is dropped before a loader writes over it, and nothing else is read meanwhile."""
    held = image(1)
    first = drafting(fleet, "first", image(2), X, [0, 1])
    script = planned(plan(route(first, (0, 2))), plan(storage=[LOADER]))
    verified: list[int] = []
    target = Target(fleet, script, load_whole=lambda read: load(read))

    def load(read: StorageRead) -> Manifest:
        verified.append(len(target.board))
        for own, right in zip(target.image.regions, held.regions, strict=True):
            own.copy_(right)
        return target.image.manifest()

    target.run()
    assert ([0], [(0, 1)], content(held), ()) == (
        verified,
        target.relay.dropped,
        content(target.image),
        first.report().readers,
    )


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


def test_a_deadline_ends_a_read_of_storage(fleet: Fleet) -> None:
    """Past the deadline nothing more is read, and nobody is blamed."""
    files = Files(image(1))
    target = Target(fleet, planned(plan(storage=[reads(files, ALL)])), deadline_s=0.2, files=[files])
    ended = threading.Event()
    files.before_read = lambda chunk: ended.wait(0.5)
    with pytest.raises(DeadlinePassed):
        target.run()
    assert ([], []) == (target.reasons, working_threads())
    assert StorageError.__name__ not in target.reasons


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
