"""Expected digest of each chunk of one fork, from the manifest or, until it is known, from the provisional
image.

Runs on the target; pure, used by `rfork.receiver.machine`. An instance that reads files without a manifest
builds a provisional image: it digests each chunk and sends the digest with it. All verified chunks belong to
one provisional image until a manifest is known; then chunks that differ from the manifest are dropped and read
again.

A provisional image is named after the origin of its files, so that another instance can continue if its
reader dies. If files of one origin turn out to differ, the instance that finds the difference drops its
chunks and continues under another name, ``ORIGIN-…``, and instances with chunks of the first image then drop
them too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rfork.errors import SourceWeightsChanged, StorageError
from rfork.image.layout import Layout, Manifest
from rfork.logs import logger
from rfork.receiver import events
from rfork.receiver.chunk_scheduler import ChunkScheduler
from rfork.receiver.events import Action

log = logger(__name__)

KEPT_SOURCE_ID = "kept"
"""Source id, in the scheduler, of chunks that the image still contains from the previous weights."""


class WrongDigest(Exception):
    """A chunk does not have the expected digest."""


class ChunkVerifier:
    """The manifest or the provisional image of one fork, and the digests that each source reported.

    `emit` receives the actions that follow from each call, in order.
    """

    def __init__(self, layout: Layout, scheduler: ChunkScheduler, emit: Callable[[Action], None]) -> None:
        self.manifest: Manifest | None = None
        self.digests: dict[int, bytes] = {}
        """Known digests of the verified chunks."""
        self.provisional_id: str | None = None
        """The provisional image of the verified chunks; None if there is none, or a manifest."""
        self._layout = layout
        self._scheduler = scheduler
        self._emit = emit
        self._provisional_by_source: dict[int, dict[int, bytes]] = {}
        self._storage_readers: set[int] = set()
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
        wrong = [index for index, digest in self.digests.items() if digest != manifest.digests[index]]
        if wrong:
            self._set_provisional_id(None)  # the remaining chunks are not those of its files
        self.invalidate(wrong, f"not of weights {manifest.weights_id}")
        if before is not None and not wrong:
            # Waiting readers know the previous weights, and need a new generation.
            self._emit(events.InvalidateChunks(()))
        self._emit(events.SetManifest(manifest))
        self._reuse_kept_chunks(manifest)

    def add_provisional_digests(
        self, connection: int, provisional_id: str, digests: Mapping[int, bytes], *, alone: bool
    ) -> None:
        """Record the digests of a source without a manifest; `alone`: no other source has assigned chunks.

        Raises SourceWeightsChanged if these chunks and those of this fork belong to different images.
        """
        if self.manifest is not None:
            if any(self.manifest.digests[chunk] != digest for chunk, digest in digests.items()):
                raise SourceWeightsChanged(f"it reads other weights than {self.manifest.weights_id}")
            return
        if provisional_id != self.provisional_id or any(
            self.digests.get(chunk, digest) != digest for chunk, digest in digests.items()
        ):
            if self.provisional_id is not None and not alone:
                raise SourceWeightsChanged(
                    f"its chunks belong to provisional image {provisional_id}, those of this fork to "
                    f"{self.provisional_id}"
                )
            self._start_provisional(provisional_id)
        self._provisional_by_source.setdefault(connection, {}).update(digests)

    def verify_local_files(
        self, connection: int, origin: str, compared: Mapping[int, bytes], *, agrees: bool, unique_id: str
    ) -> Mapping[int, bytes]:
        """Record that this instance reads files of `origin`, and whether they contain the `compared` digests.

        Returns the digests of further verified chunks, which must be compared first. `unique_id` names a
        provisional image of its own, if the files differ. Raises StorageError if the manifest is known and the
        files do not match it.
        """
        if self.manifest is not None:
            if not agrees:
                raise StorageError(f"contains other weights than {self.manifest.weights_id}")
            return {}
        if self.provisional_id is None or self.provisional_id.partition("-")[0] != origin:
            self._start_provisional(origin)
        elif not agrees:
            self._start_provisional(f"{origin}-{unique_id}")
        else:
            left = {chunk: digest for chunk, digest in self.digests.items() if compared.get(chunk) != digest}
            if left:
                return left
            self._from_local_files.update(self.digests)
        self._storage_readers.add(connection)
        return {}

    def remove_source(self, connection: int) -> None:
        """Forget the digests of a source that has ended."""
        self._provisional_by_source.pop(connection, None)
        self._storage_readers.discard(connection)

    def invalidate_all(self, reason: str) -> None:
        """Drop all chunks and the manifest."""
        self.invalidate(sorted(self._scheduler.verified_chunks), reason)
        self._reset()

    def restart(self) -> int:
        """Drop the weights that this fork began, as no source serves them any more; returns how many chunks
        were verified.

        Their bytes stay in the image: chunks that the next weights share are not read again. Readers of this
        instance get a new generation and start over too. No read may be in flight: it would count for the
        next weights.
        """
        verified_chunks = sorted(self._scheduler.verified_chunks)
        self._previous_digests |= self.digests
        self._scheduler.invalidate(verified_chunks)
        self.digests.clear()
        self._emit(events.FenceImage())
        self._reset()
        return len(verified_chunks)

    def _reuse_kept_chunks(self, manifest: Manifest) -> None:
        """Digest chunks of the previous weights that may be right again, as they may have been overwritten."""
        left, self._previous_digests = self._previous_digests, {}
        for chunk, digest in left.items():
            if digest == manifest.digests[chunk] and self._scheduler.begin_local(KEPT_SOURCE_ID, chunk):
                self._emit(events.DigestKeptChunk(chunk))

    def _reset(self) -> None:
        self._scheduler.unreserve()
        self.manifest = None
        self._set_provisional_id(None)
        self._provisional_by_source.clear()
        self._storage_readers.clear()
        self._from_local_files.clear()

    # -- completed reads ----------------------------------------------------------------------------

    def check(self, connection: int, chunk: int, digest: bytes | None) -> bytes | None:
        """Return the digest of a chunk that was read from this source; None: none is known.

        `digest` is that of the bytes, None if they were not digested. Raises SourceWeightsChanged if the chunk
        can no longer be verified, and WrongDigest.
        """
        expected = self._expected(connection, chunk)
        if digest is None:
            return expected
        if expected is not None and digest != expected:
            raise WrongDigest(f"chunk {chunk} does not match its digest")
        return digest

    def _expected(self, connection: int, chunk: int) -> bytes | None:
        """Return the required digest of a chunk read from this source, or None if any digest is accepted."""
        if self.manifest is not None:
            return self.manifest.digests[chunk]
        if connection in self._storage_readers:
            return None
        digest = self._provisional_by_source.get(connection, {}).get(chunk)
        if digest is None:
            raise SourceWeightsChanged(f"chunk {chunk} belongs to another provisional image than this fork has now")
        return digest

    def mark_verified(self, chunk: int, digest: bytes | None, *, from_local_files: bool = False) -> None:
        """Record that the image contains the right bytes of a chunk."""
        if from_local_files:
            self._from_local_files.add(chunk)
        if digest is not None:
            self.digests[chunk] = digest
        self._emit(events.MarkVerified(chunk, digest))

    def digests_to_compare(self) -> dict[int, bytes]:
        """Return digests to compare with files before their chunks are served: those of all verified chunks.

        With a manifest, which every chunk is checked against, or without verified chunks, the first and the
        last suffice to detect files of other weights early.
        """
        if self.digests and self.manifest is None:
            return dict(self.digests)
        digests = self.digests or {
            chunk: digest for by_chunk in self._provisional_by_source.values() for chunk, digest in by_chunk.items()
        }
        return {chunk: digests[chunk] for chunk in (min(digests), max(digests))} if digests else {}

    def invalidate(self, chunks: Sequence[int], reason: str) -> None:
        """Drop verified chunks: they are read again."""
        if chunks:
            log.warning("chunks dropped", chunks=len(chunks), reason=reason)
            self._from_local_files.difference_update(chunks)
            for chunk in chunks:
                self.digests.pop(chunk, None)
            self._scheduler.invalidate(chunks)
            self._emit(events.InvalidateChunks(tuple(chunks)))

    def finalize_manifest(self) -> bool:
        """Return whether the complete image is known to be consistent. Call it once all chunks are verified.

        It is, given a manifest, or if all chunks come from local files: their digests then become the
        manifest.
        """
        count = len(self._layout.chunks)
        if self.manifest is None and (len(self._from_local_files) == count or not count):
            self.set_manifest(Manifest(self._layout, tuple(self.digests[chunk] for chunk in range(count))))
        return self.manifest is not None

    def invalidate_unconfirmed(self) -> None:
        """Drop some chunks of a complete image that no source can confirm as consistent.

        The source that the next plan assigns for them knows the manifest or determines it.
        """
        last = len(self._layout.chunks) - 1
        others = [chunk for chunk in sorted(self._scheduler.verified_chunks) if chunk not in self._from_local_files]
        self.invalidate(
            others if self._from_local_files else [last], "no source knows the manifest of the complete image"
        )

    def _start_provisional(self, provisional_id: str) -> None:
        """Start a provisional image; chunks of the previous one are dropped."""
        self.invalidate_all(f"not of provisional image {provisional_id}")
        self._set_provisional_id(provisional_id)

    def _set_provisional_id(self, provisional_id: str | None) -> None:
        if provisional_id != self.provisional_id:
            self.provisional_id = provisional_id
            self._emit(events.SetProvisionalId(provisional_id))
