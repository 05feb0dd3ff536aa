"""Sources of a fork as the transfer's runner uses them: peers, and this instance's own storage.

Runs on the target. Each source has its own thread, so that one that hangs does not delay the others, and reports
what happens as events (`rfork.receiver.events`). The runner's workers read the chunks.
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
from typing import Protocol

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
)
from rfork.image import ranges
from rfork.image.digest import digest_bytes
from rfork.image.host_memory import copy_block
from rfork.image.layout import Manifest
from rfork.image.memory import Image
from rfork.image.ranges import Range
from rfork.logs import logger
from rfork.peer.base import Dial, Peer, Progress
from rfork.receiver import events
from rfork.receiver.events import Event
from rfork.receiver.own_load import OwnLoad, StorageScope
from rfork.receiver.report import ForkTimer
from rfork.schema import Lease, Route, StorageAssignment
from rfork.settings import InstanceSettings, StorageSettings
from rfork.storage.base import ImageStorage, storage_name
from rfork.storage.io.prefetcher import StoragePrefetcher
from rfork.tracing import NO_SPAN, NOOP_TRACER, Span, Tracer, use_context
from rfork.transport.base import Reader, Transport

log = logger(__name__)

PROVISIONAL_ID_PATTERN = re.compile(r"[0-9a-f]{32}(-[0-9a-f]{16})?")
LEASE_REFRESH_FRACTION = 1 / 3
"""Fraction of a lease's duration after which the next one is presented to the source, even without reads."""

Emit = Callable[[Event], None]
"""Passes an event to the transfer's runner; never blocks."""


class OwnStorage(Protocol):
    """Storage and loaders of this instance, implemented by `rfork.receiver.fallback.FallbackRunner`."""

    def storage_for(self, read: StorageAssignment) -> ImageStorage:
        """Return the storage of a plan. Raises StorageError if this instance did not offer it."""
        ...

    def remove(self, name: str) -> None:
        """Do not offer the storage of this name again: it failed."""
        ...

    def run_loader(self, read: StorageAssignment) -> Manifest:
        """Fill the image with a loader; raises RforkError if that fails."""
        ...

    @property
    def scope(self) -> StorageScope | None:
        """Its location, if it may be read while peers serve the fork."""
        ...

    def measure(self) -> OwnLoad | None:
        """Read a sample of it; None if nothing can be read."""
        ...


@dataclass(frozen=True, slots=True)
class ForkContext:
    """Identity and settings of one fork, and the objects that its parts share."""

    instance_id: str
    image: Image
    transports: Mapping[str, Transport]
    dial: Dial
    settings: InstanceSettings
    timer: ForkTimer


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


class LeaseToken:
    """The newest lease token of a source. Calling it returns the token: the connections keep this object, not the
    source, which would otherwise outlive its fork until the garbage collector ran, with the target's memory.
    """

    __slots__ = ("value",)

    def __init__(self, value: str) -> None:
        self.value = value

    def __call__(self) -> str:
        """Return the token; see `rfork.transport.base.TokenSource`."""
        return self.value


class PeerSource:
    """A peer: its channel, its progress stream and its reader.

    Its `thread` is started by the caller, and ends after `close`.
    """

    def __init__(
        self, route: Route, connection: int, emit: Emit, context: ForkContext, source_span: SourceSpan | None = None
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
        self._image = context.image
        self._transports = context.transports
        self._dial = context.dial
        self._settings = context.settings
        self._timer = context.timer
        self._connecting_until = 0.0  # connecting has its own deadline
        self._token = LeaseToken(route.lease.token)
        self._presented_token = route.lease.token
        self._lease_refresh_s = route.lease.expires_in_s * LEASE_REFRESH_FRACTION
        self._next_presentation_at = self._message_at + self._lease_refresh_s
        self._peer: Peer | None = None
        self._reader: Reader | None = None
        self._closed = threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"rfork-source-{route.source_id[:8]}", daemon=True)

    def activity(self, now: float) -> events.SourceActivity:
        """Return the times of its last activities."""
        return events.SourceActivity(
            message_at=self._message_at,
            progress_at=self._progress_at,
            connecting_until=self._connecting_until,
            has_no_bytes=self._reader is None or not getattr(self._reader, "answered", True),
            storage_at=self._storage_at,
            is_relay=self._is_relay,
        )

    def renew(self, lease: Lease) -> None:
        """Present a newer token from now on."""
        self._token.value = lease.token

    def read(self, request: events.ReadChunk) -> None:
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
        """Close all connections; the source detects the end of the stream and releases the reader slot.

        Returns once none of its reads can write to the image any more.
        """
        self._closed.set()
        if self._reader is not None:
            self._reader.close()
        if self._peer is not None:
            self._peer.close()
        self.source_span.end(self._transport)

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
            self._emit(events.SourceFailed(self._connection, error))

    def _consume_progress(self) -> None:
        peer = self._peer = self._dial(self._address, self._token)
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
            transport = self._transports[endpoint.transport]
            step = self._connecting_until = self._step_deadline(transport.connect_timeout_s)
            try:
                self._reader = transport.connect(
                    endpoint,
                    self._image,
                    self._token,
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
                    self._emit(events.TransportRefused(self._connection, error))
                self._close_channel(peer, channel_id)
                if not offered:
                    raise
            self._check_open()
        # A source may be silent while this side connects: silence counts from here.
        self._message_at = self._progress_at = time.monotonic()
        self._connecting_until = 0.0
        self._emit(events.SourceConnected(self._connection, self._transport))
        self._watch_progress(peer, channel_id)

    def _step_deadline(self, timeout_s: float = 0.0) -> float:
        """Return the deadline of one request to the source, which may take `timeout_s` if that is longer than
        the time without a byte.
        """
        return min(time.monotonic() + max(self._settings.source_idle_timeout_s, timeout_s), self._timer.deadline)

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
                self._emit(events.ManifestReceived(self._connection, manifest))
                known = manifest.weights_id
            elif update.weights_id is None and update.chunks:
                self._emit(events.ProvisionalDigests(self._connection, *self._provisional_digests(update)))
            if update.chunks:
                self._emit(events.ChunksOffered(self._connection, update.chunks))
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
        if self._token.value != self._presented_token and self._message_at >= self._next_presentation_at:
            self._presented_token = self._token.value
            self._next_presentation_at = self._message_at + self._lease_refresh_s
            peer.renew(self._step_deadline())


class StorageSource:
    """One storage of this instance, once the planner elected it to read some chunks for all waiting instances.

    A peer reports digests or a manifest; this source determines them from the files. Its reads have no deadline:
    they end after `storage_idle_timeout_s` seconds without progress, or when the source is closed. Its `thread` is
    started by the caller, and ends after `close`.
    """

    def __init__(
        self,
        read: StorageAssignment,
        connection: int,
        emit: Emit,
        image: Image,
        own_storage: OwnStorage,
        source_span: SourceSpan,
    ) -> None:
        self.source_span = source_span
        self._address = storage_name(read.kind, read.uri)
        self._assignment = read
        self._own_storage = own_storage
        self._image = image
        self._connection = connection
        self._emit = emit
        self._storage: ImageStorage | None = None
        self._blocks = StoragePrefetcher(self._address, options.load(StorageSettings))
        self._prefetch_hints: tuple[list[Range], list[Range]] = [], []
        self._comparisons: SimpleQueue[Mapping[int, bytes] | None] = SimpleQueue()
        self._closed = threading.Event()
        self.thread = threading.Thread(target=self._run, name="rfork-source-storage", daemon=True)

    def activity(self, now: float) -> events.SourceActivity:
        """Return the times of its last activities."""
        return events.SourceActivity(
            message_at=now,
            progress_at=now,
            storage_at=self._blocks.advanced_at,
            block_at=self._blocks.last_block_at,
            idle_s=self._blocks.idle_seconds(now),
        )

    def compare(self, digests: Mapping[int, bytes]) -> None:
        """Compare the files with these digests; the result is the event `FilesCompared`."""
        self._comparisons.put(digests)

    def prefetch(self, request: events.PrefetchChunks) -> None:
        """Read chunks ahead from the next read on."""
        chunks = self._image.layout.chunks
        self._prefetch_hints = (
            [chunks[chunk] for chunk in request.in_flight],
            [chunks[chunk] for chunk in request.upcoming],
        )

    def read(self, request: events.ReadChunk) -> None:
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

    def _run(self) -> None:
        try:
            storage = self._storage = self._own_storage.storage_for(self._assignment)
            prefetch_chunks = -(-self._blocks.ahead_bytes // self._image.layout.chunks.chunk_size)
            manifest, origin, unique_id = storage.manifest, storage.origin, secrets.token_hex(8)
            self._emit(events.StorageOpened(self._connection, manifest, origin, prefetch_chunks, unique_id))
            while (digests := self._comparisons.get()) is not None:
                agrees = all(self._matches(storage, chunk, digest) for chunk, digest in digests.items())
                self._emit(events.FilesCompared(self._connection, digests, agrees))
        except RforkError as error:
            self._fail(error)
        except Exception as error:  # a bug must end the source, not hang the fork
            self._fail(StorageError(f"{self._address}: unexpected error: {type(error).__name__}: {error}"))

    def _fail(self, error: RforkError) -> None:
        if not self._closed.is_set():
            self._emit(events.SourceFailed(self._connection, error))

    def _matches(self, storage: ImageStorage, chunk: int, digest: bytes) -> bool:
        """Return whether the files contain a chunk with this digest; reads it into separate memory."""
        begin, end = self._image.layout.chunks[chunk]
        scratch = memoryview(bytearray(end - begin))
        for at, block in self._blocks.read(storage, begin, end):
            scratch[at - begin : at - begin + block.nbytes] = block
        return digest_bytes([scratch]) == digest


@dataclass(frozen=True, slots=True)
class SourceFactory:
    """Creates the sources that the plans of one fork name, not yet started."""

    context: ForkContext
    own_storage: OwnStorage
    tracer: Tracer = NOOP_TRACER

    def open_peer(self, route: Route, connection: int, emit: Emit) -> PeerSource:
        """Return the source for one route."""
        span = self.tracer.start_span(
            "read from peer",
            kind="client",
            source=route.source_id,
            source_host=route.placement.host,
            server=route.address,
            planned_chunks=ranges.count(route.chunks),
        )
        return PeerSource(route, connection, emit, self.context, SourceSpan(span))

    def open_storage(self, read: StorageAssignment, connection: int, emit: Emit) -> StorageSource:
        """Return the source for this instance's own storage."""
        name, chunks = storage_name(read.kind, read.uri), ranges.count(read.chunks)
        span = self.tracer.start_span("read from storage", source=name, planned_chunks=chunks)
        return StorageSource(read, connection, emit, self.context.image, self.own_storage, SourceSpan(span))
