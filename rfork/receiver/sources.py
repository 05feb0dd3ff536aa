"""Sources of a fork as the transfer's runner uses them: peers, this instance's own storage, and the spool of a
previous process.

Runs on the target. Each source has its own thread, so that one that hangs does not delay the others, and reports
what happens as events (`rfork.receiver.events`). The runner's workers read chunks from peers and storage; the
spool is read on its own thread.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Final, Protocol

from rfork import settings as options
from rfork.errors import (
    NetworkError,
    RforkError,
    SourceCorrupt,
    SourceError,
    SourceUnavailable,
    StorageError,
    TargetError,
    TransportUnavailable,
    reason_of,
)
from rfork.image import ranges
from rfork.image.chunks import MIB
from rfork.image.digest import digest_bytes
from rfork.image.host_memory import copy_block
from rfork.image.memory import Image
from rfork.image.ranges import Range
from rfork.logs import logger
from rfork.peer.base import Dial, Peer, Progress
from rfork.receiver.cold_start import StorageCandidates
from rfork.receiver.deadline import Deadline
from rfork.receiver.events import (
    ChunksOffered,
    Event,
    FilesCompared,
    ManifestReceived,
    PrefetchChunks,
    ProvisionalDigests,
    ReadChunk,
    ReadSpool,
    SourceActivity,
    SourceConnected,
    SourceFailed,
    SpoolChunkRead,
    SpoolFailed,
    StorageOpened,
    TransportRefused,
)
from rfork.receiver.storage_prefetch import StoragePrefetcher
from rfork.schema import Lease, Route, StorageAssignment
from rfork.settings import InstanceSettings, StorageSettings
from rfork.storage.base import ImageStorage, storage_name
from rfork.storage.spool import Spool
from rfork.tracing import NO_SPAN, NOOP_TRACER, Span, Tracer, use_context
from rfork.transport.base import Reader, Transport

log = logger(__name__)

PROVISIONAL_ID_PATTERN = re.compile(r"[0-9a-f]{32}(-[0-9a-f]{16})?")
LEASE_REFRESH_FRACTION = 1 / 3
"""Fraction of a lease's duration after which the next one is presented to the source, even without reads."""
SPOOL_BLOCK_BYTES: Final = 4 * MIB
SPOOL_STOP_S: Final = 1.0
"""Maximum time to wait for a spool's thread that hangs in a read."""

Emit = Callable[[Event], None]
"""Passes an event to the transfer's runner; never blocks."""


class ChunkSource(Protocol):
    """One open source, implemented by `PeerSource` and `StorageSource`."""

    source_span: SourceSpan

    def start(self) -> None:
        """Start its thread."""
        ...

    def read(self, request: ReadChunk) -> None:
        """Fill one chunk of the image."""
        ...

    def activity(self, now: float) -> SourceActivity:
        """Return the times of its last activities."""
        ...

    def close(self) -> None:
        """Stop serving; returns once none of its reads can write to the image any more."""
        ...

    def join(self) -> None:
        """Wait until its thread has ended; call it after `close`."""
        ...


class SourceFactoryProtocol(Protocol):
    """Creates the sources of a plan, not yet started."""

    def open_peer(self, route: Route, connection: int, emit: Emit) -> PeerSource:
        """Return the source for one route."""
        ...

    def open_storage(self, read: StorageAssignment, connection: int, emit: Emit) -> StorageSource:
        """Return the source for this instance's own storage."""
        ...

    def exclude(self, name: str) -> None:
        """Do not offer the storage of this name again: it failed."""
        ...


class SourceSpan:
    """Trace span of the reads from one source, from the plan that names it until it is removed. Thread-safe."""

    def __init__(self, span: Span = NO_SPAN) -> None:
        self.span = span
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._chunks = self._bytes = 0

    def add_bytes(self, nbytes: int) -> None:
        """Count the bytes of a chunk that arrived, valid or not."""
        with self._lock:
            self._chunks += 1
            self._bytes += nbytes

    def fail(self, error: RforkError) -> None:
        """Record the error that ended the source."""
        self.span.event("failure", error_type=error.kind, detail=str(error), fault=error.fault)
        self.span.fail(error)

    def end(self, transport: str) -> None:
        """End the span. Safe to call twice."""
        with self._lock:
            chunks, nbytes = self._chunks, self._bytes
        seconds = max(time.monotonic() - self._began, 1e-9)
        self.span.set(transport=transport or None, chunks=chunks, bytes=nbytes, bytes_per_s=round(nbytes / seconds))
        self.span.end()


class PeerSource:
    """A peer: its channel, its progress stream and its reader. Implements `ChunkSource`.

    `deadline` is the fork's.
    """

    def __init__(
        self,
        route: Route,
        image: Image,
        transports: Mapping[str, Transport],
        dial: Dial,
        settings: InstanceSettings,
        connection: int,
        emit: Emit,
        deadline: Deadline,
        source_span: SourceSpan | None = None,
    ) -> None:
        self.source_span = source_span or SourceSpan()
        self._address = route.address
        self._transport = ""
        self._connection = connection
        self._emit = emit
        self._storage_at: float | None = None  # of the storage that the source reads, or that it waits for
        self._is_relay = False
        self._message_at = self._progress_at = time.monotonic()
        self._route = route
        self._image = image
        self._transports = transports
        self._dial = dial
        self._settings = settings
        self._deadline = deadline
        self._connecting_until = 0.0  # connecting has its own deadline
        self._token = route.lease.token
        self._presented_token = route.lease.token
        self._lease_refresh_s = route.lease.expires_in_s * LEASE_REFRESH_FRACTION
        self._next_presentation_at = self._message_at + self._lease_refresh_s
        self._peer: Peer | None = None
        self._reader: Reader | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"rfork-source-{route.source_id[:8]}", daemon=True)

    def start(self) -> None:
        """Start the source's thread."""
        self._thread.start()

    def activity(self, now: float) -> SourceActivity:
        """See `ChunkSource`."""
        return SourceActivity(
            message_at=self._message_at,
            progress_at=self._progress_at,
            connecting_until=self._connecting_until,
            has_no_bytes=self._reader is None or not getattr(self._reader, "answered", True),
            storage_at=self._storage_at,
            is_relay=self._is_relay,
        )

    def renew(self, lease: Lease) -> None:
        """Present a newer token from now on."""
        self._token = lease.token

    def read(self, request: ReadChunk) -> None:
        """Fill one chunk; see `rfork.transport.base.Reader.read`."""
        if self._reader is None:
            raise SourceUnavailable(f"{self._address}: the channel is closed")
        begin, end = self._image.layout.chunks[request.chunk]
        try:
            self._reader.read(begin, end, request.read_by)
        except (SourceError, NetworkError) as error:
            error.add_party(self._address)
            raise
        self.source_span.add_bytes(end - begin)

    def close(self) -> None:
        """Close all connections; the source detects the end of the stream and releases the reader slot."""
        self._closed.set()
        if self._reader is not None:
            self._reader.close()
        if self._peer is not None:
            self._peer.close()
        self.source_span.end(self._transport)

    def join(self) -> None:
        """Wait until the source's thread has ended; call it after `close`."""
        self._thread.join()

    def _run(self) -> None:
        try:
            with use_context(self.source_span.span.context):
                self._consume_progress()
        except RforkError as error:
            if isinstance(error, SourceError | NetworkError):
                error.add_party(self._address)
            self._fail(error)
        except Exception as error:  # a bug on this side must end the source, not hang the fork
            text = f"{self._address}: unexpected error on the target: {type(error).__name__}: {error}"
            self._fail(TargetError(text))

    def _fail(self, error: RforkError) -> None:
        if not self._closed.is_set():
            self._emit(SourceFailed(self._connection, error))

    def _consume_progress(self) -> None:
        peer = self._peer = self._dial(self._address, lambda: self._token)
        self._check_open()
        offered = [name for name in self._route.transports if name in self._transports]
        while self._reader is None:
            # A new deadline for each transport: a slow failure leaves the next one its full time.
            step = self._step_deadline()
            channel_id, endpoint = peer.open(self._image.layout.layout_id, tuple(offered), step)
            if endpoint.transport not in offered:
                raise SourceCorrupt(
                    f"{self._address}: opened {endpoint.transport!r}, but the request was for {offered}"
                )
            self._transport = endpoint.transport
            self._message_at = time.monotonic()
            self._connecting_until = step
            try:
                self._reader = self._transports[endpoint.transport].connect(
                    endpoint,
                    self._image,
                    lambda: self._token,
                    step,
                    partial(peer.open_control_stream, channel_id),
                )
            except TransportUnavailable as error:
                offered.remove(endpoint.transport)
                if offered:
                    log.warning(
                        "transport cannot be used",
                        source=self._address,
                        error=error.kind,
                        detail=str(error),
                        hint=error.hint,
                    )
                    self._emit(TransportRefused(self._connection, error))
                self._close_channel(peer, channel_id)
                if not offered:
                    raise
            self._check_open()
        # A source may be silent while this side connects: silence counts from here.
        self._message_at = self._progress_at = time.monotonic()
        self._connecting_until = 0.0
        self._emit(SourceConnected(self._connection, self._transport))
        self._watch_progress(peer, channel_id)

    def _step_deadline(self) -> float:
        """Return the deadline of one request to the source."""
        return min(time.monotonic() + self._settings.source_idle_timeout_s, self._deadline.monotonic_time)

    def _close_channel(self, peer: Peer, channel_id: str) -> None:
        """Release the reader slot explicitly: without a progress stream, the source would keep it until the
        lease ends.
        """
        step = self._connecting_until = self._step_deadline()
        try:
            peer.close_channel(channel_id, step)
        except RforkError as error:  # the source releases it when the lease expires
            log.info("failed to release the reader slot", source=self._address, error=error.kind)

    def _check_open(self) -> None:
        """Close on this thread if `close` was called before there was anything to close."""
        if self._closed.is_set():
            self.close()
            raise SourceUnavailable(f"{self._address}: the channel is closed")

    def _watch_progress(self, peer: Peer, channel_id: str) -> None:
        known = ""
        for update in peer.watch(channel_id, self._settings.source_idle_timeout_s / 4):
            self._message_at = time.monotonic()
            self._present_lease(peer)
            self._record_upstream_activity(update)
            if self._reader is not None:
                self._reader.set_rate_limit(update.rate)
            if update.chunks:
                self._progress_at = self._message_at
            if update.weights_id is not None and update.weights_id != known:
                manifest = peer.manifest(self._image.layout, self._step_deadline())
                self._emit(ManifestReceived(self._connection, manifest))
                known = manifest.weights_id
            elif update.weights_id is None and update.chunks:
                self._emit(ProvisionalDigests(self._connection, *self._provisional_digests(update)))
            if update.chunks:
                self._emit(ChunksOffered(self._connection, update.chunks))
        raise SourceUnavailable(f"{self._address}: the source closed the channel")

    def _record_upstream_activity(self, update: Progress) -> None:
        if update.storage_activity is not None:
            self._storage_at, self._is_relay = (
                self._message_at - update.storage_activity.idle_s,
                update.storage_activity.relayed,
            )
        elif self._storage_at is not None:
            # The storage reader must now find another source, and gets the time for it.
            self._storage_at, self._progress_at = None, self._message_at

    def _provisional_digests(self, update: Progress) -> tuple[str, dict[int, bytes]]:
        """Return the provisional image's id and digests of an update."""
        count = len(self._image.layout.chunks)
        sane = all(begin <= end <= count for begin, end in update.chunks)
        if not sane or len(update.digests) != ranges.count(update.chunks):
            raise SourceCorrupt(f"{self._address}: offered chunks without a manifest and without digests")
        if update.provisional_id is None or not PROVISIONAL_ID_PATTERN.fullmatch(update.provisional_id):
            raise SourceCorrupt(f"{self._address}: {update.provisional_id!r} is not the id of a provisional image")
        return update.provisional_id, dict(zip(ranges.indices(update.chunks), update.digests, strict=True))

    def _present_lease(self, peer: Peer) -> None:
        """Present the current lease: the source releases the slot when the last presented lease expires, even
        if the reader waits.
        """
        if self._token != self._presented_token and self._message_at >= self._next_presentation_at:
            self._presented_token = self._token
            self._next_presentation_at = self._message_at + self._lease_refresh_s
            peer.renew(self._step_deadline())


class StorageSource:
    """One storage of this instance, once the planner elected it to read some chunks for all waiting instances.
    Implements `ChunkSource`.

    A peer reports digests or a manifest; this source determines them from the files. `find` returns the storage
    that the plan names; raises StorageError if there is none. Its reads have no deadline: they end after
    `storage_idle_timeout_s` seconds without progress, or when the source is closed.
    """

    def __init__(
        self,
        read: StorageAssignment,
        find: Callable[[StorageAssignment], ImageStorage],
        image: Image,
        connection: int,
        emit: Emit,
        settings: StorageSettings,
        source_span: SourceSpan | None = None,
    ) -> None:
        self.source_span = source_span or SourceSpan()
        self._address = storage_name(read.kind, read.uri)
        self._assignment = read
        self._find = find
        self._image = image
        self._connection = connection
        self._emit = emit
        self._storage: ImageStorage | None = None
        self._blocks = StoragePrefetcher(self._address, settings)
        self._prefetch_hints: tuple[list[Range], list[Range]] = [], []
        self._comparisons: SimpleQueue[Mapping[int, bytes] | None] = SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rfork-source-storage", daemon=True)

    def activity(self, now: float) -> SourceActivity:
        """See `ChunkSource`."""
        return SourceActivity(
            message_at=now,
            progress_at=now,
            storage_at=self._blocks.advanced_at,
            block_at=self._blocks.last_block_at,
            idle_s=self._blocks.idle_seconds(now),
        )

    def start(self) -> None:
        """Start the source's thread."""
        self._thread.start()

    def compare(self, digests: Mapping[int, bytes]) -> None:
        """Compare the files with these digests; the result is the event `FilesCompared`."""
        self._comparisons.put(digests)

    def prefetch(self, request: PrefetchChunks) -> None:
        """Read chunks ahead from the next read on."""
        chunks = self._image.layout.chunks
        self._prefetch_hints = (
            [chunks[chunk] for chunk in request.in_flight],
            [chunks[chunk] for chunk in request.upcoming],
        )

    def read(self, request: ReadChunk) -> None:
        """Fill one chunk. Ignores the deadline: a slow disk is no reason to stop."""
        storage = self._storage
        if storage is None:
            raise SourceUnavailable(f"{self._address}: storage is not open yet")
        begin, end = self._image.layout.chunks[request.chunk]
        for at, block in self._blocks.read(storage, begin, end, lambda: self._prefetch_hints):
            with self._image.writable(at, at + block.nbytes) as views:
                copy_block(block, views)
        self.source_span.add_bytes(end - begin)

    def close(self) -> None:
        """End reads in flight immediately; threads that hang are abandoned. The files stay open."""
        self._closed.set()
        self._comparisons.put(None)
        self._blocks.close()
        self.source_span.end(self._assignment.kind)

    def join(self) -> None:
        """Wait until the source's thread has ended; call it after `close`."""
        self._thread.join()

    def _run(self) -> None:
        try:
            storage = self._storage = self._find(self._assignment)
            prefetch_chunks = -(-self._blocks.ahead_bytes // self._image.layout.chunks.chunk_size)
            self._emit(
                StorageOpened(self._connection, storage.manifest, storage.origin, prefetch_chunks, secrets.token_hex(8))
            )
            while (digests := self._comparisons.get()) is not None:
                agrees = all(self._matches(storage, chunk, digest) for chunk, digest in digests.items())
                self._emit(FilesCompared(self._connection, digests, agrees))
        except RforkError as error:
            self._fail(error)
        except Exception as error:  # a bug must end the source, not hang the fork
            self._fail(StorageError(f"{self._address}: unexpected error: {type(error).__name__}: {error}"))

    def _fail(self, error: RforkError) -> None:
        if not self._closed.is_set():
            self._emit(SourceFailed(self._connection, error))

    def _matches(self, storage: ImageStorage, chunk: int, digest: bytes) -> bool:
        """Return whether the files contain a chunk with this digest; reads it into separate memory."""
        begin, end = self._image.layout.chunks[chunk]
        scratch = memoryview(bytearray(end - begin))
        for at, block in self._blocks.read(storage, begin, end):
            scratch[at - begin : at - begin + block.nbytes] = block
        return digest_bytes([scratch]) == digest


class SpoolReader:
    """Fills chunks from the spool of a process that died, on its own thread.

    A disk may hang: blocks are read into separate memory, so that they cannot be written to the image later.
    """

    def __init__(self, spool: Spool, image: Image, emit: Emit) -> None:
        self.advanced_at = 0.0
        """Time of the last block."""
        self.bytes_read = 0
        self._spool = spool
        self._image = image
        self._emit = emit
        self._writing = threading.Lock()
        self._stopped = False
        self._requests: SimpleQueue[ReadSpool | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rfork-spool-read", daemon=True)

    def start(self) -> None:
        """Start its thread."""
        self._thread.start()

    def read(self, request: ReadSpool) -> None:
        """Fill one chunk; the result is the event `SpoolChunkRead`."""
        self._requests.put(request)

    def stop(self) -> None:
        """Stop writing to the image."""
        with self._writing:  # a copy in progress ends
            self._stopped = True
        self._requests.put(None)

    def join(self) -> None:
        """Wait until its thread has ended; call it after `stop`. A thread that hangs is abandoned."""
        if self._thread.is_alive():
            self._thread.join(SPOOL_STOP_S)

    def _run(self) -> None:
        try:
            scratch = memoryview(bytearray(min(SPOOL_BLOCK_BYTES, self._image.layout.chunks.chunk_size)))
            while (request := self._requests.get()) is not None:
                began = time.monotonic()
                digest = self._load(request, scratch)
                self._emit(SpoolChunkRead(request.chunk, digest, time.monotonic() - began))
        except OSError as error:
            if not self._stopped:  # otherwise the fork has ended and closed the spool
                log.warning("kept chunks not readable, reading from the sources", reason=reason_of(error))
        except Exception:  # out of memory, or a bug: the sources must serve the rest
            log.exception("unexpected error with kept chunks, reading from the sources")
        finally:
            self._emit(SpoolFailed())

    def _load(self, request: ReadSpool, scratch: memoryview) -> bytes | None:
        """Fill one chunk; returns the digest of its bytes, or None if the spool did not have all of them."""
        begin, end = self._image.layout.chunks[request.chunk]
        is_complete = True
        for at in range(begin, end, scratch.nbytes):
            block = scratch[: min(scratch.nbytes, end - at)]
            is_complete = self._spool.read(at, block)
            if not is_complete:
                break
            with self._writing:
                if self._stopped:
                    return None
                with self._image.writable(at, at + block.nbytes) as views:
                    copy_block(block, views)
            self.advanced_at = time.monotonic()
            self.bytes_read += block.nbytes
        digest = self._image.digest(request.chunk) if is_complete else None
        if not self._stopped and digest != request.digest:
            self._spool.erase(request.chunk)  # so that it is spooled again once a source has served it
        return digest


@dataclass(frozen=True)
class SourceFactory:
    """Creates the sources of one fork; see `SourceFactoryProtocol`.

    `deadline` is the fork's.
    """

    image: Image
    transports: Mapping[str, Transport]
    dial: Dial
    settings: InstanceSettings
    candidates: StorageCandidates
    deadline: Deadline
    tracer: Tracer = NOOP_TRACER

    def open_peer(self, route: Route, connection: int, emit: Emit) -> PeerSource:
        """Return the source for one route."""
        source_span = SourceSpan(
            self.tracer.start_span(
                "read from peer",
                kind="client",
                source=route.source_id,
                source_host=route.placement.host,
                server=route.address,
                planned_chunks=ranges.count(route.chunks),
            )
        )
        return PeerSource(
            route,
            self.image,
            self.transports,
            self.dial,
            self.settings,
            connection,
            emit,
            self.deadline,
            source_span,
        )

    def open_storage(self, read: StorageAssignment, connection: int, emit: Emit) -> StorageSource:
        """Return the source for this instance's own storage."""
        name, chunks = storage_name(read.kind, read.uri), ranges.count(read.chunks)
        source_span = SourceSpan(self.tracer.start_span("read from storage", source=name, planned_chunks=chunks))
        return StorageSource(
            read,
            self.candidates.storage_for,
            self.image,
            connection,
            emit,
            options.load(StorageSettings),
            source_span,
        )

    def exclude(self, name: str) -> None:
        """Do not offer the storage of this name to the planner again: it failed."""
        self.candidates.remove(name)
