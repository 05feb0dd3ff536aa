"""The transfer machine with this instance's own storage, and with a loader that fills the complete image."""

from __future__ import annotations

import pytest

from rfork.errors import StorageError, StorageNotFound
from rfork.image.chunks import MIB
from rfork.receiver.chunk_scheduler import ChunkRead
from rfork.receiver.events import (
    CloseSource,
    CompareFiles,
    ExcludeStorage,
    FilesCompared,
    Finish,
    InvalidateChunks,
    LoaderFailed,
    LoaderFinished,
    MarkVerified,
    OpenPeer,
    PrefetchChunks,
    ProvisionalDigests,
    ReplanSuggested,
    ReportStorageActivity,
    RequestPlan,
    RunLoader,
    SetManifest,
    SetProvisionalId,
    SourceActivity,
)
from rfork.receiver.machine import FIRST_RETRY_S, POLL_INTERVAL_S
from tests.unit.receiver.fleet import CHUNKS, settings
from tests.unit.receiver.machines import (
    ALL,
    FILES,
    LOADER,
    MANIFEST,
    ORIGIN,
    RIGHT,
    WRONG,
    MachineHarness,
    chunks_read,
    chunks_verified,
    manifest_of,
    name_of,
    of_type,
    peer,
)

NAME = name_of(FILES)
ALIVE = SourceActivity(message_at=1e9, progress_at=1e9)
"""Activity of a peer that never stalls."""


def reading_files(*, max_inflight_chunks: int = 2, deadline_s: float = 1e6) -> MachineHarness:
    """Return a machine that reads all chunks from files whose manifest is unknown."""
    harness = MachineHarness(
        settings(max_inflight_chunks=max_inflight_chunks, storage_idle_timeout_s=3.0), deadline_s=deadline_s
    )
    harness.plan(storage=[FILES])
    harness.open_storage()
    return harness


def storage_activity(*, idle_s: float = 0.0, block_at: float | None = None) -> dict[str, SourceActivity]:
    """Return the activity of the files."""
    at = block_at or 0.0
    return {NAME: SourceActivity(message_at=at, progress_at=at, storage_at=at, block_at=block_at, idle_s=idle_s)}


# -- files ----------------------------------------------------------------------------------------------


def test_chunks_of_files_are_served_under_the_origin_of_the_files() -> None:
    """Their digests are those that this instance computes."""
    harness = reading_files()
    assert [SetProvisionalId(ORIGIN)] == harness.all_of(SetProvisionalId)
    assert [MarkVerified(0, RIGHT[0])] == of_type(harness.read(NAME, 0), MarkVerified)


def test_files_determine_the_manifest_once_all_are_read() -> None:
    """Every chunk is from the same files."""
    harness = reading_files()
    actions = harness.read(NAME, *range(CHUNKS))
    assert [SetManifest(MANIFEST), Finish()] == actions[-2:]


def test_files_with_a_manifest_are_verified() -> None:
    """A snapshot contains the manifest."""
    harness = MachineHarness()
    harness.plan(storage=[FILES])
    actions = harness.open_storage(manifest=MANIFEST)
    assert [SetManifest(MANIFEST)] == of_type(actions, SetManifest)
    harness.read(NAME, 0, digest=WRONG)
    assert ["StorageError"] == harness.reasons


def test_a_wrong_chunk_of_storage_excludes_it() -> None:
    """Another instance, or other storage, is read instead."""
    harness = MachineHarness()
    harness.plan(storage=[FILES])
    harness.open_storage(manifest=MANIFEST)
    assert [ExcludeStorage(NAME)] == of_type(harness.read(NAME, 0, digest=WRONG), ExcludeStorage)


def test_files_of_unknown_origin_are_not_read() -> None:
    """Chunks of two versions could be mixed."""
    harness = MachineHarness()
    harness.plan(storage=[FILES])
    actions = harness.open_storage(origin=None)
    assert [] == chunks_read(actions)
    assert ["StorageError"] == harness.reasons


def test_the_next_chunks_of_storage_are_read_ahead() -> None:
    """Those whose read starts at the same time are not, or they would be read twice."""
    harness = reading_files(max_inflight_chunks=3)
    actions = harness.read(NAME, 0)
    assert PrefetchChunks(0, in_flight=(0, 1, 2), upcoming=(3, 4)) == actions[0]
    assert [1, 2] == chunks_read(actions[1:3])


def test_chunks_of_peers_are_not_read_ahead() -> None:
    """A peer has them in memory."""
    harness = MachineHarness()
    harness.plan(peer("a", ALL))
    harness.offer("a", ALL)
    assert [] == harness.all_of(PrefetchChunks)


def test_stalled_storage_is_replaced() -> None:
    """Its readers have waited `storage_idle_timeout_s` for a block."""
    harness = reading_files()
    harness.tick(POLL_INTERVAL_S, storage_activity(idle_s=3.0))
    assert [] == harness.reasons
    harness.tick(POLL_INTERVAL_S, storage_activity(idle_s=3.1))
    assert ["checkpoint:file:///files: no data for 3.1 s"] == [str(error) for error in harness.machine.reasons]


@pytest.mark.parametrize(("block_after_s", "ends_after_s"), [(None, 10.0), (1.0, 10.0), (9.0, 12.0)])
def test_storage_that_makes_progress_extends_the_deadline(block_after_s: float | None, ends_after_s: float) -> None:
    """To `storage_idle_timeout_s` after its last block: starting over elsewhere would take longer."""
    harness = reading_files(deadline_s=10.0)
    block_at = None if block_after_s is None else harness.now + block_after_s
    harness.wait(ends_after_s - 0.1, storage_activity(block_at=block_at))
    assert not harness.machine.finished
    harness.wait(0.2, storage_activity(block_at=block_at))
    assert "DeadlineExceeded: the deadline passed with 0 of 6 chunks verified" == harness.result


def test_storage_without_planned_chunks_does_not_extend_the_deadline() -> None:
    """No instance waits for it any more."""
    harness = MachineHarness(settings(storage_idle_timeout_s=3.0), deadline_s=10.0)
    harness.plan(peer("a", (1, CHUNKS)), storage=[FILES.model_copy(update={"chunks": ((0, 1),)})])
    harness.open_storage(manifest=MANIFEST)
    harness.read(NAME, 0)
    harness.wait(10.1, storage_activity(block_at=harness.now + 9.0) | {"a": ALIVE})
    assert harness.machine.finished


# -- comparison with chunks of peers --------------------------------------------------------------------


def provisional(*chunks: int) -> MachineHarness:
    """Return a machine with verified chunks of a provisional image of the same files, whose source is gone."""
    harness = MachineHarness()
    harness.machine._verifier.provisional_id = ORIGIN
    for chunk in chunks:
        harness.machine._verifier.digests[chunk] = RIGHT[chunk]
        harness.machine._scheduler.verified(ChunkRead("gone", chunk))
    return harness


def test_verified_chunks_are_compared_with_files_first() -> None:
    """Nothing is read from files of other weights."""
    harness = provisional(0, 1)
    harness.plan(storage=[FILES])
    actions = harness.open_storage()
    digests = {0: RIGHT[0], 1: RIGHT[1]}
    assert [CompareFiles(0, digests)] == actions
    assert [2] == chunks_read(harness.handle(FilesCompared(0, digests, agrees=True)))


def test_chunks_that_arrive_during_the_comparison_are_compared_too() -> None:
    """Those that were compared before are not read again."""
    harness = provisional(0)
    harness.plan(peer("a", (1, 2)), storage=[FILES.model_copy(update={"chunks": ((2, CHUNKS),)})])
    harness.handle(ProvisionalDigests(harness.connections["a"], ORIGIN, {1: RIGHT[1]}))
    harness.offer("a", (1, 2), manifest=None)
    harness.open_storage()
    harness.read("a", 1)
    storage = harness.connections[NAME]
    actions = harness.handle(FilesCompared(storage, {0: RIGHT[0]}, agrees=True))
    assert [CompareFiles(storage, {1: RIGHT[1]})] == actions
    assert [2] == chunks_read(harness.handle(FilesCompared(storage, {1: RIGHT[1]}, agrees=True)))


def test_files_that_differ_begin_another_provisional_image() -> None:
    """Chunks of the previous one are dropped, and read from the files."""
    harness = provisional(0, 1)
    harness.plan(storage=[FILES])
    harness.open_storage()
    actions = harness.handle(FilesCompared(0, {0: RIGHT[0], 1: RIGHT[1]}, agrees=False))
    assert [InvalidateChunks((0, 1))] == of_type(actions, InvalidateChunks)
    assert [SetProvisionalId(None), SetProvisionalId(f"{ORIGIN}-{'f' * 16}")] == of_type(actions, SetProvisionalId)


def test_an_image_that_no_source_confirms_is_read_in_part_again() -> None:
    """The source of the next plan knows the manifest, or determines it."""
    harness = provisional(*range(CHUNKS))
    assert [InvalidateChunks((CHUNKS - 1,))] == of_type(harness.wait(POLL_INTERVAL_S), InvalidateChunks)


def test_a_complete_image_waits_for_the_source_that_confirms_it() -> None:
    """It still reads the rest of the files, for three times `source_idle_timeout_s` at most."""
    harness = MachineHarness(settings(source_idle_timeout_s=1.0))
    harness.plan(peer("a", ALL))
    harness.handle(ProvisionalDigests(0, ORIGIN, dict(enumerate(RIGHT))))
    harness.offer("a", ALL, manifest=None)
    harness.read("a", *range(CHUNKS))
    assert [] == of_type(harness.wait(3.0, {"a": ALIVE}), InvalidateChunks)
    actions = harness.wait(POLL_INTERVAL_S, {"a": ALIVE})
    assert [InvalidateChunks((CHUNKS - 1,))] == of_type(actions, InvalidateChunks)


def test_the_manifest_confirms_a_complete_image() -> None:
    """It is the last that the source sends."""
    harness = MachineHarness()
    harness.plan(peer("a", ALL))
    harness.handle(ProvisionalDigests(0, ORIGIN, dict(enumerate(RIGHT))))
    harness.offer("a", ALL, manifest=None)
    harness.read("a", *range(CHUNKS))
    assert not harness.machine.finished
    harness.offer("a")
    assert "complete" == harness.result


def test_a_source_of_another_provisional_image_is_refused_while_others_serve() -> None:
    """Chunks of two provisional images are never mixed."""
    harness = MachineHarness()
    harness.plan(peer("a", (0, 3)), peer("b", (3, 6)))
    harness.handle(ProvisionalDigests(0, ORIGIN, {0: RIGHT[0]}))
    harness.handle(ProvisionalDigests(1, "b" * 32, {3: RIGHT[3]}))
    assert ["SourceWeightsChanged"] == harness.reasons


# -- the loader -----------------------------------------------------------------------------------------


def test_a_loader_runs_once_nothing_else_writes_to_the_image() -> None:
    """All sources are closed, and their reads have ended."""
    harness = MachineHarness()
    harness.plan(peer("a", ALL))
    harness.offer("a", (0, 2))
    harness.read("a", 0)
    harness.wait(1.0)
    harness.handle(ReplanSuggested("a loader"))
    actions = harness.plan(storage=[LOADER])
    assert [CloseSource(0)] == of_type(actions, CloseSource)
    assert [] == of_type(actions, RunLoader)
    assert [InvalidateChunks((0, 1)), RunLoader(LOADER)] == harness.read("a", 1)[-2:]


def test_a_loader_fills_every_chunk() -> None:
    """Its bytes count as read, but not as measured while they arrived."""
    harness = MachineHarness()
    harness.plan(storage=[LOADER])
    actions = harness.handle(LoaderFinished(LOADER, MANIFEST))
    assert [SetManifest(MANIFEST)] == of_type(actions, SetManifest)
    assert list(range(CHUNKS)) == chunks_verified(actions)
    assert "complete" == harness.result
    assert CHUNKS * MIB == harness.machine.bytes_read
    assert CHUNKS * MIB == harness.machine.stats.loader_bytes


def test_nothing_happens_while_a_loader_runs() -> None:
    """No source is opened, and no plan is requested."""
    harness = MachineHarness()
    harness.plan(storage=[LOADER])
    assert [] == harness.handle(ReplanSuggested("a better source"))
    assert [] == harness.wait(5.0)


def test_a_loader_may_run_past_the_deadline() -> None:
    """It cannot be interrupted, and the image is valid."""
    harness = MachineHarness(deadline_s=10.0)
    harness.plan(storage=[LOADER])
    assert [] == harness.wait(20.0)
    harness.handle(LoaderFinished(LOADER, MANIFEST))
    assert "complete" == harness.result


def test_a_loader_that_fails_after_the_deadline_ends_the_transfer() -> None:
    """There is no time for another source."""
    harness = MachineHarness(deadline_s=10.0)
    harness.plan(storage=[LOADER])
    harness.wait(20.0)
    harness.handle(LoaderFailed(LOADER, StorageError("disk error")))
    assert "DeadlineExceeded: the deadline passed with 0 of 6 chunks verified" == harness.result


def test_a_failed_loader_is_reported_with_the_next_request() -> None:
    """It is not offered again."""
    harness = MachineHarness()
    harness.plan(storage=[LOADER])
    actions = harness.handle(LoaderFailed(LOADER, StorageNotFound("no such file")))
    assert [ExcludeStorage("loader:")] == actions
    (request,) = of_type(harness.wait(FIRST_RETRY_S), RequestPlan)
    assert [("target", "storage", "StorageNotFound")] == [
        (fault.instance_id, fault.fault, fault.error) for fault in request.faults
    ]


def test_a_loader_is_not_run_for_a_complete_image() -> None:
    """The last chunk arrived while the plan was requested."""
    harness = MachineHarness()
    harness.plan(peer("a", ALL))
    harness.offer("a", ALL)
    harness.read("a", *range(CHUNKS - 1))
    harness.handle(ReplanSuggested("a loader"))
    harness.plan(storage=[LOADER])
    assert [] == harness.all_of(RunLoader)
    harness.read("a", CHUNKS - 1)
    assert "complete" == harness.result


def test_the_activity_of_the_previous_storage_is_not_reported_while_a_loader_runs() -> None:
    """The loader's own activity is."""
    harness = reading_files()
    harness.tick(0.1, storage_activity(block_at=harness.now))
    harness.handle(ReplanSuggested("a loader"))
    harness.plan(storage=[LOADER])
    for chunk in (0, 1):
        harness.read(NAME, chunk)
    assert RunLoader(LOADER) == harness.actions[-1]
    assert ReportStorageActivity(None) == harness.all_of(ReportStorageActivity)[-1]
    assert [] == harness.wait(1.0)


def test_weights_of_a_loader_are_final() -> None:
    """Chunks of an earlier attempt are not compared again: the loader has overwritten them."""
    harness = MachineHarness()
    harness.plan(peer("a", ALL), weights_id=MANIFEST.weights_id)
    harness.offer("a", (0, 1))
    harness.read("a", 0)
    harness.wait(1.0)
    harness.handle(ReplanSuggested("newer weights"))
    harness.plan(peer("b", ALL), weights_id=manifest_of(2).weights_id)
    assert ["a", "b"] == [opened.route.source_id for opened in harness.all_of(OpenPeer)]
    harness.wait(1.0)
    harness.handle(ReplanSuggested("a loader"))
    harness.plan(storage=[LOADER])
    actions = harness.handle(LoaderFinished(LOADER, MANIFEST))
    assert {SetManifest, MarkVerified, Finish} == {type(action) for action in actions}
