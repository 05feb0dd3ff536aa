"""Expected digests of chunks: from the manifest once it is known, before that from the chunk's source."""

from __future__ import annotations

import pytest

from rfork.errors import SourceWeightsChanged, StorageError
from rfork.image.layout import Manifest
from rfork.receiver.chunk_scheduler import ChunkRead, ChunkScheduler
from rfork.receiver.events import (
    Action,
    DigestKeptChunk,
    FenceImage,
    InvalidateChunks,
    MarkVerified,
    SetManifest,
    SetProvisionalId,
)
from rfork.receiver.verifier import ChunkVerifier, WrongDigest
from tests.unit.receiver.fleet import CHUNKS
from tests.unit.receiver.machines import LAYOUT, MANIFEST, RIGHT, WRONG, manifest_of, of_type

X, Y = "c" * 32, "d" * 32
A, B, OWN = 0, 1, 2
"""Connections: two peers, and this instance's own storage."""
UNIQUE = "f" * 16


class VerifierHarness:
    """A verifier with some verified chunks, its scheduler, and the actions that it emitted."""

    def __init__(self, *verified_chunks: int, provisional_id: str | None = None) -> None:
        self.actions: list[Action] = []
        self.scheduler = ChunkScheduler(CHUNKS)
        self.verifier = ChunkVerifier(LAYOUT, self.scheduler, self.actions.append)
        self.verifier.provisional_id = provisional_id
        self.verify(*verified_chunks)
        self.actions.clear()

    def verify(self, *chunks: int, from_local_files: bool = False) -> None:
        """Let these chunks be read and verified."""
        for chunk in chunks:
            self.verifier.mark_verified(chunk, RIGHT[chunk], from_local_files=from_local_files)
            self.scheduler.verified(ChunkRead("source", chunk))

    def compare_files(self, origin: str, *compared: int, agrees: bool = True) -> dict[int, bytes]:
        """Let local files be compared with these chunks; returns the digests to compare next."""
        digests = {chunk: RIGHT[chunk] for chunk in compared}
        return dict(self.verifier.verify_local_files(OWN, origin, digests, agrees=agrees, unique_id=UNIQUE))

    @property
    def dropped(self) -> list[tuple[int, ...]]:
        return [action.chunks for action in of_type(self.actions, InvalidateChunks)]

    @property
    def verified(self) -> list[int]:
        return sorted(self.scheduler.verified_chunks)


# -- digests of peers -----------------------------------------------------------------------------------


def test_a_chunk_is_checked_against_the_digest_of_its_source() -> None:
    """Until the manifest is known."""
    harness = VerifierHarness()
    harness.verifier.add_provisional_digests(A, X, {2: WRONG}, alone=True)
    assert WRONG == harness.verifier.check(A, 2, WRONG)
    with pytest.raises(WrongDigest, match="chunk 2 does not match its digest"):
        harness.verifier.check(A, 2, RIGHT[2])


def test_the_manifest_replaces_digests_of_the_source() -> None:
    """It is final, even for chunks whose read began before."""
    harness = VerifierHarness()
    harness.verifier.add_provisional_digests(A, X, {2: WRONG}, alone=True)
    harness.verifier.set_manifest(MANIFEST)
    assert RIGHT[2] == harness.verifier.check(A, 2, RIGHT[2])
    with pytest.raises(WrongDigest, match="does not match"):
        harness.verifier.check(A, 2, WRONG)


def test_a_chunk_that_was_not_digested_has_the_expected_digest() -> None:
    """Verification is turned off for measurements only."""
    harness = VerifierHarness()
    harness.verifier.set_manifest(MANIFEST)
    assert RIGHT[2] == harness.verifier.check(A, 2, None)


@pytest.mark.parametrize(("connection", "chunk"), [(A, 3), (B, 2)], ids=["another chunk", "another source"])
def test_a_chunk_without_a_digest_is_rejected(connection: int, chunk: int) -> None:
    """Without a manifest, a chunk needs a digest from its own source."""
    harness = VerifierHarness()
    harness.verifier.add_provisional_digests(A, X, {2: WRONG}, alone=True)
    with pytest.raises(SourceWeightsChanged):
        harness.verifier.check(connection, chunk, WRONG)


def test_digests_of_a_removed_source_are_discarded() -> None:
    """Its chunks can no longer be verified."""
    harness = VerifierHarness()
    harness.verifier.add_provisional_digests(A, X, {2: WRONG}, alone=True)
    harness.verifier.remove_source(A)
    with pytest.raises(SourceWeightsChanged):
        harness.verifier.check(A, 2, WRONG)


def test_a_source_of_other_weights_than_the_manifest_is_refused() -> None:
    """Before any of its bytes is read."""
    harness = VerifierHarness()
    harness.verifier.set_manifest(MANIFEST)
    harness.verifier.add_provisional_digests(A, X, {1: RIGHT[1]}, alone=True)
    with pytest.raises(SourceWeightsChanged, match="other weights"):
        harness.verifier.add_provisional_digests(B, X, {1: WRONG}, alone=True)


@pytest.mark.parametrize("alone", [True, False])
def test_a_source_continues_the_provisional_image(alone: bool) -> None:
    """Its id and its digests are those of the verified chunks."""
    harness = VerifierHarness(0, 1, provisional_id=X)
    harness.verifier.add_provisional_digests(A, X, {0: RIGHT[0]}, alone=alone)
    assert [] == harness.actions


@pytest.mark.parametrize(("provisional_id", "digest"), [(X, WRONG), (Y, RIGHT[0])], ids=["digest", "id"])
def test_a_source_of_another_provisional_image_replaces_the_chunks(provisional_id: str, digest: bytes) -> None:
    """No other source has assigned chunks, so the verified ones are dropped."""
    harness = VerifierHarness(0, 1, provisional_id=X)
    harness.verifier.add_provisional_digests(A, provisional_id, {0: digest}, alone=True)
    assert [InvalidateChunks((0, 1)), SetProvisionalId(None), SetProvisionalId(provisional_id)] == harness.actions
    assert [] == harness.verified


@pytest.mark.parametrize(("provisional_id", "digest"), [(X, WRONG), (Y, RIGHT[0])], ids=["digest", "id"])
def test_a_source_of_another_provisional_image_is_refused(provisional_id: str, digest: bytes) -> None:
    """Another source serves the provisional image of the verified chunks."""
    harness = VerifierHarness(0, 1, provisional_id=X)
    with pytest.raises(SourceWeightsChanged):
        harness.verifier.add_provisional_digests(A, provisional_id, {0: digest}, alone=False)
    assert [] == harness.actions


# -- local files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("origin", "agrees", "dropped", "provisional_id"),
    [(X, True, [], X), (X, False, [(0, 1)], f"{X}-{UNIQUE}"), (Y, True, [(0, 1)], Y)],
    ids=["the same files", "changed files", "other files"],
)
def test_local_files_continue_only_a_matching_image(
    origin: str, agrees: bool, dropped: list[tuple[int, ...]], provisional_id: str
) -> None:
    """Existing chunks are kept only if the origin is the same and the files match."""
    harness = VerifierHarness(0, 1, provisional_id=X)
    harness.compare_files(origin, 0, 1, agrees=agrees)
    assert dropped == harness.dropped
    assert provisional_id == harness.verifier.provisional_id


def test_any_digest_of_local_files_is_accepted() -> None:
    """They determine the provisional image."""
    harness = VerifierHarness()
    harness.compare_files(X)
    assert WRONG == harness.verifier.check(OWN, 5, WRONG)


def test_local_files_continue_the_image_of_an_instance_whose_files_differ() -> None:
    """The name of its image begins with the same origin; the comparison decides."""
    harness = VerifierHarness(0, provisional_id=f"{X}-{UNIQUE}")
    harness.compare_files(X, 0)
    assert [] == harness.actions


def test_local_files_are_checked_against_the_manifest() -> None:
    """Files that differ fail immediately, and no verified chunk is dropped."""
    harness = VerifierHarness(0, 1)
    harness.verifier.set_manifest(MANIFEST)
    assert {} == harness.compare_files(X, 0, 1)
    with pytest.raises(StorageError, match="other weights"):
        harness.compare_files(X, 0, 1, agrees=False)
    assert [] == harness.dropped


def test_all_chunks_of_a_provisional_image_are_compared_with_local_files() -> None:
    """Chunks of two versions must not be mixed."""
    harness = VerifierHarness(1, 3, 4, provisional_id=X)
    assert {1: RIGHT[1], 3: RIGHT[3], 4: RIGHT[4]} == harness.verifier.digests_to_compare()


def test_the_first_and_the_last_chunk_are_compared_if_the_manifest_is_known() -> None:
    """Every chunk that is read is verified anyway."""
    harness = VerifierHarness(1, 3, 4)
    harness.verifier.set_manifest(MANIFEST)
    assert {1: RIGHT[1], 4: RIGHT[4]} == harness.verifier.digests_to_compare()


def test_the_first_and_the_last_offered_chunk_are_compared_if_none_is_verified() -> None:
    """Files of other weights are detected before they are read."""
    harness = VerifierHarness()
    harness.verifier.add_provisional_digests(A, X, {2: RIGHT[2], 5: RIGHT[5], 3: RIGHT[3]}, alone=True)
    assert {2: RIGHT[2], 5: RIGHT[5]} == harness.verifier.digests_to_compare()


def test_there_is_nothing_to_compare_at_the_beginning() -> None:
    """No other instance has begun to read."""
    assert {} == VerifierHarness().verifier.digests_to_compare()


def test_chunks_that_arrive_during_the_comparison_are_compared_too() -> None:
    """Local files are accepted only once every verified chunk has been found in them."""
    harness = VerifierHarness(0, 1, provisional_id=X)
    assert {1: RIGHT[1]} == harness.compare_files(X, 0)
    with pytest.raises(SourceWeightsChanged):
        harness.verifier.check(OWN, 5, RIGHT[5])
    assert {} == harness.compare_files(X, 0, 1)
    assert RIGHT[5] == harness.verifier.check(OWN, 5, RIGHT[5])


# -- the manifest of a complete image -------------------------------------------------------------------


def test_local_files_complete_the_manifest() -> None:
    """An instance that has found every chunk in its files, or read it from them, knows the manifest and keeps
    the provisional id.
    """
    harness = VerifierHarness(0, 1, 2, provisional_id=X)
    harness.compare_files(X, 0, 1, 2)
    harness.verify(3, 4, 5, from_local_files=True)
    assert harness.verifier.finalize_manifest()
    assert [SetManifest(MANIFEST)] == of_type(harness.actions, SetManifest)
    assert X == harness.verifier.provisional_id


def test_a_reader_of_files_reads_unconfirmed_chunks_itself() -> None:
    """Only it can confirm that chunks belong to one image."""
    harness = VerifierHarness(0, 1, provisional_id=X)
    harness.compare_files(X, 0, 1)
    harness.verify(*range(2, CHUNKS))
    assert not harness.verifier.finalize_manifest()
    harness.verifier.invalidate_unconfirmed()
    assert [(2, 3, 4, 5)] == harness.dropped


def test_another_instance_reads_one_unconfirmed_chunk_again() -> None:
    """From a source that knows the manifest by then, or determines it."""
    harness = VerifierHarness(*range(CHUNKS), provisional_id=X)
    assert not harness.verifier.finalize_manifest()
    harness.verifier.invalidate_unconfirmed()
    assert [(CHUNKS - 1,)] == harness.dropped
    assert harness.scheduler.unassigned


def test_a_different_manifest_ends_the_provisional_image() -> None:
    """Chunks that differ are dropped, the others are kept without a provisional id."""
    harness = VerifierHarness(0, 1, provisional_id=X)
    other = Manifest(LAYOUT, (WRONG, *RIGHT[1:]))
    harness.verifier.set_manifest(other)
    assert [SetProvisionalId(None), InvalidateChunks((0,)), SetManifest(other)] == harness.actions
    assert [1] == harness.verified
    assert harness.scheduler.unassigned


def test_readers_are_notified_of_a_new_manifest() -> None:
    """They know the first manifest, even if no chunk was readable yet, so the second one is a new
    generation.
    """
    harness = VerifierHarness()
    newer = manifest_of(2)
    harness.verifier.set_manifest(MANIFEST)
    harness.verifier.set_manifest(MANIFEST)
    harness.verifier.set_manifest(newer)
    assert [SetManifest(MANIFEST), InvalidateChunks(()), SetManifest(newer)] == harness.actions


# -- changed weights ------------------------------------------------------------------------------------


def test_a_restart_drops_the_weights() -> None:
    """No chunk is verified or reserved any more."""
    harness = VerifierHarness(0)
    harness.verifier.set_manifest(MANIFEST)
    harness.scheduler.reserve("resume", [1, 2])
    assert 1 == harness.verifier.restart()
    assert FenceImage() == harness.actions[-1]
    assert [] == harness.verified
    assert [] == harness.scheduler.reserved
    assert None is harness.verifier.manifest


def test_unchanged_chunks_are_digested_again_after_a_restart() -> None:
    """A chunk that differs in the new weights, or is in flight, is read from a source instead."""
    harness = VerifierHarness(0, 1, 2)
    harness.verifier.set_manifest(MANIFEST)
    harness.verifier.restart()
    harness.scheduler.assign({"seed": [(1, 2)]})
    harness.scheduler.mark_available("seed", [(1, 2)])
    assert ChunkRead("seed", 1) == harness.scheduler.next_read()
    harness.verifier.set_manifest(manifest_of(2, shared=2))
    assert [DigestKeptChunk(0)] == of_type(harness.actions, DigestKeptChunk)


def test_kept_chunks_are_compared_once() -> None:
    """They may be overwritten after that."""
    harness = VerifierHarness(0)
    harness.verifier.set_manifest(MANIFEST)
    harness.verifier.restart()
    harness.verifier.set_manifest(manifest_of(2))
    harness.verifier.restart()
    harness.verifier.set_manifest(MANIFEST)
    assert [] == of_type(harness.actions, DigestKeptChunk)


def test_a_verified_chunk_is_served_with_its_digest() -> None:
    """None if it is not known."""
    harness = VerifierHarness()
    harness.verifier.mark_verified(0, RIGHT[0])
    harness.verifier.mark_verified(1, None)
    assert [MarkVerified(0, RIGHT[0]), MarkVerified(1, None)] == harness.actions
    assert {0: RIGHT[0]} == harness.verifier.digests
