"""Expected digests of chunks: from the manifest once it is known, before that from the chunk's source."""

from __future__ import annotations

import pytest

from rfork.errors import SourceWeightsChanged, StorageError
from rfork.image.chunk_state import ChunkState
from rfork.image.manifest import Manifest
from rfork.receiver.chunk_scheduler import ChunkScheduler
from rfork.receiver.chunk_verifier import ChunkVerifier
from tests.unit.receiver.fleet import CHUNKS, RecordingServingState, image

IMAGE = image()
RIGHT = tuple(bytes([index]) * 16 for index in range(CHUNKS))
MANIFEST = Manifest(IMAGE.layout, RIGHT)
WRONG = b"w" * 16
X, Y = "c" * 32, "d" * 32


class VerifierHarness:
    """A verifier with the objects that it works on."""

    def __init__(self, *verified_chunks: int, provisional_id: str | None = None) -> None:
        self.chunk_state = ChunkState(IMAGE.layout.chunks)
        self.chunk_state.set_provisional_id(provisional_id)
        for index in verified_chunks:
            self.chunk_state.mark_verified(index, RIGHT[index])
        self.scheduler = ChunkScheduler(CHUNKS, self.chunk_state.verified)
        self.serving_state = RecordingServingState(self.chunk_state)
        self.verifier = ChunkVerifier(IMAGE, self.chunk_state, self.scheduler, self.serving_state)


def test_the_manifest_replaces_digests_of_the_source() -> None:
    """Until it is known, each source is checked against its own digests."""
    harness = VerifierHarness()
    harness.verifier.add_provisional_digests("a", X, {2: WRONG}, alone=True)
    before = harness.verifier.expected("a", 2)
    harness.verifier.set_manifest(MANIFEST)
    assert WRONG == before
    assert RIGHT[2] == harness.verifier.expected("a", 2)


@pytest.mark.parametrize(("source", "chunk"), [("a", 3), ("b", 2)], ids=["another chunk", "another source"])
def test_a_chunk_without_a_digest_is_rejected(source: str, chunk: int) -> None:
    """Without a manifest, a chunk needs a digest from its own source."""
    harness = VerifierHarness()
    harness.verifier.add_provisional_digests("a", X, {2: WRONG}, alone=True)
    with pytest.raises(SourceWeightsChanged):
        harness.verifier.expected(source, chunk)


def test_digests_of_a_removed_source_are_discarded() -> None:
    """Its chunks can no longer be verified."""
    harness = VerifierHarness()
    harness.verifier.add_provisional_digests("a", X, {2: WRONG}, alone=True)
    harness.verifier.remove_source("a")
    with pytest.raises(SourceWeightsChanged):
        harness.verifier.expected("a", 2)


@pytest.mark.parametrize("digest", [RIGHT[1], WRONG], ids=["same", "other"])
def test_provisional_digests_are_checked_against_the_manifest(digest: bytes) -> None:
    """A source that serves other weights than the known ones is refused before any byte is read."""
    harness = VerifierHarness()
    harness.verifier.set_manifest(MANIFEST)
    refused = False
    try:
        harness.verifier.add_provisional_digests("a", X, {1: digest}, alone=True)
    except SourceWeightsChanged:
        refused = True
    assert (digest == WRONG) == refused


@pytest.mark.parametrize(
    ("provisional_id", "reported_digest", "alone", "dropped"),
    [
        (X, RIGHT[0], True, []),
        (X, RIGHT[0], False, []),
        (X, WRONG, True, [(0, 1)]),
        (X, WRONG, False, None),
        (Y, RIGHT[0], True, [(0, 1)]),
        (Y, RIGHT[0], False, None),
    ],
)
def test_chunks_of_two_provisional_images_are_not_mixed(
    provisional_id: str, reported_digest: bytes, alone: bool, dropped: list[tuple[int, ...]] | None
) -> None:
    """If the provisional ids or digests differ, the new source is refused or the existing chunks are dropped."""
    harness = VerifierHarness(0, 1, provisional_id=X)
    if dropped is None:
        with pytest.raises(SourceWeightsChanged):
            harness.verifier.add_provisional_digests("a", provisional_id, {0: reported_digest}, alone=alone)
    else:
        harness.verifier.add_provisional_digests("a", provisional_id, {0: reported_digest}, alone=alone)
    assert (dropped or []) == harness.serving_state.dropped
    assert (X if dropped is None else provisional_id) == harness.chunk_state.provisional_id


@pytest.mark.parametrize(
    ("origin", "agrees", "dropped", "provisional_id"),
    [(X, True, [], X), (X, False, [(0, 1)], f"{X}-"), (Y, True, [(0, 1)], Y)],
    ids=["the same files", "changed files", "other files"],
)
def test_local_files_continue_only_a_matching_image(
    origin: str, agrees: bool, dropped: list[tuple[int, ...]], provisional_id: str
) -> None:
    """Existing chunks are kept only if the origin is the same and the files match."""
    harness = VerifierHarness(0, 1, provisional_id=X)
    harness.verifier.verify_local_files("own", origin, {0: RIGHT[0], 1: RIGHT[1]}, agrees=agrees)
    actual_provisional_id = harness.chunk_state.provisional_id or ""
    assert dropped == harness.serving_state.dropped
    assert provisional_id == actual_provisional_id[: len(provisional_id)]
    assert harness.verifier.expected("own", 5) is None


@pytest.mark.parametrize("agrees", [True, False])
def test_local_files_are_checked_against_the_manifest(agrees: bool) -> None:
    """Files that differ fail immediately, and no verified chunk is dropped."""
    harness = VerifierHarness(0, 1)
    harness.verifier.set_manifest(MANIFEST)
    failed = False
    try:
        harness.verifier.verify_local_files("own", X, {0: RIGHT[0], 1: RIGHT[1]}, agrees=agrees)
    except StorageError:
        failed = True
    assert (not agrees) == failed
    assert [] == harness.serving_state.dropped


def test_digests_of_received_chunks_are_compared_with_local_files() -> None:
    """All digests of a provisional image are compared.

    With a manifest, or if chunks are only offered, the first and the last are enough.
    """
    partial, with_manifest, offered, fresh = (
        VerifierHarness(1, 3, 4, provisional_id=X),
        VerifierHarness(1, 3, 4),
        VerifierHarness(),
        VerifierHarness(),
    )
    with_manifest.verifier.set_manifest(MANIFEST)
    offered.verifier.add_provisional_digests("a", X, {2: RIGHT[2], 5: RIGHT[5], 3: RIGHT[3]}, alone=True)
    all_digests = {1: RIGHT[1], 3: RIGHT[3], 4: RIGHT[4]}
    assert all_digests == partial.verifier.digests_to_compare()
    assert {1: RIGHT[1], 4: RIGHT[4]} == with_manifest.verifier.digests_to_compare()
    assert {2: RIGHT[2], 5: RIGHT[5]} == offered.verifier.digests_to_compare()
    assert {} == fresh.verifier.digests_to_compare()


def test_chunks_that_arrive_during_the_comparison_are_compared_too() -> None:
    """Local files are accepted only once every verified chunk has been found in them."""
    harness = VerifierHarness(0, 1, provisional_id=X)
    still_to_compare = harness.verifier.verify_local_files("own", X, {0: RIGHT[0]}, agrees=True)
    assert {1: RIGHT[1]} == still_to_compare
    with pytest.raises(SourceWeightsChanged):
        harness.verifier.expected("own", 5)
    assert {} == harness.verifier.verify_local_files("own", X, {0: RIGHT[0], 1: RIGHT[1]}, agrees=True)
    assert harness.verifier.expected("own", 5) is None


def test_local_files_complete_the_manifest() -> None:
    """A reader that has found or read every chunk in its files knows the manifest.

    It keeps the provisional id.
    """
    harness = VerifierHarness(*range(CHUNKS), provisional_id=X)
    chunk_digests = harness.chunk_state.digests
    del chunk_digests[3]
    harness.verifier.verify_local_files("own", X, chunk_digests | {3: RIGHT[3]}, agrees=True)
    assert harness.verifier.finalize_manifest()
    assert [MANIFEST] == harness.serving_state.manifests
    assert X == harness.chunk_state.provisional_id


def test_unconfirmed_chunks_complete_no_manifest() -> None:
    """Only the reader of the files can confirm that chunks belong to one image.

    Another reader of files reads them itself.
    """
    follower, reader = (
        VerifierHarness(*range(CHUNKS), provisional_id=X),
        VerifierHarness(0, 1, provisional_id=X),
    )
    reader.verifier.verify_local_files("own", X, reader.chunk_state.digests, agrees=True)
    for chunk in range(2, CHUNKS):
        reader.chunk_state.mark_verified(chunk, RIGHT[chunk])
    assert not follower.verifier.finalize_manifest()
    assert not reader.verifier.finalize_manifest()
    follower.verifier.invalidate_unconfirmed()
    reader.verifier.invalidate_unconfirmed()
    assert [(5,)] == follower.serving_state.dropped
    assert [(2, 3, 4, 5)] == reader.serving_state.dropped


def test_a_different_manifest_ends_the_provisional_image() -> None:
    """Chunks that differ are dropped, the others are kept without a provisional id."""
    harness = VerifierHarness(0, 1, provisional_id=X)
    other = Manifest(IMAGE.layout, (WRONG, *RIGHT[1:]))
    harness.verifier.set_manifest(other)
    assert [(0,)] == harness.serving_state.dropped
    assert ((1, 2),) == harness.chunk_state.verified
    assert harness.chunk_state.provisional_id is None
    assert harness.scheduler.unassigned
