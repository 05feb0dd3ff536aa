"""What each chunk must hold: the manifest once it is known, else what its source said of it."""

from __future__ import annotations

import pytest

from rfork.errors import SourceChanged, StorageError
from rfork.fork.digests import Digests
from rfork.fork.schedule import Schedule
from rfork.image.board import ChunkBoard
from rfork.image.manifest import Manifest
from tests.unit.fork.fleet import CHUNKS, Relay, image

IMAGE = image()
RIGHT = tuple(bytes([index]) * 16 for index in range(CHUNKS))
MANIFEST = Manifest(IMAGE.layout, RIGHT)
WRONG = b"w" * 16
X, Y = "c" * 32, "d" * 32


class Ledger:
    """Digests with all that they work on."""

    def __init__(self, *held: int, draft: str | None = None) -> None:
        self.board = ChunkBoard(IMAGE.layout.chunks)
        self.board.begin(draft)
        for index in held:
            self.board.mark(index, RIGHT[index])
        self.schedule = Schedule(CHUNKS, self.board.verified)
        self.relay = Relay(self.board)
        self.digests = Digests(IMAGE, self.board, self.schedule, self.relay)


def test_a_source_s_own_word_counts_until_the_manifest_is_known() -> None:
    """Then that counts, for every source."""
    ledger = Ledger()
    ledger.digests.announce("a", X, {2: WRONG}, alone=True)
    before = ledger.digests.expected("a", 2)
    ledger.digests.learn(MANIFEST)
    assert (WRONG, RIGHT[2]) == (before, ledger.digests.expected("a", 2))


@pytest.mark.parametrize(("source", "chunk"), [("a", 3), ("b", 2)], ids=["another chunk", "another source"])
def test_a_chunk_that_nobody_spoke_of_is_not_kept(source: str, chunk: int) -> None:
    """Without a manifest a chunk needs its own source's word."""
    ledger = Ledger()
    ledger.digests.announce("a", X, {2: WRONG}, alone=True)
    with pytest.raises(SourceChanged):
        ledger.digests.expected(source, chunk)


def test_a_source_that_ended_has_no_word() -> None:
    """What it said goes with it."""
    ledger = Ledger()
    ledger.digests.announce("a", X, {2: WRONG}, alone=True)
    ledger.digests.forget("a")
    with pytest.raises(SourceChanged):
        ledger.digests.expected("a", 2)


@pytest.mark.parametrize("digest", [RIGHT[1], WRONG], ids=["same", "other"])
def test_a_draft_is_held_against_the_manifest(digest: bytes) -> None:
    """A source that reads other weights than those known is refused before a byte is read."""
    ledger = Ledger()
    ledger.digests.learn(MANIFEST)
    refused = False
    try:
        ledger.digests.announce("a", X, {1: digest}, alone=True)
    except SourceChanged:
        refused = True
    assert (digest == WRONG) == refused


@pytest.mark.parametrize(
    ("draft", "said", "alone", "dropped"),
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
    draft: str, said: bytes, alone: bool, dropped: list[tuple[int, ...]] | None
) -> None:
    """Another name, or another digest of a chunk that is held: the newcomer goes, or what is held."""
    ledger = Ledger(0, 1, draft=X)
    if dropped is None:
        with pytest.raises(SourceChanged):
            ledger.digests.announce("a", draft, {0: said}, alone=alone)
    else:
        ledger.digests.announce("a", draft, {0: said}, alone=alone)
    assert (dropped or [], X if dropped is None else draft) == (ledger.relay.dropped, ledger.board.draft)


@pytest.mark.parametrize(
    ("origin", "agrees", "dropped", "draft"),
    [(X, True, [], X), (X, False, [(0, 1)], f"{X}-"), (Y, True, [(0, 1)], Y)],
    ids=["the same files", "changed files", "other files"],
)
def test_going_on_from_own_files(
    origin: str, agrees: bool, dropped: list[tuple[int, ...]], draft: str
) -> None:
    """What is held stays only where the files are known, and seen, to be the same."""
    ledger = Ledger(0, 1, draft=X)
    ledger.digests.read_files("own", origin, {0: RIGHT[0], 1: RIGHT[1]}, agrees=agrees)
    told = ledger.board.draft or ""
    assert (dropped, draft, None) == (
        ledger.relay.dropped,
        told[: len(draft)],
        ledger.digests.expected("own", 5),
    )


@pytest.mark.parametrize("agrees", [True, False])
def test_own_files_beside_a_manifest(agrees: bool) -> None:
    """Files that differ from what is known fail at once; nothing that is held is dropped for them."""
    ledger = Ledger(0, 1)
    ledger.digests.learn(MANIFEST)
    failed = False
    try:
        ledger.digests.read_files("own", X, {0: RIGHT[0], 1: RIGHT[1]}, agrees=agrees)
    except StorageError:
        failed = True
    assert (not agrees, []) == (failed, ledger.relay.dropped)


def test_what_files_have_to_hold() -> None:
    """All that is held of a draft; beside a manifest, or with nothing held but offered, first and last."""
    holding, sealed, offered, fresh = Ledger(1, 3, 4, draft=X), Ledger(1, 3, 4), Ledger(), Ledger()
    sealed.digests.learn(MANIFEST)
    offered.digests.announce("a", X, {2: RIGHT[2], 5: RIGHT[5], 3: RIGHT[3]}, alone=True)
    all_held = {1: RIGHT[1], 3: RIGHT[3], 4: RIGHT[4]}
    assert (all_held, {1: RIGHT[1], 4: RIGHT[4]}, {2: RIGHT[2], 5: RIGHT[5]}, {}) == (
        holding.digests.held(),
        sealed.digests.held(),
        offered.digests.held(),
        fresh.digests.held(),
    )


def test_what_came_while_files_were_compared_is_compared_too() -> None:
    """The reader of own files is taken on only once each chunk that is held was found in them."""
    ledger = Ledger(0, 1, draft=X)
    left = ledger.digests.read_files("own", X, {0: RIGHT[0]}, agrees=True)
    with pytest.raises(SourceChanged):
        ledger.digests.expected("own", 5)
    then = ledger.digests.read_files("own", X, {0: RIGHT[0], 1: RIGHT[1]}, agrees=True)
    assert ({1: RIGHT[1]}, {}, None) == (left, then, ledger.digests.expected("own", 5))


def test_own_files_make_the_manifest() -> None:
    """Whoever found or read every chunk in its own files knows the manifest, and its draft stays known."""
    ledger = Ledger(*range(CHUNKS), draft=X)
    held = ledger.board.digests
    del held[3]
    ledger.digests.read_files("own", X, held | {3: RIGHT[3]}, agrees=True)
    assert (True, [MANIFEST], X) == (ledger.digests.seal(), ledger.relay.learnt, ledger.board.draft)


def test_chunks_of_others_are_not_sealed() -> None:
    """That they are of one image is for their reader to say; who reads files itself reads theirs instead."""
    follower, reader = Ledger(*range(CHUNKS), draft=X), Ledger(0, 1, draft=X)
    reader.digests.read_files("own", X, reader.board.digests, agrees=True)
    for chunk in range(2, CHUNKS):
        reader.board.mark(chunk, RIGHT[chunk])
    sealed = (follower.digests.seal(), reader.digests.seal())
    follower.digests.doubt()
    reader.digests.doubt()
    assert ((False, False), [(5,)], [(2, 3, 4, 5)]) == (sealed, follower.relay.dropped, reader.relay.dropped)


def test_a_manifest_that_differs_ends_the_draft() -> None:
    """Chunks that differ go, the others stay; they are of no draft any more."""
    ledger = Ledger(0, 1, draft=X)
    other = Manifest(IMAGE.layout, (WRONG, *RIGHT[1:]))
    ledger.digests.learn(other)
    assert ([(0,)], ((1, 2),), None, True) == (
        ledger.relay.dropped,
        ledger.board.verified,
        ledger.board.draft,
        ledger.schedule.unassigned,
    )
