"""Expected digests of the chunks of one fork: from the manifest or, until it is known, the provisional image.

Runs on the target. The transfer holds its lock around every call here. An instance that reads files without a
manifest builds a provisional image: it digests each chunk and sends the digest with it. All verified chunks
belong to one provisional image until a manifest is known; then chunks that differ from the manifest are
dropped and read again.

A provisional image is named after the origin of its files, so that another instance can continue if its
reader dies. If files of one origin turn out to differ, the instance that finds the difference drops its
chunks and continues under another name, ``ORIGIN-…``, and instances with chunks of the first image then drop
them too.
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
    """Interface of the fork to this instance's seed."""

    def set_manifest(self, manifest: Manifest) -> None:
        """Set the manifest of the image."""
        ...

    def invalidate(self, chunks: Sequence[int]) -> None:
        """Notify readers that these chunks, which were offered, are wrong."""
        ...

    def fence(self) -> None:
        """Drop all chunks and the manifest."""
        ...

    def report_storage_activity(self, read_at: Callable[[], float] | None, *, relayed: bool = False) -> None:
        """Set the time of the last storage activity, local or (`relayed`) of a source that this instance awaits."""
        ...


class ChunkVerifier:
    """The manifest or the provisional image of one fork, and the digests that each source reported."""

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
        """Chunks that the local files contain too: compared with them, or read from them."""
        self._previous_digests: dict[int, bytes] = {}
        """Digests of chunks that the image still contains from the previous weights."""

    # -- reports from sources -------------------------------------------------------------------------

    def set_manifest(self, manifest: Manifest) -> None:
        """Set the manifest, and drop chunks that do not match it."""
        before = self.manifest
        if before is not None and before.weights_id == manifest.weights_id:
            return
        self.manifest = manifest
        self._scheduler.unreserve()  # chunks were reserved for the previous manifest
        wrong = [index for index, digest in self._chunk_state.digests.items() if digest != manifest.digests[index]]
        if wrong:
            self._chunk_state.set_provisional_id(None)  # the remaining chunks are not those of its files
        self.invalidate(wrong, f"not of weights {manifest.weights_id}")
        if before is not None and not wrong:
            self._serving_state.invalidate(())  # waiting readers know the previous weights, and need a new generation
        self._serving_state.set_manifest(manifest)
        self._reuse_unchanged_chunks(manifest)

    def add_provisional_digests(
        self, source_id: str, provisional_id: str, digests: Mapping[int, bytes], *, alone: bool
    ) -> None:
        """Record the digests of a source without a manifest; `alone`: no other source has assigned chunks.

        Raises SourceWeightsChanged if these chunks and those of this fork belong to different images.
        """
        if self.manifest is not None:
            if any(self.manifest.digests[chunk] != digest for chunk, digest in digests.items()):
                raise SourceWeightsChanged(
                    f"the storage it reads contains other weights than {self.manifest.weights_id}"
                )
            return
        verified_digests = self._chunk_state.digests
        if provisional_id != self._chunk_state.provisional_id or any(
            verified_digests.get(chunk, digest) != digest for chunk, digest in digests.items()
        ):
            if self._chunk_state.provisional_id is not None and not alone:
                raise SourceWeightsChanged(
                    f"the source's chunks come from files {provisional_id}, those of this fork from "
                    f"{self._chunk_state.provisional_id}"
                )
            self._start_provisional(provisional_id)
        self._provisional_by_source.setdefault(source_id, {}).update(digests)

    def verify_local_files(
        self, source_id: str, origin: str, compared: Mapping[int, bytes], *, agrees: bool
    ) -> Mapping[int, bytes]:
        """Record that this instance reads files of `origin`, and whether they contain the `compared` digests.

        Returns the digests of further verified chunks, which must be compared first. Raises StorageError if
        the manifest is known and the files do not match it.
        """
        if self.manifest is not None:
            if not agrees:
                raise StorageError(f"these files contain other weights than {self.manifest.weights_id}")
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
        """Forget the digests of a source that has ended."""
        self._provisional_by_source.pop(source_id, None)
        self._storage_readers.discard(source_id)

    def invalidate_all(self, reason: str) -> None:
        """Drop all chunks and the manifest."""
        self.invalidate(list(ranges.indices(self._chunk_state.verified)), reason)
        self._reset()

    def restart(self) -> int:
        """Drop the weights that this fork began, because no source serves them any more.

        Returns how many chunks were verified. Their bytes stay in the image: chunks that the next weights share are
        not read again. Readers of this instance get a new generation and start over too. No read may be in flight: it
        would count for the next weights.
        """
        verified_chunks = list(ranges.indices(self._chunk_state.verified))
        self._previous_digests |= self._chunk_state.digests
        self._scheduler.invalidate(verified_chunks)
        self._serving_state.fence()
        self._reset()
        return len(verified_chunks)

    def _reuse_unchanged_chunks(self, manifest: Manifest) -> None:
        """Mark chunks of the previous weights that are right. Digests them again: they may be overwritten."""
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

    # -- completed reads ----------------------------------------------------------------------------

    def expected(self, source_id: str, chunk: int) -> bytes | None:
        """Return the required digest of a chunk read from this source, or None if any digest is accepted.

        Raises SourceWeightsChanged if it is no longer known.
        """
        if self.manifest is not None:
            return self.manifest.digests[chunk]
        if source_id in self._storage_readers:
            return None
        digest = self._provisional_by_source.get(source_id, {}).get(chunk)
        if digest is None:
            raise SourceWeightsChanged(f"the source read chunk {chunk} from other files than this fork uses now")
        return digest

    def mark_from_local_files(self, chunk: int) -> None:
        """Record that the chunk was read from local files."""
        self._from_local_files.add(chunk)

    def digests_to_compare(self) -> dict[int, bytes]:
        """Return digests to compare with files before their chunks are served: those of all verified chunks.

        With a manifest, which every chunk is checked against, or without verified chunks, the first and the
        last suffice to detect files of other weights early.
        """
        verified_digests = self._chunk_state.digests
        if verified_digests and self.manifest is None:
            return verified_digests
        digests = verified_digests or {
            chunk: digest for by_chunk in self._provisional_by_source.values() for chunk, digest in by_chunk.items()
        }
        return {chunk: digests[chunk] for chunk in (min(digests), max(digests))} if digests else {}

    def invalidate(self, chunks: Sequence[int], reason: str) -> None:
        """Drop verified chunks: they are read again."""
        if chunks:
            log.warning("verified chunks discarded, reading them again", chunks=len(chunks), reason=reason)
            self._from_local_files.difference_update(chunks)
            self._scheduler.invalidate(chunks)
            self._serving_state.invalidate(chunks)

    def finalize_manifest(self) -> bool:
        """Return whether the complete image is known to be consistent. Call it once all chunks are verified.

        It is, given a manifest, or if all chunks come from local files: their digests then become the
        manifest.
        """
        count = len(self._image.layout.chunks)
        if self.manifest is None and (len(self._from_local_files) == count or not count):
            verified_digests = self._chunk_state.digests
            self.set_manifest(Manifest(self._image.layout, tuple(verified_digests[chunk] for chunk in range(count))))
        return self.manifest is not None

    def invalidate_unconfirmed(self) -> None:
        """Drop some chunks of a complete image that no source can confirm as consistent.

        The source that the next plan assigns for them knows the manifest or determines it.
        """
        last = len(self._image.layout.chunks) - 1
        others = [chunk for chunk in ranges.indices(self._chunk_state.verified) if chunk not in self._from_local_files]
        self.invalidate(
            others if self._from_local_files else [last], "no source knows the manifest of the complete image"
        )

    def _start_provisional(self, provisional_id: str) -> None:
        """Start a provisional image; chunks of the previous one are dropped."""
        self.invalidate_all(f"not of provisional image {provisional_id}")
        self._chunk_state.set_provisional_id(provisional_id)
