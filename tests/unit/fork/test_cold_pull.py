"""Pulls of images that nobody holds yet: one reads storage, the others get it from there meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial

import pytest

from rfork.errors import DeadlinePassed, NoSource, StorageError, UserError
from rfork.fork.puller import Pulled
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
    note = target.relay.say_loading

    def say_loading(loading: bool) -> None:
        note(loading)
        if loading:
            told.set()

    target.relay.say_loading = say_loading  # type: ignore[method-assign]
    files.before_read = lambda chunk: told.wait(NEVER_S)
    target.run()
    assert [True, False] == target.relay.loading


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
    """It reads the missing chunks alone, and looks at two that it holds first."""
    held = image(1)
    leader, own = leader_that_dies(fleet, held), Files(held)
    script = planned(lambda: plan(route(leader.relay, ALL)), plan(storage=[reads(own, (3, 6))]))
    follower = Member(fleet, "follower", script, [own])
    at_once(leader, follower)
    assert (content(held), {"leader": 3, "checkpoint:file:///files": 3}) == (
        content(follower.image),
        given(follower.target),
    )
    assert ([0, 2, 3, 4, 5], 0, held.manifest().weights_id) == (
        own.chunks_read,
        follower.relay.generation,
        follower.weights_id,
    )


def test_other_files_of_one_origin_are_not_mixed(fleet: Fleet) -> None:
    """Where its own files turn out to differ from what it holds, it drops that and reads everything."""
    held, other = image(1), image(2)
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
    script = planned(plan(route(first, (0, 3))), plan(route(second, (3, 6))), plan(route(second, ALL)))
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


@pytest.mark.parametrize("loading", [True, False])
def test_how_long_a_silent_leader_is_waited_for(fleet: Fleet, loading: bool) -> None:
    """A leader that says it loads is waited for until the deadline; one that says nothing is given up."""
    held = image(1)
    leader = fleet.source("leader", held, board=ChunkBoard(held.layout.chunks), knows=False)
    leader.say_loading(loading)
    script = planned(plan(route(leader, ALL)), plan(reason="nobody else"))
    target = Target(fleet, script, settings(stall_s=0.1), deadline_s=1.0)
    with pytest.raises(DeadlinePassed if loading else NoSource):
        target.run()
    assert ([] if loading else [("leader", "source", "SourceStalled")]) == script.faults


def test_a_relay_passes_on_that_its_source_loads(fleet: Fleet) -> None:
    """Whoever waits behind one that waits behind the leader is told so too."""
    held = image(1)
    leader = fleet.source("leader", held, board=ChunkBoard(held.layout.chunks), knows=False)
    leader.say_loading(True)
    relay = Member(fleet, "relay", planned(plan(route(leader, ALL))))
    told = threading.Event()
    with relay.relay.on_change(lambda: told.set() if relay.relay.news(()).loading else None):
        running = threading.Thread(target=relay.target.run)
        running.start()
        heard = told.wait(NEVER_S)
        manifest = held.manifest()
        leader.learn(manifest)
        for chunk, digest in enumerate(manifest.digests):
            leader.board.mark(chunk, digest)
        running.join()
    assert (True, False, content(held)) == (heard, relay.relay.news(()).loading, content(relay.image))


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
    assert ([threading.current_thread().name], [True, False]) == (threads, target.relay.loading)
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
