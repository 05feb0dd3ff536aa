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

from rfork.errors import SourceWeightsChanged, StorageError
from rfork.image import ranges
from rfork.image.chunk_state import ChunkState
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.receiver.chunk_scheduler import ChunkScheduler

log = logger(__name__)


class ServingState(Protocol):
    """This instance's giving side, as the fork that fills it sees it."""

    def set_manifest(self, manifest: Manifest) -> None:
        """What the image must hold is known."""
        ...

    def invalidate(self, chunks: Sequence[int]) -> None:
        """These chunks were offered and are wrong: whoever read them has to know."""
        ...

    def fence(self) -> None:
        """Nothing is held any more, and what the image must hold is not known."""
        ...

    def report_storage_activity(self, read_at: Callable[[], float] | None, *, relayed: bool = False) -> None:
        """When storage last gave something, here or (`relayed`) to whom this instance waits for."""
        ...


class ChunkVerifier:
    """The manifest or the draft of one fork, and what each source says of its own chunks."""

    def __init__(
        self, image: Image, chunk_state: ChunkState, scheduler: ChunkScheduler, serving_state: ServingState
    ) -> None:
        self.manifest: Manifest | None = None
        self._image = image
        self._chunk_state = chunk_state
        self._scheduler = scheduler
        self._serving_state = serving_state
        self._provisional_by_source: dict[str, dict[int, bytes]] = {}
        self._storage_readers: set[str] = set()
        self._from_local_files: set[int] = set()
        """Chunks that own files hold too: found there, or read from there."""
        self._previous_digests: dict[int, bytes] = {}
        """Digests of what is in the image still from the weights before."""

    # -- what sources say -------------------------------------------------------------------------

    def set_manifest(self, manifest: Manifest) -> None:
        """The manifest is known: chunks that do not match it are dropped."""
        before = self.manifest
        if before is not None and before.weights_id == manifest.weights_id:
            return
        self.manifest = manifest
        self._scheduler.unreserve()  # what was claimed is of the manifest before
        wrong = [index for index, digest in self._chunk_state.digests.items() if digest != manifest.digests[index]]
        if wrong:
            self._chunk_state.set_provisional_id(None)  # what is left is not what its files hold
        self.invalidate(wrong, f"not of weights {manifest.weights_id}")
        if before is not None and not wrong:
            self._serving_state.invalidate(())  # whoever waits here was told of other weights, and has to hear of it
        self._serving_state.set_manifest(manifest)
        self._reuse_unchanged_chunks(manifest)

    def add_provisional_digests(
        self, source_id: str, provisional_id: str, digests: Mapping[int, bytes], *, alone: bool
    ) -> None:
        """A source without a manifest says what it holds; `alone`: nothing is wanted of any other.

        Raises SourceWeightsChanged where these chunks and those of this fork are not of one image.
        """
        if self.manifest is not None:
            if any(self.manifest.digests[chunk] != digest for chunk, digest in digests.items()):
                raise SourceWeightsChanged(f"it reads other weights than {self.manifest.weights_id}")
            return
        verified_digests = self._chunk_state.digests
        if provisional_id != self._chunk_state.provisional_id or any(
            verified_digests.get(chunk, digest) != digest for chunk, digest in digests.items()
        ):
            if self._chunk_state.provisional_id is not None and not alone:
                raise SourceWeightsChanged(
                    f"its chunks are of draft {provisional_id}, here they are of {self._chunk_state.provisional_id}"
                )
            self._start_provisional(provisional_id)
        self._provisional_by_source.setdefault(source_id, {}).update(digests)

    def verify_local_files(
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
        provisional_id = self._chunk_state.provisional_id
        if provisional_id is None or provisional_id.partition("-")[0] != origin:
            self._start_provisional(origin)
        elif not agrees:
            self._start_provisional(f"{origin}-{secrets.token_hex(8)}")
        else:
            verified_digests = self._chunk_state.digests
            left = {chunk: digest for chunk, digest in verified_digests.items() if compared.get(chunk) != digest}
            if left:
                return left
            self._from_local_files.update(verified_digests)
        self._storage_readers.add(source_id)
        return {}

    def remove_source(self, source_id: str) -> None:
        """The source has ended: what it said counts no more."""
        self._provisional_by_source.pop(source_id, None)
        self._storage_readers.discard(source_id)

    def invalidate_all(self, reason: str) -> None:
        """Hold nothing and know nothing any more."""
        self.invalidate(list(ranges.indices(self._chunk_state.verified)), reason)
        self._reset()

    def restart(self) -> int:
        """Nobody gives the weights any more that this fork has begun; returns how many chunks were held.

        They stay in the image: those that the next weights have too are not read again. Whoever reads
        from here is told by a new generation, and starts over in its turn. Nothing may be in flight:
        what lands later would count for the weights that come next.
        """
        verified_chunks = list(ranges.indices(self._chunk_state.verified))
        self._previous_digests |= self._chunk_state.digests
        self._scheduler.invalidate(verified_chunks)
        self._serving_state.fence()
        self._reset()
        return len(verified_chunks)

    def _reuse_unchanged_chunks(self, manifest: Manifest) -> None:
        """Mark what is left of the weights before and is right; digested anew, as much may have happened."""
        left, self._previous_digests = self._previous_digests, {}
        same = [
            chunk
            for chunk, digest in left.items()
            if digest == manifest.digests[chunk] and digest == self._image.digest(chunk)
        ]
        for chunk in self._scheduler.mark_found(same):
            self._chunk_state.mark_verified(chunk, manifest.digests[chunk])

    def _reset(self) -> None:
        self._scheduler.unreserve()
        self.manifest = None
        self._chunk_state.set_provisional_id(None)
        self._provisional_by_source.clear()
        self._storage_readers.clear()
        self._from_local_files.clear()

    # -- what was read ----------------------------------------------------------------------------

    def expected(self, source_id: str, chunk: int) -> bytes | None:
        """The digest that a chunk read from this source must have; None: whatever it turns out to be.

        Raises SourceWeightsChanged where that is not known any more.
        """
        if self.manifest is not None:
            return self.manifest.digests[chunk]
        if source_id in self._storage_readers:
            return None
        digest = self._provisional_by_source.get(source_id, {}).get(chunk)
        if digest is None:
            raise SourceWeightsChanged(f"chunk {chunk} is of another draft than this fork holds by now")
        return digest

    def mark_from_local_files(self, chunk: int) -> None:
        """The chunk was read from own files."""
        self._from_local_files.add(chunk)

    def digests_to_compare(self) -> dict[int, bytes]:
        """Digests that files have to hold too, before chunks of theirs are given: of all that is held.

        With a manifest, which every chunk is checked against, and where nothing is held but something
        is offered, the first and the last are enough to tell at once that the files are others.
        """
        verified_digests = self._chunk_state.digests
        if verified_digests and self.manifest is None:
            return verified_digests
        digests = verified_digests or {
            chunk: digest for by_chunk in self._provisional_by_source.values() for chunk, digest in by_chunk.items()
        }
        return {chunk: digests[chunk] for chunk in (min(digests), max(digests))} if digests else {}

    def invalidate(self, chunks: Sequence[int], reason: str) -> None:
        """Forget chunks that were verified: they are read again."""
        if chunks:
            log.warning("chunks dropped", chunks=len(chunks), reason=reason)
            self._from_local_files.difference_update(chunks)
            self._scheduler.invalidate(chunks)
            self._serving_state.invalidate(chunks)

    def finalize_manifest(self) -> bool:
        """Every chunk is held: whether they are known to be of one image.

        By the manifest; or because all are those of own files: then their digests are the manifest.
        """
        count = len(self._image.layout.chunks)
        if self.manifest is None and (len(self._from_local_files) == count or not count):
            verified_digests = self._chunk_state.digests
            self.set_manifest(Manifest(self._image.layout, tuple(verified_digests[chunk] for chunk in range(count))))
        return self.manifest is not None

    def invalidate_unconfirmed(self) -> None:
        """Every chunk is held, and nobody is left who could say that they are of one image.

        Some are given up: whoever is asked for them by the next plan knows it, or finds it out.
        """
        last = len(self._image.layout.chunks) - 1
        others = [chunk for chunk in ranges.indices(self._chunk_state.verified) if chunk not in self._from_local_files]
        self.invalidate(others if self._from_local_files else [last], "nobody is left who knows the whole image")

    def _start_provisional(self, provisional_id: str) -> None:
        """Chunks are of this draft from now on; those of the one before are dropped."""
        self.invalidate_all(f"not of draft {provisional_id}")
        self._chunk_state.set_provisional_id(provisional_id)
