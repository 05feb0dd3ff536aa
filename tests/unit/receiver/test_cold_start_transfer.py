"""Transfers of images that no instance serves yet: chunks of files, and engine loaders."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from rfork.errors import NoSource, UserError
from rfork.image import ranges
from rfork.image.chunks import MIB, ChunkState
from rfork.image.layout import Manifest
from rfork.schema import ChunkAssignment, Plan, StorageAssignment
from rfork.source.seed import Seed
from rfork.testing.transport import FaultInjection
from tests.unit.receiver.cold_start_targets import (
    ALL,
    ORIGIN,
    RelayTarget,
    X,
    failing_leader,
    planner_script,
    provisional_relay,
    run_concurrently,
    verified_by_source,
    wait_for_chunks,
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


def test_the_elected_target_reads_its_files(fleet: Fleet) -> None:
    """Every byte comes from the files and is reported under their name.

    The manifest is computed from them.
    """
    source_image = image(1)
    files = Files(source_image)
    target = Target(fleet, planner_script(plan(storage=[reads(files, ALL)])), files=[files])
    stats = target.run()
    assert content_hash(source_image) == content_hash(target.image)
    assert [source_image.manifest()] == target.serving_state.manifests
    assert [("checkpoint:file:///files", "node", "checkpoint", CHUNKS, CHUNKS * MIB)] == [
        (share.source_id, share.host, share.transport, share.verified_chunks, share.verified_bytes)
        for share in stats.sources
    ]
    assert list(range(CHUNKS)) == sorted(files.chunks_read)
    assert CHUNKS * MIB == stats.bytes_read
    assert ORIGIN == target.chunk_state.provisional_id


def test_a_target_reports_storage_activity_until_it_has_all_chunks(fleet: Fleet) -> None:
    """Its readers therefore know that chunks may arrive slowly."""
    source_image = image(1)
    files = Files(source_image)
    target = Target(
        fleet,
        planner_script(plan(storage=[reads(files, ALL)])),
        settings(max_inflight_chunks=1),
        files=[files],
    )
    activity_reported = threading.Event()
    report_activity = target.serving_state.report_storage_activity

    def report_and_signal(read_at: Callable[[], float] | None, *, relayed: bool = False) -> None:
        report_activity(read_at, relayed=relayed)
        if read_at is not None:
            activity_reported.set()

    target.serving_state.report_storage_activity = report_and_signal  # type: ignore[method-assign]
    files.before_read = lambda chunk: activity_reported.wait(NEVER_S)
    target.run()
    assert [True, False] == target.serving_state.storage_activity


def test_a_follower_reads_while_the_leader_reads(fleet: Fleet) -> None:
    """Neither waits for the complete image.

    The leader's disk returns a chunk only once the follower has the previous one.
    """
    source_image = image(1)
    files = Files(source_image)
    leader = RelayTarget(fleet, "leader", planner_script(plan(storage=[reads(files, ALL)])), [files])
    follower = RelayTarget(fleet, "follower", planner_script(plan(route(leader.relay, ALL))))
    steps: list[bool] = []
    files.before_read = lambda chunk: steps.append(wait_for_chunks(follower.target.chunk_state, chunk))
    run_concurrently(leader, follower)
    assert [True] * CHUNKS == steps
    assert [content_hash(source_image)] * 2 == [content_hash(leader.image), content_hash(follower.image)]
    assert {"leader": CHUNKS} == verified_by_source(follower.target)
    assert [source_image.manifest().weights_id] * 2 == [leader.weights_id, follower.weights_id]


def test_digests_are_forwarded_from_relay_to_relay(fleet: Fleet) -> None:
    """Three targets form a chain without a manifest: storage is read once, and all have the same bytes."""
    source_image = image(1)
    files = Files(source_image)
    first = RelayTarget(fleet, "first", planner_script(plan(storage=[reads(files, ALL)])), [files])
    second = RelayTarget(fleet, "second", planner_script(plan(route(first.relay, ALL))))
    third = RelayTarget(fleet, "third", planner_script(plan(route(second.relay, ALL))))
    files.before_read = lambda chunk: wait_for_chunks(third.target.chunk_state, chunk)
    run_concurrently(first, second, third)
    assert [content_hash(source_image)] * 3 == [content_hash(member.image) for member in (first, second, third)]
    assert {"second": CHUNKS} == verified_by_source(third.target)
    assert CHUNKS == len(files.chunks_read)


def test_a_relay_that_serves_corrupt_provisional_chunks_is_blamed(fleet: Fleet) -> None:
    """Bytes that do not match the digest sent with them are discarded."""
    source_image = image(1)
    files = Files(source_image)
    leader = RelayTarget(
        fleet,
        "leader",
        planner_script(plan(storage=[reads(files, ALL)])),
        [files],
        faults=FaultInjection(corrupt_chunks={2}),
    )
    script = planner_script(plan(route(leader.relay, ALL)), plan(reason="no other source"))
    follower = RelayTarget(fleet, "follower", script)
    files.before_read = lambda chunk: wait_for_chunks(follower.target.chunk_state, chunk) if chunk < 3 else True
    ended = run_concurrently(leader, follower)[1]
    assert [("leader", "source", "SourceCorrupt")] == script.faults
    assert 2 == len(follower.target.chunk_state)
    assert NoSource is type(ended)


def test_a_failure_of_local_files_is_reported_as_a_storage_fault(fleet: Fleet) -> None:
    """The planner receives it under this instance's own id, and verified chunks are kept."""
    source_image = image(1)
    files = Files(source_image, fails_at=3 * MIB)
    seed = fleet.source("seed", source_image)
    script = planner_script(plan(storage=[reads(files, ALL)]), plan(route(seed, ALL)))
    target = Target(fleet, script, settings(max_inflight_chunks=1), files=[files])
    target.run()
    assert [("target", "storage", "StorageError")] == script.faults
    assert content_hash(source_image) == content_hash(target.image)
    assert {"checkpoint:file:///files": 3, "seed": 3} == verified_by_source(target)
    assert [] == target.serving_state.dropped


@pytest.mark.parametrize("error", [UserError("bad"), ZeroDivisionError("a bug")], ids=["user error", "bug"])
def test_any_exception_of_a_file_reader_is_a_storage_fault(fleet: Fleet, error: Exception) -> None:
    """The fork does not hang."""
    files = Files(image(1), error=error, fails_at=0)
    script = planner_script(plan(storage=[reads(files, ALL)]), plan(reason="no other source"))
    with pytest.raises(NoSource):
        Target(fleet, script, files=[files]).run()
    assert [("target", "storage")] == [(name, fault) for name, fault, _ in script.faults]


def test_chunks_of_a_snapshot_are_verified(fleet: Fleet) -> None:
    """Its manifest is published before its first chunk, and bytes that do not match are the storage's fault."""
    source_image, corrupt_image = image(1), image(1)
    corrupt_image.regions[1][0] ^= 1
    files = Files(corrupt_image, storage_type="snapshot", manifest=source_image.manifest())
    seed = fleet.source("seed", source_image)
    script = planner_script(plan(storage=[reads(files, ALL)]), plan(route(seed, ALL)))
    target = Target(fleet, script, settings(max_inflight_chunks=1), files=[files])
    target.run()
    assert [("target", "storage", "StorageError")] == script.faults
    assert content_hash(source_image) == content_hash(target.image)
    assert {"snapshot:file:///files": 3, "seed": 3} == verified_by_source(target)
    assert target.chunk_state.provisional_id is None


def test_two_targets_share_a_snapshot(fleet: Fleet) -> None:
    """Each reads one half from storage and the other half from its partner."""
    source_image = image(1)
    manifest = source_image.manifest()
    disks = [Files(source_image, storage_type="snapshot", manifest=manifest) for _ in range(2)]
    halves = [(0, 3), (3, 6)]
    members: list[RelayTarget] = []

    def shared_plan(member_index: int) -> Plan:
        other = members[1 - member_index].relay
        return plan(route(other, halves[1 - member_index]), storage=[reads(disks[member_index], halves[member_index])])

    members.append(RelayTarget(fleet, "one", planner_script(lambda: shared_plan(0)), [disks[0]]))
    members.append(RelayTarget(fleet, "two", planner_script(lambda: shared_plan(1)), [disks[1]]))
    run_concurrently(*members)
    assert [content_hash(source_image)] * 2 == [content_hash(member.image) for member in members]
    assert [[0, 1, 2], [3, 4, 5]] == [sorted(disk.chunks_read) for disk in disks]


def test_a_follower_continues_when_the_leader_dies(fleet: Fleet) -> None:
    """It reads only the missing chunks, after it has found its verified chunks in its own files."""
    source_image = image(1)
    leader, follower_files = failing_leader(fleet, source_image), Files(source_image)
    script = planner_script(lambda: plan(route(leader.relay, ALL)), plan(storage=[reads(follower_files, (3, 6))]))
    follower = RelayTarget(fleet, "follower", script, [follower_files])
    run_concurrently(leader, follower)
    assert content_hash(source_image) == content_hash(follower.image)
    assert {"leader": 3, "checkpoint:file:///files": 3} == verified_by_source(follower.target)
    # Chunks are compared one by one; after that, several threads read.
    assert [0, 1, 2] == follower_files.chunks_read[:3]
    assert [3, 4, 5] == sorted(follower_files.chunks_read[3:])
    assert 0 == follower.relay.generation
    assert source_image.manifest().weights_id == follower.weights_id


def test_two_assignments_of_one_storage_are_merged(fleet: Fleet) -> None:
    """A plan that names a storage twice means all the chunks of both assignments."""
    source_image = image(1)
    files = Files(source_image)
    script = planner_script(plan(storage=[reads(files, (0, 3)), reads(files, (3, CHUNKS))]))
    Target(fleet, script, files=[files]).run()
    assert 1 == len(script.faults_by_request)
    assert list(range(CHUNKS)) == sorted(files.chunks_read)


def test_current_assignments_are_reported_to_the_planner(fleet: Fleet) -> None:
    """A new request names each source and its chunks; this instance's own id stands for its storage."""
    source_image = image(1)
    files, seed = (
        Files(source_image),
        fleet.source("seed", source_image, chunk_state=ChunkState(source_image.layout.chunks), knows_manifest=False),
    )
    proceed = threading.Event()
    files.before_read = lambda chunk: proceed.wait(NEVER_S)

    def single_plan() -> Plan:
        proceed.set()
        return plan(storage=[reads(files, ALL)])

    shared = plan(route(seed, (0, 2)), storage=[reads(files, (2, 5))], retry_after_s=0.01)
    script = planner_script(shared, single_plan)
    Target(fleet, script, files=[files]).run()
    assert [
        (),
        (
            ChunkAssignment(source_id="seed", chunks=((0, 2),)),
            ChunkAssignment(source_id="target", chunks=((2, 5),)),
        ),
    ] == [tuple(sorted(current, key=lambda share: share.source_id)) for current in script.current]


def test_a_plan_with_an_unknown_storage_is_rejected(fleet: Fleet) -> None:
    """The plan is reported as invalid, and nothing hangs."""
    script = planner_script(plan(storage=[reads(Files(image(1)), ALL)]), plan(reason="no other source"))
    with pytest.raises(NoSource):
        Target(fleet, script).run()
    assert [("target", "storage")] == [(name, fault) for name, fault, _ in script.faults]
    assert [] == live_transfer_threads()


def test_only_a_reader_of_the_files_completes_the_manifest(fleet: Fleet) -> None:
    """If the leader dies before it confirms all its chunks, a target with the files compares them."""
    source_image = image(1)
    leader, follower_files = (
        provisional_relay(fleet, "leader", source_image, ORIGIN, range(CHUNKS)),
        Files(source_image),
    )

    def remaining_plan() -> Plan:
        return plan(storage=[reads(follower_files, *ranges.subtract([ALL], follower.target.chunk_state.verified))])

    script = planner_script(lambda: plan(route(leader, ALL)), remaining_plan)
    follower = RelayTarget(fleet, "follower", script, [follower_files])
    running = threading.Thread(target=follower.target.run)
    running.start()
    complete = wait_for_chunks(follower.target.chunk_state, CHUNKS)
    before = follower.weights_id
    for channel in list(leader._served.leases._channels):
        leader.close_channel(channel)
    running.join()
    assert complete
    assert before is None
    assert source_image.manifest().weights_id == follower.weights_id
    assert {"leader": CHUNKS, "checkpoint:file:///files": 1} == verified_by_source(follower.target)
    assert [*range(CHUNKS)] == follower_files.chunks_read


def reports_relayed_activity(seed: Seed) -> bool:
    activity = seed.progress_since(()).storage_activity
    return activity is not None and activity.relayed


def test_a_relay_forwards_that_its_source_is_loading(fleet: Fleet) -> None:
    """A target two hops downstream of the leader is notified as well."""
    source_image = image(1)
    leader = fleet.source(
        "leader", source_image, chunk_state=ChunkState(source_image.layout.chunks), knows_manifest=False
    )
    leader.report_storage_activity(time.monotonic)
    relay = RelayTarget(fleet, "relay", planner_script(plan(route(leader, ALL))))
    activity_seen = threading.Event()
    with relay.relay.on_change(lambda: activity_seen.set() if reports_relayed_activity(relay.relay) else None):
        running = threading.Thread(target=relay.target.run)
        running.start()
        was_seen = activity_seen.wait(NEVER_S)
        manifest = source_image.manifest()
        leader.set_manifest(manifest)
        for chunk, digest in enumerate(manifest.digests):
            leader.chunk_state.mark_verified(chunk, digest)
        running.join()
    assert was_seen
    assert not reports_relayed_activity(relay.relay)
    assert content_hash(source_image) == content_hash(relay.image)


LOADER = StorageAssignment(kind="loader", uri="", chunks=(ALL,))


def test_the_elected_target_runs_its_loader(fleet: Fleet) -> None:
    """The loader fills the image on the caller's thread, and every byte counts as read from storage."""
    source_image = image(1)
    threads: list[str] = []
    target = Target(fleet, planner_script(plan(storage=[LOADER])), run_loader=lambda read: load(read))

    def load(read: StorageAssignment) -> Manifest:
        threads.append(threading.current_thread().name)
        for target_region, source_region in zip(target.image.regions, source_image.regions, strict=True):
            target_region.copy_(source_region)
        return target.image.manifest()

    stats = target.run()
    assert [threading.current_thread().name] == threads
    assert [True, False] == target.serving_state.storage_activity
    assert [source_image.manifest()] == target.serving_state.manifests
    assert {"loader:": CHUNKS} == verified_by_source(target)
    assert CHUNKS * MIB == stats.bytes_read
    assert CHUNKS * MIB == stats.loader_bytes  # all bytes arrive in one step, so no rate is reported
    assert ALL == target.chunk_state.verified[0]


def test_a_failed_loader_is_reported_and_another_source_requested(fleet: Fleet) -> None:
    """The planner receives a storage fault, and a seed that has appeared meanwhile serves everything."""
    source_image = image(1)
    seed = fleet.source("seed", source_image)
    script = planner_script(plan(storage=[LOADER]), plan(route(seed, ALL)))
    target = Target(fleet, script)
    target.run()
    assert [("target", "storage", "StorageError")] == script.faults
    assert content_hash(source_image) == content_hash(target.image)


def test_verified_chunks_are_dropped_before_a_loader_runs(fleet: Fleet) -> None:
    """Nothing else is read while the loader writes."""
    source_image = image(1)
    first = provisional_relay(fleet, "first", image(2), X, [0, 1])
    script = planner_script(plan(route(first, (0, 2))), plan(storage=[LOADER]))
    verified: list[int] = []
    target = Target(fleet, script, run_loader=lambda read: load(read))

    def load(read: StorageAssignment) -> Manifest:
        verified.append(len(target.chunk_state))
        for target_region, source_region in zip(target.image.regions, source_image.regions, strict=True):
            target_region.copy_(source_region)
        return target.image.manifest()

    target.run()
    assert [0] == verified
    assert [(0, 1)] == target.serving_state.dropped
    assert content_hash(source_image) == content_hash(target.image)
    assert () == first.report().readers
