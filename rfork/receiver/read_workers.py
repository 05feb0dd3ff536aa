"""Worker threads of a transfer, each of which reads one chunk at a time and verifies it in place.

Runs on the target. The verification of one chunk overlaps the transfer of others. A verified chunk is
recorded in the chunk state, from which this instance serves it as a relay.
"""

from __future__ import annotations

import threading
import time

from rfork.errors import RforkError, SourceCorrupt, SourceUnavailable, StorageError, TargetError
from rfork.image.chunk_state import ChunkState
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.receiver.chunk_scheduler import ChunkRead, ChunkScheduler
from rfork.receiver.chunk_verifier import ChunkVerifier
from rfork.receiver.deadline import Deadline
from rfork.receiver.read_concurrency import ReadConcurrency
from rfork.receiver.source import ChunkSource
from rfork.receiver.source_events import SourceEventHandler
from rfork.receiver.storage_source import StorageSource
from rfork.settings import InstanceSettings

log = logger(__name__)


class ReadWorkers:
    """The threads and the work of one read. `changed` is the transfer's condition variable."""

    def __init__(
        self,
        image: Image,
        chunk_state: ChunkState,
        settings: InstanceSettings,
        scheduler: ChunkScheduler,
        verifier: ChunkVerifier,
        intake: SourceEventHandler,
        changed: threading.Condition,
        deadline: Deadline,
    ) -> None:
        self.bytes_read = 0
        """Bytes of the chunks that have arrived, valid or not."""
        self._image = image
        self._chunk_state = chunk_state
        self._settings = settings
        self._scheduler = scheduler
        self._verifier = verifier
        self._event_handler = intake
        self._sources = intake.sources
        self._changed = changed
        self._deadline = deadline
        self._chunks = image.layout.chunks
        self._stopping = False
        self._concurrency = ReadConcurrency(settings.max_inflight_chunks)
        self._threads = [
            threading.Thread(target=self._work, name=f"rfork-read-{number}", daemon=True)
            for number in range(settings.max_inflight_chunks)
        ]

    def start(self) -> None:
        """Begin to read the chunks that the scheduler returns."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Start no new read."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until nothing more is written to the image; call it after `stop`."""
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                read = None
                while not self._stopping and (read := self._scheduler.next_read(self._limit_for)) is None:
                    self._changed.wait()
                if read is None:
                    return
                source = self._sources.find(read.source_id)
                window = self._limit_for(read.source_id)
            error: RforkError | None = None
            digest: bytes | None = None
            try:
                if source is None:
                    raise SourceUnavailable("the source was removed")
                digest = self._fetch(source, read, window)
            except RforkError as caught:
                error = caught
            except Exception as caught:  # out of memory, or a bug: a failure of this side, which must not hang the fork
                log.exception("unexpected error in a read", source=read.source_id[:8], chunk=read.chunk)
                error = TargetError(
                    f"unexpected error while chunk {read.chunk} was read: {type(caught).__name__}: {caught}"
                )
            with self._changed:
                self._complete(source, read, digest, error)

    def _limit_for(self, source_id: str) -> int:
        """Return the maximum number of concurrent reads from a source; the caller holds the lock."""
        source = self._sources.find(source_id)
        return self._concurrency.window("" if source is None else source.transport)

    def _fetch(self, source: ChunkSource, read: ChunkRead, window: int) -> bytes | None:
        """Read one chunk; returns its digest if required. `window`: the limit of the source before the read."""
        begin, end = self._chunks[read.chunk]
        timeout_s = self._settings.source_idle_timeout_s + (end - begin) / self._settings.min_source_bytes_per_s
        began = time.monotonic()
        source.read(begin, end, min(began + timeout_s, self._deadline.monotonic_time))
        with self._changed:
            self.bytes_read += end - begin
            inflight = self._scheduler.inflight_with(read)
            if isinstance(source, StorageSource):
                # Storage is read ahead, so a chunk takes the time since the previous one.
                began, inflight = source.last_progress_at, 0
            source.last_progress_at = time.monotonic()
            self._concurrency.record_chunk(end - begin, source.last_progress_at - began, inflight)
            if self._limit_for(read.source_id) > window:
                self._changed.notify_all()
        needs_digest = self._settings.verify_chunks or isinstance(source, StorageSource)
        return self._image.digest(read.chunk) if needs_digest else None

    def _complete(
        self, source: ChunkSource | None, read: ChunkRead, digest: bytes | None, error: RforkError | None
    ) -> None:
        """Handle a finished read; the caller holds the lock. Only now the expected digest is determined."""
        if error is None and source is not None:
            try:
                verified_digest = self._verify(source, read, digest)
            except RforkError as caught:
                error = caught
            else:
                begin, end = self._chunks[read.chunk]
                if isinstance(source, StorageSource):
                    self._verifier.mark_from_local_files(read.chunk)
                self._chunk_state.mark_verified(read.chunk, verified_digest)
                self._scheduler.verified(read)
                self._sources.record_verified(source.source_id, source.host, source.transport, 1, end - begin)
                # Only the last chunk concerns the caller's thread.
                if self._scheduler.complete:
                    self._changed.notify_all()
                return
        self._scheduler.dropped(read)
        if source is not None and error is not None:
            self._event_handler.fail(source, error)
        self._changed.notify_all()

    def _verify(self, source: ChunkSource, read: ChunkRead, digest: bytes | None) -> bytes | None:
        """Return the digest of a chunk if it is valid."""
        expected = self._verifier.expected(read.source_id, read.chunk)
        if digest is None:
            return expected
        if expected is not None and digest != expected:
            text = f"{source.address}: chunk {read.chunk} does not match its digest"
            raise StorageError(text) if isinstance(source, StorageSource) else SourceCorrupt(text)
        return digest
