"""Resumes a fork from the spool of a process that died. Runs on the target.

Once the first source's manifest is known, and before anything can be read from that source, the chunks whose
spool record matches the manifest are reserved: they are not requested from sources. Each is digested in place, and
counts only if it matches the manifest. In a cold start without a manifest there is nothing to compare with,
and the spool is not used.

A disk may be slower than the network. Chunks that it would deliver later than a fork without it would have
ended are left to the sources; so are all chunks after `source_idle_timeout_s` seconds without a byte. Blocks
are read into separate memory, so that a hanging disk cannot write to the image later.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from typing import Final

from rfork.errors import reason_of
from rfork.image.chunk_state import ChunkState
from rfork.image.chunks import MIB
from rfork.image.host_memory import copy_block
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.receiver.chunk_scheduler import ChunkRead, ChunkScheduler
from rfork.receiver.chunk_verifier import ChunkVerifier
from rfork.receiver.report import RESUME_SOURCE_ID, SourceShare
from rfork.settings import InstanceSettings
from rfork.storage.spool import Spool

log = logger(__name__)

BLOCK_BYTES: Final = 4 * MIB
WARMUP_S: Final = 1.0
"""Seconds after which the rates of the disk and of the sources are known."""
STOP_S: Final = 1.0
"""Maximum time to wait for a thread that hangs in a read."""


class SpoolSource:
    """Fills chunks of one transfer from its spool, on its own thread.

    `changed` is the transfer's condition variable. A chunk that is missing or invalid is read from the
    sources as if there were no spool.
    """

    def __init__(
        self,
        spool: Spool | None,
        image: Image,
        chunk_state: ChunkState,
        settings: InstanceSettings,
        scheduler: ChunkScheduler,
        verifier: ChunkVerifier,
        changed: threading.Condition,
    ) -> None:
        """Without a spool, nothing is filled."""
        self.seconds = 0.0
        """Time spent reading chunks."""
        self._spool = spool
        self._image = image
        self._chunk_state = chunk_state
        self._settings = settings
        self._scheduler = scheduler
        self._verifier = verifier
        self._changed = changed
        self._chunks = image.layout.chunks
        self._share = SourceShare(RESUME_SOURCE_ID, settings.node_name, "file", 0, 0)
        self._writing = threading.Lock()
        self._finished = spool is None
        self._expected_digests: dict[int, bytes] = {}
        self._loading: ChunkRead | None = None
        self._began_at = self._advanced_at = 0.0
        self._known_at = math.inf
        self._loaded = 0  # bytes
        self._fetched = self._fetched_before = 0  # bytes; of weights before those of the reservation
        self._rate = 0.0  # maximum bytes per second of all sources together
        self._thread = threading.Thread(target=self._run, name="rfork-spool-read", daemon=True)

    def start(self) -> None:
        """Wait for chunks to be reserved, and fill them."""
        if not self._finished:
            self._thread.start()

    def set_manifest(self, manifest: Manifest) -> None:
        """Reserve chunks of this manifest.

        The caller holds the lock, and no chunk was offered under the manifest yet.
        """
        if self._spool is None or self._finished:
            return
        candidates = {
            chunk: digest
            for chunk, digest in sorted(self._spool.records.items())
            if digest == manifest.digests[chunk] and chunk not in self._chunk_state
        }
        if candidates:
            log.info(
                "loading chunks kept by a previous process",
                chunks=len(candidates),
                of=len(self._chunks),
                file=str(self._spool.path),
            )
            self._expected_digests = candidates
            self._known_at = time.monotonic()
            self._loaded, self._rate, self._fetched_before = 0, 0.0, self._fetched
            self._scheduler.reserve(RESUME_SOURCE_ID, candidates)
            self._changed.notify_all()

    def poll(self, now: float, fetched: int) -> None:
        """Give up on a disk that delivers nothing, or too little; the caller holds the lock.

        `fetched` is the number of bytes that the sources have served so far.
        """
        self._fetched = fetched
        if self._loading is not None and now - self._advanced_at > self._settings.source_idle_timeout_s:
            log.warning(
                "disk of the kept chunks stalled, reading from the sources", seconds=round(now - self._advanced_at, 1)
            )
            self._abandon()
        elif now - self._known_at >= WARMUP_S:
            self._is_worth_reading(now - self._known_at, fetched - self._fetched_before)

    def _is_worth_reading(self, seconds: float, fetched: int) -> None:
        """Keep only the chunks that arrive before the sources would have served the complete image.

        A fork is then no slower than without a spool, and a fast disk relieves the sources.
        """
        self._rate = max(self._rate, fetched / seconds)
        if self._rate:
            left_s = self._chunks.image_bytes / self._rate - seconds
            max_chunks = int(max(0.0, left_s) * self._loaded / seconds) // self._chunks.chunk_size
            late = self._scheduler.reserved[max_chunks:]
            if late:
                log.info(
                    "disk of the kept chunks is slower than the sources, reading the rest from them", chunks=len(late)
                )
                self._scheduler.unreserve(late)
                self._changed.notify_all()

    def stop(self) -> None:
        """Stop writing to the image; chunks still reserved are released."""
        with self._changed:
            self._abandon()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    @property
    def share(self) -> tuple[SourceShare, ...]:
        """Chunks and bytes from the spool, if any."""
        return (self._share,) if self._share.verified_chunks else ()

    def _run(self) -> None:
        try:
            scratch = memoryview(bytearray(min(BLOCK_BYTES, self._chunks.chunk_size)))
            while (read := self._next()) is not None:
                digest = self._load(read.chunk, scratch)
                with self._changed:
                    if self._finished:
                        return
                    self._finish_chunk(read, digest)
        except OSError as error:
            with self._changed:
                if not self._finished:  # otherwise the fork has ended and closed the spool
                    log.warning("kept chunks not readable, reading from the sources", reason=reason_of(error))
        except Exception:  # out of memory, or a bug: the sources must serve the rest
            log.exception("unexpected error with kept chunks, reading from the sources")
        finally:
            with self._changed:
                if not self._finished:
                    self._abandon()

    def _next(self) -> ChunkRead | None:
        with self._changed:
            while not self._finished:
                read = self._loading = self._scheduler.next_reserved()
                if read is not None:
                    self._began_at = self._advanced_at = time.monotonic()
                    return read
                self._changed.wait()
            return None

    def _load(self, chunk: int, scratch: memoryview) -> bytes | None:
        """Fill one chunk; returns the digest of its bytes, or None if the spool did not have all of them."""
        if self._spool is None:
            return None
        begin, end = self._chunks[chunk]
        is_complete = True
        for at in range(begin, end, scratch.nbytes):
            block = scratch[: min(scratch.nbytes, end - at)]
            is_complete = self._spool.read(at, block)
            if not is_complete:
                break
            with self._writing:
                if self._finished:
                    return None
                with self._image.writable(at, at + block.nbytes) as views:
                    copy_block(block, views)
            self._advanced_at = time.monotonic()
            self._loaded += block.nbytes
        digest = self._image.digest(chunk) if is_complete else None
        if not self._finished and (digest is None or digest != self._expected_digests.get(chunk)):
            self._spool.erase(chunk)  # so that it is spooled again once a source has served it
        return digest

    def _finish_chunk(self, read: ChunkRead, digest: bytes | None) -> None:
        """Handle a chunk that was filled or could not be; the caller holds the lock."""
        self.seconds += time.monotonic() - self._began_at
        # Read it only now: the manifest may have changed since the reservation.
        manifest = self._verifier.manifest
        if digest is not None and manifest is not None and manifest.digests[read.chunk] == digest:
            begin, end = self._chunks[read.chunk]
            self._chunk_state.mark_verified(read.chunk, digest)
            self._scheduler.verified(read)
            self._loading = None
            self._share = replace(
                self._share,
                verified_chunks=self._share.verified_chunks + 1,
                verified_bytes=self._share.verified_bytes + end - begin,
            )
            if self._scheduler.complete:
                self._changed.notify_all()
            return
        log.info("kept chunk invalid, reading it from the sources", chunk=read.chunk)
        self._loading = None
        self._scheduler.dropped(read)
        self._scheduler.unreserve([read.chunk])
        self._changed.notify_all()

    def _abandon(self) -> None:
        """Leave all reserved chunks to the sources; the caller holds the lock."""
        self._finished = True
        with self._writing:  # a copy in progress ends
            read, self._loading = self._loading, None
        if read is not None:
            self._scheduler.dropped(read)
        self._scheduler.unreserve()
        self._changed.notify_all()
