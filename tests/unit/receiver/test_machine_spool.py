"""The transfer machine with the spool of a previous process."""

from __future__ import annotations

import pytest

from rfork.errors import SourceUnavailable
from rfork.image.chunks import MIB
from rfork.receiver.events import (
    ChunkReceived,
    ChunksOffered,
    CloseSource,
    FenceImage,
    ManifestReceived,
    MarkVerified,
    ProvisionalDigests,
    ReadSpool,
    ReplanSuggested,
    RequestPlan,
    RunLoader,
    SpoolChunkRead,
    SpoolFailed,
    StopSpool,
)
from rfork.receiver.machine import MIN_REPLAN_INTERVAL_S, POLL_INTERVAL_S
from rfork.receiver.report import RESUME_SOURCE_ID
from tests.unit.receiver.fleet import CHUNKS, settings
from tests.unit.receiver.machines import (
    ALL,
    LOADER,
    MANIFEST,
    ORIGIN,
    RIGHT,
    WRONG,
    MachineHarness,
    chunks_read,
    manifest_of,
    of_type,
    peer,
)


def with_spool(*chunks: int, source_idle_timeout_s: float = 1e6, max_inflight_chunks: int = CHUNKS) -> MachineHarness:
    """Return a machine whose spool contains these chunks of the weights that source ``a`` serves."""
    chosen = settings(source_idle_timeout_s=source_idle_timeout_s, max_inflight_chunks=max_inflight_chunks)
    harness = MachineHarness(chosen, spool_records={chunk: RIGHT[chunk] for chunk in chunks})
    harness.plan(peer("a", ALL))
    return harness


def spool_reads(harness: MachineHarness) -> list[int]:
    """Return the chunks that were read from the spool so far."""
    return [read.chunk for read in harness.all_of(ReadSpool)]


def read_spool(harness: MachineHarness, chunk: int, digest: bytes | None) -> None:
    """Let a read of the spool end with this digest."""
    harness.handle(SpoolChunkRead(chunk, digest, 0.5))


def test_a_spool_is_not_read_before_the_manifest_is_known() -> None:
    """Otherwise its chunks could be of other weights."""
    harness = with_spool(0, 1)
    assert [] == spool_reads(harness)
    assert [ReadSpool(0, RIGHT[0])] == of_type(harness.handle(ManifestReceived(0, MANIFEST)), ReadSpool)


def test_without_a_manifest_no_spooled_chunk_is_used() -> None:
    """A provisional digest is not final: files may turn out to differ."""
    harness = with_spool(0, 1)
    harness.handle(ProvisionalDigests(0, ORIGIN, dict(enumerate(RIGHT))))
    harness.offer("a", ALL, manifest=None)
    harness.read("a", *range(CHUNKS))
    assert [] == spool_reads(harness)


def test_spooled_chunks_are_read_one_after_the_other() -> None:
    """They are not read from the source meanwhile, which serves the rest."""
    harness = with_spool(0, 2)
    assert [1, 3, 4, 5] == chunks_read(harness.offer("a", ALL))
    assert [0] == spool_reads(harness)
    read_spool(harness, 0, RIGHT[0])
    assert [0, 2] == spool_reads(harness)


def test_reading_the_spool_occupies_no_worker() -> None:
    """As many chunks are read from sources as without a spool."""
    harness = with_spool(0, 1, max_inflight_chunks=4)
    assert [2, 3, 4, 5] == chunks_read(harness.offer("a", ALL))


def test_a_valid_spooled_chunk_is_served() -> None:
    """It counts as read from the spool, and not as read from a source."""
    harness = with_spool(0)
    harness.offer("a")
    assert [MarkVerified(0, RIGHT[0])] == harness.handle(SpoolChunkRead(0, RIGHT[0], 0.5))
    assert {RESUME_SOURCE_ID: MIB} == {share.source_id: share.verified_bytes for share in harness.machine.stats.sources}
    assert () == harness.machine.stats.shares
    assert 0 == harness.machine.bytes_read
    assert 0.5 == harness.machine.stats.resume_s


def test_spooled_chunks_of_other_weights_are_not_read() -> None:
    """The record of each chunk is compared with the manifest."""
    harness = MachineHarness(spool_records={0: RIGHT[0], 1: WRONG})
    harness.plan(peer("a", ALL))
    harness.offer("a")
    read_spool(harness, 0, RIGHT[0])
    assert [0] == spool_reads(harness)


@pytest.mark.parametrize("digest", [WRONG, None], ids=["damaged", "truncated"])
def test_an_invalid_spooled_chunk_is_read_from_a_source(digest: bytes | None) -> None:
    """The next plan assigns it, and it is not read from the spool again."""
    harness = with_spool(0)
    harness.offer("a", (0, 1))
    harness.wait(MIN_REPLAN_INTERVAL_S)
    read_spool(harness, 0, digest)
    assert 2 == len(harness.all_of(RequestPlan))
    assert [0] == chunks_read(harness.plan(peer("a", ALL)))
    assert [0] == spool_reads(harness)


def test_a_second_source_of_the_same_weights_changes_no_reservation() -> None:
    """Chunks that were left to the sources because the disk is slow are not reserved again."""
    harness = with_spool(1, 2, 3, 4, 5)
    harness.offer("a")
    for step_s in (1.0, POLL_INTERVAL_S):
        harness.handle(ChunkReceived(0, 0, 0.01))
        harness.tick(step_s, spool_at=harness.now)
    assert [2, 3, 4, 5] == chunks_read(harness.plan(peer("b", ALL)) + harness.offer("b", ALL))[-4:]


def test_the_weights_do_not_change_during_a_read_of_the_spool() -> None:
    """A source that has others by then is refused, as during any other read."""
    harness = with_spool(0)
    harness.handle(ManifestReceived(0, MANIFEST))
    harness.handle(ManifestReceived(0, manifest_of(2)))
    assert ["SourceWeightsChanged"] == harness.reasons
    assert [MarkVerified(0, RIGHT[0])] == of_type(harness.handle(SpoolChunkRead(0, RIGHT[0], 0.5)), MarkVerified)


def test_a_spool_that_delivers_nothing_is_abandoned() -> None:
    """After `source_idle_timeout_s`, its chunks are left to the sources."""
    harness = with_spool(0, 1, source_idle_timeout_s=1.0)
    harness.offer("a")
    assert [] == of_type(harness.tick(1.0, spool_at=harness.now), StopSpool)
    actions = harness.tick(POLL_INTERVAL_S, spool_at=harness.now - 1.0)
    assert [StopSpool()] == of_type(actions, StopSpool)
    assert 2 == len(harness.all_of(RequestPlan))
    assert [0, 1] == chunks_read(harness.plan(peer("a", ALL)) + harness.offer("a", (0, 2)))


def test_a_spool_that_delivers_blocks_is_not_abandoned() -> None:
    """A chunk may take longer than `source_idle_timeout_s`."""
    harness = with_spool(0, source_idle_timeout_s=1.0)
    harness.offer("a")
    for _ in range(20):
        harness.tick(POLL_INTERVAL_S, spool_at=harness.now)
    assert [] == harness.all_of(StopSpool)


def test_what_an_abandoned_spool_delivers_is_ignored() -> None:
    """A source serves the chunk."""
    harness = with_spool(0)
    harness.offer("a", (0, 1))
    harness.handle(SpoolFailed())
    assert [] == of_type(harness.handle(SpoolChunkRead(0, RIGHT[0], 0.5)), MarkVerified)
    assert [] == harness.handle(SpoolFailed())


def test_a_failed_spool_releases_its_chunks() -> None:
    """The sources serve all of them."""
    harness = with_spool(0, 1)
    harness.offer("a", (0, 2))
    assert [StopSpool()] == of_type(harness.handle(SpoolFailed()), StopSpool)
    assert [0, 1] == chunks_read(harness.plan(peer("a", ALL)))


def test_a_loader_ends_the_resume() -> None:
    """The loader writes every byte, and no late read of the spool may overwrite one."""
    harness = with_spool(0, 1)
    harness.offer("a")
    harness.wait(1.0)
    harness.handle(ReplanSuggested("a loader"))
    actions = harness.plan(storage=[LOADER])
    assert [StopSpool, CloseSource, RunLoader] == [type(action) for action in actions]


def test_a_restart_does_not_read_the_spool_for_other_weights() -> None:
    """Sources serve every chunk of the next weights."""
    harness = with_spool(0, 1)
    harness.offer("a")
    read_spool(harness, 0, RIGHT[0])
    read_spool(harness, 1, RIGHT[1])
    harness.wait(1.0)
    harness.fail("a", SourceUnavailable("closed"))
    harness.plan(peer("b", ALL), weights_id=manifest_of(2).weights_id)
    assert 1 == len(harness.all_of(FenceImage))
    harness.offer("b", manifest=manifest_of(2))
    assert [0, 1] == spool_reads(harness)
    assert list(range(CHUNKS)) == chunks_read(harness.handle(ChunksOffered(harness.connections["b"], (ALL,))))


@pytest.mark.parametrize(
    ("seconds", "fetched", "loaded", "left_to_sources"),
    [
        (0.5, 1, 0, []),
        (2.0, 0, 0, []),
        (2.0, 1, 1, []),
        (4.0, 2, 1, [4, 5]),
        (2.0, 1, 0, [2, 3, 4, 5]),
        (20.0, 1, 1, []),
        (12.5, 6, 5, [2, 3, 4, 5]),
    ],
    ids=["too early", "no source to compare with", "as fast", "slower", "nothing", "both slow", "too late"],
)
def test_a_slow_disk_shares_chunks_with_the_sources(
    seconds: float, fetched: int, loaded: int, left_to_sources: list[int]
) -> None:
    """The spool keeps those that it delivers before the sources would have served the complete image; it is
    reading chunk 1.
    """
    harness = with_spool(1, 2, 3, 4, 5)
    harness.offer("a", ALL)
    for _ in range(fetched):
        harness.handle(ChunkReceived(0, 0, 0.01))
    # The target is busy for most of the time, so the rates are compared only once.
    for step_s in (seconds - POLL_INTERVAL_S, POLL_INTERVAL_S):
        harness.tick(step_s, spool_at=harness.now + step_s, spool_bytes=loaded * MIB)
    assert left_to_sources == chunks_read(harness.plan(peer("a", ALL)))
