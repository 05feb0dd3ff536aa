"""This instance's own storage as a source of its fork.

Runs on the target, once the planner elected it to read some chunks for all waiting instances. Every chunk is
readable immediately. A peer reports digests or a manifest; this source determines them from the files.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rfork.errors import RforkError, SourceUnavailable, StorageError
from rfork.image.digest import digest_bytes
from rfork.image.host_memory import copy_block
from rfork.image.memory import Image
from rfork.image.ranges import Range
from rfork.receiver.source import SourceListener
from rfork.receiver.source_span import SourceSpan
from rfork.receiver.storage_prefetch import StoragePrefetcher
from rfork.schema import StorageAssignment
from rfork.settings import StorageSettings
from rfork.storage.base import ImageStorage, storage_name


class StorageSource:
    """One storage of this instance, read by the transfer's workers.

    Implements `rfork.receiver.source.ChunkSource`. `find` returns the storage that the plan names; raises
    StorageError if there is none. Its reads have no deadline: they end after `source_idle_timeout_s` seconds
    without progress, or when the source is closed.
    """

    is_relay = False

    def __init__(
        self,
        read: StorageAssignment,
        find: Callable[[StorageAssignment], ImageStorage],
        image: Image,
        listener: SourceListener,
        idle_timeout_s: float,
        settings: StorageSettings,
        *,
        instance_id: str,
        host: str,
        source_span: SourceSpan | None = None,
    ) -> None:
        self.source_id = self.address = storage_name(read.kind, read.uri)
        self.instance_id = instance_id
        self.host = host
        self.transport: str = read.kind
        self.source_span = source_span or SourceSpan()
        self.last_progress_at = time.monotonic()
        self._plan = read
        self._find = find
        self._image = image
        self._listener = listener
        self._idle_timeout_s = idle_timeout_s
        self._storage: ImageStorage | None = None
        self._blocks = StoragePrefetcher(self.address, settings)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rfork-source-storage", daemon=True)

    @property
    def last_storage_activity_at(self) -> float | None:
        """See `ChunkSource.last_storage_activity_at`."""
        return self._blocks.advanced_at

    @property
    def last_block_at(self) -> float | None:
        """Time of the last block; None before the first."""
        return self._blocks.last_block_at

    def start(self) -> None:
        """Start the source's thread."""
        self._thread.start()

    def read(self, begin: int, end: int, deadline: float) -> None:
        """Fill image range `[begin, end)`. Ignores the deadline: a slow disk is no reason to stop."""
        storage = self._storage
        if storage is None:
            raise SourceUnavailable(f"{self.address}: storage is not open yet")
        for at, block in self._blocks.read(storage, begin, end, self._prefetch_hints):
            with self._image.writable(at, at + block.nbytes) as views:
                copy_block(block, views)
        self.source_span.add_bytes(end - begin)

    def _prefetch_hints(self) -> tuple[list[Range], list[Range]]:
        """Return the ranges in flight from the storage, and those to prefetch."""
        chunks = self._image.layout.chunks
        assigned, coming = self._listener.next_chunks(self, -(-self._blocks.ahead_bytes // chunks.chunk_size))
        return [chunks[chunk] for chunk in assigned], [chunks[chunk] for chunk in coming]

    def check(self, now: float, *, starved: bool) -> RforkError | None:
        """Return an error if a read has stalled: another instance must then read."""
        idle = self._blocks.idle_seconds(now)
        if idle > self._idle_timeout_s:
            return StorageError(f"{self.address}: no data for {idle:.1f} s")
        return None

    def close(self) -> None:
        """End reads in flight immediately; threads that hang are abandoned. The files stay open."""
        self._closed.set()
        self._blocks.close()
        self.source_span.end(self.transport)

    def join(self) -> None:
        """Wait until the source's thread has ended; call it after `close`."""
        self._thread.join()

    def _run(self) -> None:
        try:
            storage = self._storage = self._find(self._plan)
            if storage.manifest is not None:
                self._listener.on_manifest(self, storage.manifest)
            elif storage.origin is not None:
                self._compare(storage, storage.origin)
            else:
                raise StorageError(f"{self.address}: neither its manifest nor its origin is known")
            self._listener.on_chunks_available(self, ((0, len(self._image.layout.chunks)),))
        except RforkError as error:
            self._fail(error)
        except Exception as error:  # a bug must end the source, not hang the fork
            self._fail(StorageError(f"{self.address}: unexpected error: {type(error).__name__}: {error}"))

    def _compare(self, storage: ImageStorage, origin: str) -> None:
        """Compare all verified chunks with the files, before any of their chunks is served."""
        compared: dict[int, bytes] = {}
        left = self._listener.digests_to_compare()
        while True:
            differs = next((chunk for chunk, digest in left.items() if not self._matches(storage, chunk, digest)), None)
            compared |= left
            # Chunks that peers have served meanwhile are compared too.
            left = self._listener.on_local_files(self, origin, compared, agrees=differs is None)
            if not left:
                return

    def _fail(self, error: RforkError) -> None:
        if not self._closed.is_set():
            self._listener.on_failure(self, error)

    def _matches(self, storage: ImageStorage, chunk: int, digest: bytes) -> bool:
        """Return whether the files contain a chunk with this digest; reads it into separate memory."""
        begin, end = self._image.layout.chunks[chunk]
        scratch = memoryview(bytearray(end - begin))
        for at, block in self._blocks.read(storage, begin, end):
            scratch[at - begin : at - begin + block.nbytes] = block
        return digest_bytes([scratch]) == digest
