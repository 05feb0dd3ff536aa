"""What each chunk must hold: the manifest once it is known, else what its source said of it."""

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
    """Digests with all that they work on."""

    def __init__(self, *verified_chunks: int, provisional_id: str | None = None) -> None:
        self.chunk_state = ChunkState(IMAGE.layout.chunks)
        self.chunk_state.set_provisional_id(provisional_id)
        for index in verified_chunks:
            self.chunk_state.mark_verified(index, RIGHT[index])
        self.scheduler = ChunkScheduler(CHUNKS, self.chunk_state.verified)
        self.relay = RecordingServingState(self.chunk_state)
        self.digests = ChunkVerifier(IMAGE, self.chunk_state, self.scheduler, self.relay)


def test_a_source_s_own_word_counts_until_the_manifest_is_known() -> None:
    """Then that counts, for every source."""
    harness = VerifierHarness()
    harness.digests.add_provisional_digests("a", X, {2: WRONG}, alone=True)
    before = harness.digests.expected("a", 2)
    harness.digests.set_manifest(MANIFEST)
    assert (WRONG, RIGHT[2]) == (before, harness.digests.expected("a", 2))


@pytest.mark.parametrize(("source", "chunk"), [("a", 3), ("b", 2)], ids=["another chunk", "another source"])
def test_a_chunk_that_nobody_spoke_of_is_not_kept(source: str, chunk: int) -> None:
    """Without a manifest a chunk needs its own source's word."""
    harness = VerifierHarness()
    harness.digests.add_provisional_digests("a", X, {2: WRONG}, alone=True)
    with pytest.raises(SourceWeightsChanged):
        harness.digests.expected(source, chunk)


def test_a_source_that_ended_has_no_word() -> None:
    """What it said goes with it."""
    harness = VerifierHarness()
    harness.digests.add_provisional_digests("a", X, {2: WRONG}, alone=True)
    harness.digests.remove_source("a")
    with pytest.raises(SourceWeightsChanged):
        harness.digests.expected("a", 2)


@pytest.mark.parametrize("digest", [RIGHT[1], WRONG], ids=["same", "other"])
def test_a_draft_is_held_against_the_manifest(digest: bytes) -> None:
    """A source that reads other weights than those known is refused before a byte is read."""
    harness = VerifierHarness()
    harness.digests.set_manifest(MANIFEST)
    refused = False
    try:
        harness.digests.add_provisional_digests("a", X, {1: digest}, alone=True)
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
def test_chunks_of_two_drafts_are_not_mixed(
    provisional_id: str, reported_digest: bytes, alone: bool, dropped: list[tuple[int, ...]] | None
) -> None:
    """Another name, or another digest of a chunk that is held: the newcomer goes, or what is held."""
    harness = VerifierHarness(0, 1, provisional_id=X)
    if dropped is None:
        with pytest.raises(SourceWeightsChanged):
            harness.digests.add_provisional_digests("a", provisional_id, {0: reported_digest}, alone=alone)
    else:
        harness.digests.add_provisional_digests("a", provisional_id, {0: reported_digest}, alone=alone)
    assert (dropped or [], X if dropped is None else provisional_id) == (
        harness.relay.dropped,
        harness.chunk_state.provisional_id,
    )


@pytest.mark.parametrize(
    ("origin", "agrees", "dropped", "provisional_id"),
    [(X, True, [], X), (X, False, [(0, 1)], f"{X}-"), (Y, True, [(0, 1)], Y)],
    ids=["the same files", "changed files", "other files"],
)
def test_going_on_from_own_files(
    origin: str, agrees: bool, dropped: list[tuple[int, ...]], provisional_id: str
) -> None:
    """What is held stays only where the files are known, and seen, to be the same."""
    harness = VerifierHarness(0, 1, provisional_id=X)
    harness.digests.verify_local_files("own", origin, {0: RIGHT[0], 1: RIGHT[1]}, agrees=agrees)
    board_provisional_id = harness.chunk_state.provisional_id or ""
    assert (dropped, provisional_id, None) == (
        harness.relay.dropped,
        board_provisional_id[: len(provisional_id)],
        harness.digests.expected("own", 5),
    )


@pytest.mark.parametrize("agrees", [True, False])
def test_own_files_beside_a_manifest(agrees: bool) -> None:
    """Files that differ from what is known fail at once; nothing that is held is dropped for them."""
    harness = VerifierHarness(0, 1)
    harness.digests.set_manifest(MANIFEST)
    failed = False
    try:
        harness.digests.verify_local_files("own", X, {0: RIGHT[0], 1: RIGHT[1]}, agrees=agrees)
    except StorageError:
        failed = True
    assert (not agrees, []) == (failed, harness.relay.dropped)


def test_what_files_have_to_hold() -> None:
    """All that is held of a draft; beside a manifest, or with nothing held but offered, first and last."""
    partial, sealed, offered, fresh = (
        VerifierHarness(1, 3, 4, provisional_id=X),
        VerifierHarness(1, 3, 4),
        VerifierHarness(),
        VerifierHarness(),
    )
    sealed.digests.set_manifest(MANIFEST)
    offered.digests.add_provisional_digests("a", X, {2: RIGHT[2], 5: RIGHT[5], 3: RIGHT[3]}, alone=True)
    all_digests = {1: RIGHT[1], 3: RIGHT[3], 4: RIGHT[4]}
    assert (all_digests, {1: RIGHT[1], 4: RIGHT[4]}, {2: RIGHT[2], 5: RIGHT[5]}, {}) == (
        partial.digests.digests_to_compare(),
        sealed.digests.digests_to_compare(),
        offered.digests.digests_to_compare(),
        fresh.digests.digests_to_compare(),
    )


def test_what_came_while_files_were_compared_is_compared_too() -> None:
    """The reader of own files is taken on only once each chunk that is held was found in them."""
    harness = VerifierHarness(0, 1, provisional_id=X)
    left = harness.digests.verify_local_files("own", X, {0: RIGHT[0]}, agrees=True)
    with pytest.raises(SourceWeightsChanged):
        harness.digests.expected("own", 5)
    then = harness.digests.verify_local_files("own", X, {0: RIGHT[0], 1: RIGHT[1]}, agrees=True)
    assert ({1: RIGHT[1]}, {}, None) == (left, then, harness.digests.expected("own", 5))


def test_own_files_make_the_manifest() -> None:
    """Whoever found or read every chunk in its own files knows the manifest, and its draft stays known."""
    harness = VerifierHarness(*range(CHUNKS), provisional_id=X)
    board_digests = harness.chunk_state.digests
    del board_digests[3]
    harness.digests.verify_local_files("own", X, board_digests | {3: RIGHT[3]}, agrees=True)
    assert (True, [MANIFEST], X) == (
        harness.digests.finalize_manifest(),
        harness.relay.manifests,
        harness.chunk_state.provisional_id,
    )


def test_chunks_of_others_are_not_sealed() -> None:
    """That they are of one image is for their reader to say; who reads files itself reads theirs instead."""
    follower, reader = (
        VerifierHarness(*range(CHUNKS), provisional_id=X),
        VerifierHarness(0, 1, provisional_id=X),
    )
    reader.digests.verify_local_files("own", X, reader.chunk_state.digests, agrees=True)
    for chunk in range(2, CHUNKS):
        reader.chunk_state.mark_verified(chunk, RIGHT[chunk])
    sealed = (follower.digests.finalize_manifest(), reader.digests.finalize_manifest())
    follower.digests.invalidate_unconfirmed()
    reader.digests.invalidate_unconfirmed()
    assert ((False, False), [(5,)], [(2, 3, 4, 5)]) == (sealed, follower.relay.dropped, reader.relay.dropped)


def test_a_manifest_that_differs_ends_the_draft() -> None:
    """Chunks that differ go, the others stay; they are of no draft any more."""
    harness = VerifierHarness(0, 1, provisional_id=X)
    other = Manifest(IMAGE.layout, (WRONG, *RIGHT[1:]))
    harness.digests.set_manifest(other)
    assert ([(0,)], ((1, 2),), None, True) == (
        harness.relay.dropped,
        harness.chunk_state.verified,
        harness.chunk_state.provisional_id,
        harness.scheduler.unassigned,
    )
