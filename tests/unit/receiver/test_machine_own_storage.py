"""The transfer machine with own storage that it reads besides slow peers, or instead of them."""

from __future__ import annotations

from dataclasses import replace

from rfork.errors import SourceUnavailable
from rfork.receiver.events import (
    CloseSource,
    ExcludeStorage,
    Finish,
    MeasureOwnLoad,
    OpenPeer,
    OpenStorage,
    OwnLoadMeasured,
    ReportStorageActivity,
    RequestPlan,
    SourceActivity,
    StorageOpened,
)
from rfork.receiver.machine import OWN_STORAGE_IDLE_TIMEOUT_S
from rfork.receiver.own_load import OwnLoad
from tests.unit.receiver.fleet import CHUNKS, IMAGE_BYTES, settings
from tests.unit.receiver.machines import (
    ALL,
    FILES,
    MANIFEST,
    ORIGIN,
    WRONG,
    MachineHarness,
    chunks_read,
    manifest_of,
    name_of,
    of_type,
    peer,
)

NAME = name_of(FILES)
OWN_FILES = OwnLoad("checkpoint", 10 * IMAGE_BYTES, 0.1, FILES.model_copy(update={"chunks": ()}))
OWN_LOADER = OwnLoad("loader", IMAGE_BYTES, 1.0, is_sampled=False)
ALIVE = {"a": SourceActivity(message_at=1e9, progress_at=1e9)}


def stalled_fork(**changed: float) -> MachineHarness:
    """Return a machine whose only peer has offered all chunks and delivers none, long enough to be measured."""
    harness = MachineHarness(settings(**changed), own_storage="local")
    harness.plan(peer("a", ALL))
    harness.offer("a", ALL)
    harness.wait(0.5, ALIVE)
    return harness


def joined_fork(**changed: float) -> MachineHarness:
    """Return that machine once it reads its files besides the peer."""
    harness = stalled_fork(**changed)
    harness.handle(OwnLoadMeasured(OWN_FILES))
    harness.open_storage()
    return harness


# -- measurement ----------------------------------------------------------------------------------------


def test_storage_is_measured_once_while_a_peer_is_slow() -> None:
    """A second measurement would only load the disk."""
    harness = stalled_fork()
    harness.wait(5.0, ALIVE)
    assert [MeasureOwnLoad()] == harness.all_of(MeasureOwnLoad)


def test_a_fast_fork_measures_nothing() -> None:
    """It would read the disk for nothing."""
    harness = MachineHarness(own_storage="local")
    harness.plan(peer("a", ALL))
    harness.offer("a", ALL)
    harness.tick(0.1, ALIVE)
    harness.read("a", 0, 1, 2, 3)
    harness.wait(0.15, ALIVE)
    assert [] == harness.all_of(MeasureOwnLoad)


def test_a_fork_without_storage_measures_nothing() -> None:
    """There is nothing to compare its sources with."""
    harness = MachineHarness()
    harness.plan(peer("a", ALL))
    harness.offer("a", ALL)
    harness.wait(5.0, ALIVE)
    assert [] == harness.all_of(MeasureOwnLoad)


def test_an_elected_instance_measures_nothing() -> None:
    """It reads its storage already."""
    harness = MachineHarness(own_storage="local")
    harness.plan(storage=[FILES])
    harness.open_storage()
    harness.wait(5.0)
    assert [] == harness.all_of(MeasureOwnLoad)


def test_a_suspended_process_does_not_blame_its_sources() -> None:
    """Bytes that were not received meanwhile are no measure of their rate."""
    harness = MachineHarness(own_storage="local")
    harness.plan(peer("a", ALL))
    harness.offer("a", ALL)
    harness.tick(60.0, ALIVE)
    assert [] == harness.all_of(MeasureOwnLoad)


def test_storage_that_cannot_be_measured_is_not_used() -> None:
    """The fork continues with its peers."""
    harness = stalled_fork()
    harness.handle(OwnLoadMeasured(None))
    harness.wait(5.0, ALIVE)
    assert [] == harness.all_of(OpenStorage)


# -- own storage as a source ----------------------------------------------------------------------------


def test_files_become_a_source_besides_the_peer() -> None:
    """The plan stays as it is."""
    harness = stalled_fork()
    opened = of_type(harness.handle(OwnLoadMeasured(OWN_FILES)), OpenStorage)
    assert [OWN_FILES.storage] == [each.assignment for each in opened]
    assert [] == harness.all_of(CloseSource)


def test_files_are_read_from_the_end() -> None:
    """The peer reads from the beginning."""
    harness = stalled_fork()
    harness.handle(OwnLoadMeasured(OWN_FILES))
    assert [CHUNKS - 1] == chunks_read(harness.open_storage())


def test_reads_of_the_peer_do_not_occupy_those_of_the_files() -> None:
    """All reads from a stalled peer may be in flight."""
    harness = joined_fork(max_inflight_chunks=1)
    assert [0, CHUNKS - 1] == chunks_read(harness.actions)


def test_peer_and_files_complete_the_image() -> None:
    """Each chunk is read once."""
    harness = joined_fork(max_inflight_chunks=1)
    harness.read(NAME, 5, 4, 3)
    harness.read("a", 0, 1)
    harness.read(NAME, 2)
    assert "complete" == harness.result
    assert 0 == harness.machine.stats.bytes_repeated


def test_the_share_of_each_source_is_counted() -> None:
    """The report shows how much came from own storage."""
    harness = joined_fork(max_inflight_chunks=1)
    harness.read(NAME, 5, 4)
    harness.read("a", 0)
    shares = {share.source_id: share.verified_chunks for share in harness.machine.stats.sources}
    assert {NAME: 2, "a": 1} == shares
    assert NAME == harness.machine.stats.joined_storage


def test_wrong_bytes_of_the_files_blame_no_peer() -> None:
    """The files are left, and the peer serves their chunks."""
    harness = joined_fork(max_inflight_chunks=1)
    harness.read(NAME, 5, digest=WRONG)
    harness.read("a", 0, 1, 2, 3, 4, 5)
    assert "complete" == harness.result
    assert [ExcludeStorage(NAME)] == harness.all_of(ExcludeStorage)
    assert [()] == [request.faults for request in harness.all_of(RequestPlan)][:1]
    assert ["SlowSources", "StorageError"] == harness.reasons


def test_files_of_other_weights_are_not_read() -> None:
    """A snapshot names its weights before any of its chunks is read."""
    harness = stalled_fork()
    harness.handle(OwnLoadMeasured(OWN_FILES))
    harness.open_storage(manifest=manifest_of(2))
    assert [] == [chunk for chunk in chunks_read(harness.actions) if chunk == CHUNKS - 1]
    assert ["SlowSources", "StorageError"] == harness.reasons


def test_a_new_plan_does_not_end_the_reads_of_the_files() -> None:
    """It does not name them."""
    harness = joined_fork(max_inflight_chunks=1)
    harness.plan(peer("b", ALL))
    assert harness.connections[NAME] not in [closed.connection for closed in harness.all_of(CloseSource)]


def test_files_continue_when_all_peers_have_failed() -> None:
    """The fork then ends without any."""
    harness = joined_fork(max_inflight_chunks=1)
    harness.fail_read("a", 0, SourceUnavailable("gone"))
    harness.read(NAME, 5, 4, 3, 2, 1, 0)
    assert "complete" == harness.result


def test_readers_are_not_made_to_wait_for_the_files() -> None:
    """Their own timeouts apply: this instance is no elected reader."""
    harness = joined_fork()
    harness.wait(1.0, {**ALIVE, NAME: SourceActivity(message_at=1e9, progress_at=1e9, storage_at=1e9)})
    assert [] == [each for each in harness.all_of(ReportStorageActivity) if each.active_at is not None]


def test_a_disk_that_hangs_is_left() -> None:
    """The peer serves its chunks."""
    harness = joined_fork(max_inflight_chunks=1)
    activity = SourceActivity(message_at=1e9, progress_at=1e9, idle_s=OWN_STORAGE_IDLE_TIMEOUT_S + 0.1)
    harness.wait(0.5, {**ALIVE, NAME: activity})
    assert harness.connections[NAME] in [closed.connection for closed in harness.all_of(CloseSource)]


# -- peers that are overtaken ---------------------------------------------------------------------------


def overtaken_fork() -> MachineHarness:
    """Return a machine whose peer delivers nothing, and whose files have delivered all but its chunk."""
    harness = joined_fork(max_inflight_chunks=1)
    harness.tick(0.5, ALIVE)
    harness.read(NAME, 5, 4, 3, 2, 1)
    return harness


def test_the_last_chunk_of_a_stalled_peer_is_read_from_the_files() -> None:
    """Once its own read has ended."""
    harness = overtaken_fork()
    assert [harness.connections["a"]] == [closed.connection for closed in harness.all_of(CloseSource)]
    actions = harness.fail_read("a", 0, SourceUnavailable("closed"))
    assert [0] == chunks_read(actions)
    harness.read(NAME, 0)
    assert "complete" == harness.result


def test_an_overtaken_peer_is_not_blamed() -> None:
    """It is only slow: the reason is in the report, and the planner gets no fault."""
    harness = overtaken_fork()
    harness.fail_read("a", 0, SourceUnavailable("closed"))
    assert ["SlowSources", "SlowSources"] == harness.reasons
    assert [()] == [request.faults for request in harness.all_of(RequestPlan)]
    assert 1 == len(harness.all_of(OpenPeer))


# -- a loader instead of the fork -----------------------------------------------------------------------


def test_a_fork_is_given_up_for_a_loader() -> None:
    """Once its sources have delivered nothing for a second."""
    harness = stalled_fork()
    harness.handle(OwnLoadMeasured(OWN_LOADER))
    assert [] == harness.all_of(Finish)
    harness.wait(1.0, ALIVE)
    assert harness.result is not None
    assert harness.result.startswith("SlowSources: the fork was abandoned: the sources need")


def test_a_fork_that_continues_is_not_given_up() -> None:
    """The rest takes no longer than the loader."""
    harness = stalled_fork(max_inflight_chunks=1)
    harness.handle(OwnLoadMeasured(replace(OWN_LOADER, load_s=10.0)))
    for chunk in range(CHUNKS - 1):
        harness.wait(0.5, ALIVE)
        harness.read("a", chunk)
    assert [] == harness.all_of(Finish)


def test_files_replace_a_fork_without_a_manifest() -> None:
    """Single chunks could not be verified."""
    harness = MachineHarness(own_storage="local")
    harness.plan(peer("a", ALL))
    harness.wait(0.5, ALIVE)
    harness.handle(OwnLoadMeasured(OWN_FILES))
    harness.wait(1.5, ALIVE)
    assert harness.result is not None
    assert harness.result.startswith("SlowSources")


def test_storage_that_opens_after_the_manifest_is_dropped_serves_nothing() -> None:
    """Its chunks belong to weights that no source has any more."""
    harness = stalled_fork()
    harness.handle(OwnLoadMeasured(OWN_FILES))
    harness.machine._verifier.manifest = None
    harness.handle(StorageOpened(harness.connections[NAME], MANIFEST, ORIGIN, 2, "f" * 16))
    assert ["SlowSources", "StorageError"] == harness.reasons
