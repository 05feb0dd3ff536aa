"""Timeouts of storage and of the instances that read it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from rfork.errors import DeadlineExceeded, NoSource, StorageError
from rfork.image.chunks import ChunkState
from rfork.schema import Plan
from tests.unit.receiver.cold_start_targets import (
    ALL,
    RelayTarget,
    planner_script,
    run_concurrently,
    verified_by_source,
)
from tests.unit.receiver.fleet import (
    CHUNKS,
    NEVER_S,
    Files,
    Fleet,
    Target,
    content_hash,
    image,
    live_transfer_threads,
    plan,
    reads,
    route,
    settings,
)


@pytest.mark.parametrize(
    ("read_at", "ended", "stall_s"),
    [
        (None, NoSource, 0.1),
        (lambda: 0.0, NoSource, 0.1),
        # High enough that a busy test machine does not make the leader appear silent.
        (time.monotonic, DeadlineExceeded, 0.5),
    ],
    ids=["no reads", "stalled", "slow"],
)
def test_a_leader_without_chunks_is_replaced_once_its_storage_stalls(
    fleet: Fleet, read_at: Callable[[], float] | None, ended: type[Exception], stall_s: float
) -> None:
    """It is waited for as long as its storage returns data."""
    source_image = image(1)
    leader = fleet.source(
        "leader", source_image, chunk_state=ChunkState(source_image.layout.chunks), knows_manifest=False
    )
    leader.report_storage_activity(read_at)
    script = planner_script(plan(route(leader, ALL)), plan(reason="no other source"))
    chosen = settings(source_idle_timeout_s=stall_s, storage_idle_timeout_s=3 * stall_s)
    target = Target(fleet, script, chosen, deadline_s=3.5 * stall_s if ended is DeadlineExceeded else NEVER_S)
    with pytest.raises(ended):
        target.run()
    faults = [("leader", "source", "SourceTimeout")] if ended is NoSource else []
    assert faults == script.faults


def test_a_follower_of_a_stalled_leader_reads_its_own_storage(fleet: Fleet) -> None:
    """It waits up to the timeout, then the planner elects it; it keeps its verified chunks."""
    source_image, proceed = image(1), threading.Event()
    blocked_files, follower_files = Files(source_image), Files(source_image)
    blocked_files.before_read = lambda chunk: proceed.wait(NEVER_S) if chunk == 2 else True
    script = planner_script(plan(storage=[reads(blocked_files, ALL)]), plan(reason="no other source"))
    leader = RelayTarget(
        fleet,
        "leader",
        script,
        [blocked_files],
        chosen=settings(max_inflight_chunks=1, storage_idle_timeout_s=1.0),
    )
    follower_script = planner_script(
        lambda: plan(route(leader.relay, ALL)), lambda: plan(storage=[reads(follower_files, (2, CHUNKS))])
    )
    # The leader is responsive and only its storage stalls, so the storage timeout applies.
    chosen = settings(max_inflight_chunks=1, source_idle_timeout_s=1.0, storage_idle_timeout_s=0.5)
    follower = RelayTarget(fleet, "follower", follower_script, [follower_files], chosen=chosen)
    ended = run_concurrently(leader, follower)
    proceed.set()
    assert type(ended[0]) is NoSource
    assert [("target", "storage", "StorageError")] == script.faults
    assert content_hash(source_image) == content_hash(follower.image)
    assert [("leader", "source", "SourceTimeout")] == follower_script.faults
    assert {"leader": 2} == {
        name: count for name, count in verified_by_source(follower.target).items() if name == "leader"
    }


def test_two_targets_that_wait_for_each_other_fail(fleet: Fleet) -> None:
    """In a cycle, no target can extend another's wait: the time of the last read grows old everywhere."""
    source_image = image(1)
    disks = [Files(source_image, storage_type="snapshot", manifest=source_image.manifest()) for _ in range(2)]
    members: list[RelayTarget] = []
    chosen = settings(max_inflight_chunks=1, source_idle_timeout_s=0.2, storage_idle_timeout_s=0.4)

    def shared_plan(member_index: int) -> Plan:
        return plan(route(members[1 - member_index].relay, (3, 6)), storage=[reads(disks[member_index], (0, 3))])

    scripts = [
        planner_script(partial(shared_plan, member_index), plan(reason="no other source")) for member_index in range(2)
    ]
    for member_index, name in enumerate(("one", "two")):
        members.append(RelayTarget(fleet, name, scripts[member_index], [disks[member_index]], chosen=chosen))
    ended = run_concurrently(*members)
    assert [NoSource, NoSource] == [type(each) for each in ended]
    reported_faults = {(script.faults[0][1], script.faults[0][2]) for script in scripts if script.faults}
    assert {("source", "SourceTimeout"), ("source", "SourceUnavailable")} >= reported_faults > set()


def test_stalled_storage_does_not_block_the_fork(fleet: Fleet) -> None:
    """It is reported as stalled and another source serves; what the storage returns later changes nothing."""
    source_image, proceed, read_resumed = image(1), threading.Event(), threading.Event()
    blocked_files = Files(image(2))

    def hang(chunk: int) -> bool:
        read_resumed.set() if proceed.wait(NEVER_S) else None
        return True

    blocked_files.before_read = hang
    seed = fleet.source("seed", source_image)
    script = planner_script(plan(storage=[reads(blocked_files, ALL)]), plan(route(seed, ALL)))
    target = Target(fleet, script, settings(storage_idle_timeout_s=0.3), files=[blocked_files])
    target.run()
    threads = live_transfer_threads()
    proceed.set()
    assert read_resumed.wait(NEVER_S)
    assert content_hash(source_image) == content_hash(target.image)
    assert [("target", "storage", "StorageError")] == script.faults
    assert [] == threads


def test_storage_that_never_returns_data_does_not_extend_the_deadline(fleet: Fleet) -> None:
    """The deadline is extended only for storage that makes progress."""
    files, proceed = Files(image(1)), threading.Event()
    files.before_read = lambda chunk: proceed.wait(NEVER_S)
    target = Target(fleet, planner_script(plan(storage=[reads(files, ALL)])), deadline_s=0.3, files=[files])
    with pytest.raises(DeadlineExceeded):
        target.run()
    proceed.set()
    assert [] == live_transfer_threads()
    assert 0 == len(target.chunk_state)


def test_storage_that_makes_progress_extends_the_deadline(fleet: Fleet) -> None:
    """A leader reads to the end because others wait for it and would have to start again."""
    source_image = image(1)
    files, pause = Files(source_image), threading.Event()
    target = Target(
        fleet,
        planner_script(plan(storage=[reads(files, ALL)])),
        settings(max_inflight_chunks=1, storage_idle_timeout_s=30.0),
        deadline_s=1.0,
        files=[files],
    )
    deadline = time.monotonic() + 1.1
    # The first read returns immediately, all others after the deadline would have passed.
    files.before_read = lambda chunk: pause.wait(max(0.0, deadline - time.monotonic())) if chunk else None
    target.run()
    assert content_hash(source_image) == content_hash(target.image)
    assert list(range(CHUNKS)) == sorted(files.chunks_read)
    assert time.monotonic() > deadline


def test_a_deadline_ends_a_read_of_storage(fleet: Fleet) -> None:
    """After the deadline nothing more is read, and no source is blamed."""
    files = Files(image(1))
    target = Target(fleet, planner_script(plan(storage=[reads(files, ALL)])), deadline_s=0.2, files=[files])
    ended = threading.Event()
    files.before_read = lambda chunk: ended.wait(NEVER_S)
    with pytest.raises(DeadlineExceeded):
        target.run()
    ended.set()
    assert [] == target.reasons
    assert [] == live_transfer_threads()
    assert StorageError.__name__ not in target.reasons
