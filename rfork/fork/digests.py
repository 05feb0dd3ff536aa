"""What each chunk of one fork must hold: by the manifest, or by the draft while there is none.

Runs on the target. The puller holds its lock around every call here. A draft is what an instance that
reads files without a manifest has found so far: it digests each chunk, and tells the digest with the
chunk. All chunks on the board are of one draft, until a manifest is known; then those that differ from
it are dropped, and read again.

A draft has the name of its files' origin, so several may read on where one died. Where files of one
origin turn out to differ all the same, whoever finds it drops what it holds and goes on under another
name, ``ORIGIN-…``: whoever holds chunks of the first then drops them too.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from rfork.errors import SourceChanged, StorageError
from rfork.fork.schedule import Schedule
from rfork.image import ranges
from rfork.image.board import ChunkBoard
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.logs import logger

log = logger(__name__)


class Giving(Protocol):
    """This instance's giving side, as the fork that fills it sees it."""

    def learn(self, manifest: Manifest) -> None:
        """What the image must hold is known."""
        ...

    def drop(self, chunks: Sequence[int]) -> None:
        """These chunks were offered and are wrong: whoever read them has to know."""
        ...

    def fence(self) -> None:
        """Nothing is held any more, and what the image must hold is not known."""
        ...

    def say_reading(self, read_at: Callable[[], float] | None, *, relayed: bool = False) -> None:
        """When storage last gave something, here or (`relayed`) to whom this instance waits for."""
        ...


class Digests:
    """The manifest or the draft of one fork, and what each source says of its own chunks."""

    def __init__(self, image: Image, board: ChunkBoard, schedule: Schedule, giving: Giving) -> None:
        self.manifest: Manifest | None = None
        self._image = image
        self._board = board
        self._schedule = schedule
        self._giving = giving
        self._announced: dict[str, dict[int, bytes]] = {}
        self._readers: set[str] = set()
        self._own: set[int] = set()
        """Chunks that own files hold too: found there, or read from there."""
        self._left: dict[int, bytes] = {}
        """Digests of what is in the image still from the weights before."""

    # -- what sources say -------------------------------------------------------------------------

    def learn(self, manifest: Manifest) -> None:
        """The manifest is known: chunks that do not match it are dropped."""
        before = self.manifest
        if before is not None and before.weights_id == manifest.weights_id:
            return
        self.manifest = manifest
        self._schedule.disclaim()  # what was claimed is of the manifest before
        wrong = [index for index, digest in self._board.digests.items() if digest != manifest.digests[index]]
        if wrong:
            self._board.begin(None)  # what is left is not what its files hold
        self.drop(wrong, f"not of weights {manifest.weights_id}")
        if before is not None and not wrong:
            self._giving.drop(())  # whoever waits here was told of other weights, and has to hear of it
        self._giving.learn(manifest)
        self._take_back(manifest)

    def announce(self, source_id: str, draft: str, digests: Mapping[int, bytes], *, alone: bool) -> None:
        """A source without a manifest says what it holds; `alone`: nothing is wanted of any other.

        Raises SourceChanged where these chunks and those of this fork are not of one image.
        """
        if self.manifest is not None:
            if any(self.manifest.digests[chunk] != digest for chunk, digest in digests.items()):
                raise SourceChanged(f"it reads other weights than {self.manifest.weights_id}")
            return
        held = self._board.digests
        if draft != self._board.draft or any(
            held.get(chunk, digest) != digest for chunk, digest in digests.items()
        ):
            if self._board.draft is not None and not alone:
                raise SourceChanged(f"its chunks are of draft {draft}, here they are of {self._board.draft}")
            self._begin(draft)
        self._announced.setdefault(source_id, {}).update(digests)

    def read_files(
        self, source_id: str, origin: str, compared: Mapping[int, bytes], *, agrees: bool
    ) -> Mapping[int, bytes]:
        """This instance reads files of `origin` by itself; whether they hold what was `compared`.

        Returns the digests of chunks that are held besides, which have to be compared first. Raises
        StorageError where the manifest is known and the files do not agree with it.
        """
        if self.manifest is not None:
            if not agrees:
                raise StorageError(f"holds other weights than {self.manifest.weights_id}")
            return {}
        draft = self._board.draft
        if draft is None or draft.partition("-")[0] != origin:
            self._begin(origin)
        elif not agrees:
            self._begin(f"{origin}-{secrets.token_hex(8)}")
        else:
            held = self._board.digests
            left = {chunk: digest for chunk, digest in held.items() if compared.get(chunk) != digest}
            if left:
                return left
            self._own.update(held)
        self._readers.add(source_id)
        return {}

    def forget(self, source_id: str) -> None:
        """The source has ended: what it said counts no more."""
        self._announced.pop(source_id, None)
        self._readers.discard(source_id)

    def drop_all(self, why: str) -> None:
        """Hold nothing and know nothing any more."""
        self.drop(list(ranges.indices(self._board.verified)), why)
        self._forget_all()

    def start_over(self) -> int:
        """Nobody gives the weights any more that this fork has begun; returns how many chunks were held.

        They stay in the image: those that the next weights have too are not read again. Whoever reads
        from here is told by a new generation, and starts over in its turn. Nothing may be in flight:
        what lands later would count for the weights that come next.
        """
        held = list(ranges.indices(self._board.verified))
        self._left |= self._board.digests
        self._schedule.drop(held)
        self._giving.fence()
        self._forget_all()
        return len(held)

    def _take_back(self, manifest: Manifest) -> None:
        """Mark what is left of the weights before and is right; digested anew, as much may have happened."""
        left, self._left = self._left, {}
        same = [
            chunk
            for chunk, digest in left.items()
            if digest == manifest.digests[chunk] and digest == self._image.digest(chunk)
        ]
        for chunk in self._schedule.found(same):
            self._board.mark(chunk, manifest.digests[chunk])

    def _forget_all(self) -> None:
        self._schedule.disclaim()
        self.manifest = None
        self._board.begin(None)
        self._announced.clear()
        self._readers.clear()
        self._own.clear()

    # -- what was read ----------------------------------------------------------------------------

    def expected(self, source_id: str, chunk: int) -> bytes | None:
        """The digest that a chunk read from this source must have; None: whatever it turns out to be.

        Raises SourceChanged where that is not known any more.
        """
        if self.manifest is not None:
            return self.manifest.digests[chunk]
        if source_id in self._readers:
            return None
        digest = self._announced.get(source_id, {}).get(chunk)
        if digest is None:
            raise SourceChanged(f"chunk {chunk} is of another draft than this fork holds by now")
        return digest

    def confirm(self, chunk: int) -> None:
        """The chunk was read from own files."""
        self._own.add(chunk)

    def held(self) -> dict[int, bytes]:
        """Digests that files have to hold too, before chunks of theirs are given: of all that is held.

        With a manifest, which every chunk is checked against, and where nothing is held but something
        is offered, the first and the last are enough to tell at once that the files are others.
        """
        held = self._board.digests
        if held and self.manifest is None:
            return held
        digests = held or {
            chunk: digest for told in self._announced.values() for chunk, digest in told.items()
        }
        return {chunk: digests[chunk] for chunk in (min(digests), max(digests))} if digests else {}

    def drop(self, chunks: Sequence[int], why: str) -> None:
        """Forget chunks that were verified: they are read again."""
        if chunks:
            log.warning("chunks dropped", chunks=len(chunks), because=why)
            self._own.difference_update(chunks)
            self._schedule.drop(chunks)
            self._giving.drop(chunks)

    def seal(self) -> bool:
        """Every chunk is held: whether they are known to be of one image.

        By the manifest; or because all are those of own files: then their digests are the manifest.
        """
        count = len(self._image.layout.chunks)
        if self.manifest is None and (len(self._own) == count or not count):
            held = self._board.digests
            self.learn(Manifest(self._image.layout, tuple(held[chunk] for chunk in range(count))))
        return self.manifest is not None

    def doubt(self) -> None:
        """Every chunk is held, and nobody is left who could say that they are of one image.

        Some are given up: whoever is asked for them by the next plan knows it, or finds it out.
        """
        last = len(self._image.layout.chunks) - 1
        others = [chunk for chunk in ranges.indices(self._board.verified) if chunk not in self._own]
        self.drop(others if self._own else [last], "nobody is left who knows the whole image")

    def _begin(self, draft: str) -> None:
        """Chunks are of this draft from now on; those of the one before are dropped."""
        self.drop_all(f"not of draft {draft}")
        self._board.begin(draft)
