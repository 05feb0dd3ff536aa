"""Simulated sources of a fork: a channel to a peer, and local storage.

They replace `rfork.receiver.sources` and the transports: they emit the same events, after simulated delays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

from rfork.errors import (
    RforkError,
    SourceTimeout,
    SourceUnavailable,
    SourceWeightsChanged,
    StorageError,
)
from rfork.image import ranges
from rfork.receiver.events import (
    ChunkDigested,
    ChunkReceived,
    ChunksOffered,
    FilesCompared,
    ManifestReceived,
    ProvisionalDigests,
    ReadChunk,
    ReadFailed,
    SourceActivity,
    SourceConnected,
    SourceFailed,
    StorageOpened,
)
from rfork.schema import Lease, Route, StorageAssignment
from tests.simulation.content import GARBAGE, origin_of
from tests.simulation.instance import Instance

if TYPE_CHECKING:
    from tests.simulation.target import Target

CLOSE_S = 0.01
"""Time until the reads of a closed source have ended."""
DIGEST_S = 0.002
PREFETCH_CHUNKS = 2


class Source(Protocol):
    """One open source of a simulated fork."""

    def start(self) -> None:
        """Connect."""

    def read(self, request: ReadChunk) -> None:
        """Read a chunk into the target's memory."""

    def activity(self, now: float) -> SourceActivity:
        """Return the times of its last activities."""

    def close(self) -> None:
        """End it and its reads."""


class PeerSource:
    """A channel to another instance."""

    def __init__(self, target: Target, connection: int, route: Route) -> None:
        self._target = target
        self._world = target.world
        self._connection = connection
        self._route = route
        self._source = self._world.instance_at(route.address)
        self._token = self._presented_token = route.lease.token
        self._closed = False
        self._channel_id: str | None = None
        self._generation = 0
        self._reported: tuple[ranges.Range, ...] = ()
        self._known_weights_id = ""
        self._pumping = False
        self._message_at = self._progress_at = self._world.now
        self._connecting_until = 0.0
        self._has_no_bytes = True
        self._storage_at: float | None = None
        self._is_relay = False
        self._reads: dict[int, ReadChunk] = {}

    def renew(self, lease: Lease) -> None:
        """Present this lease from now on."""
        self._token = lease.token

    def activity(self, now: float) -> SourceActivity:
        """See `Source`."""
        return SourceActivity(
            message_at=self._message_at,
            progress_at=self._progress_at,
            connecting_until=self._connecting_until,
            has_no_bytes=self._has_no_bytes,
            storage_at=self._storage_at,
            is_relay=self._is_relay,
        )

    @property
    def _idle_timeout_s(self) -> float:
        return self._world.settings.source_idle_timeout_s

    def start(self) -> None:
        """See `Source`."""
        self._connecting_until = self._world.now + self._idle_timeout_s
        self._request(self._open, self._connecting_until)

    def _request(self, handle: Callable[[Instance], None], until: float) -> None:
        """Send a request; `handle` runs at the source. Without a response by `until`, the source has failed."""

        def arrive() -> None:
            source = self._source
            if self._closed:
                return
            if source is None or not source.alive:
                self._fail(SourceUnavailable("connection refused"))
            elif self._is_unreachable(source):
                self._world.later(max(0.0, until - self._world.now), self._time_out, on=self._target.instance)
            else:
                try:
                    handle(source)
                except RforkError as error:
                    self._later(partial(self._fail, error))

        self._later(arrive)

    def _is_unreachable(self, source: Instance) -> bool:
        return source.stopped or self._world.is_cut(source.name, self._target.instance.name)

    def _time_out(self) -> None:
        self._fail(SourceTimeout("no response"))

    def _later(self, call: Callable[[], None]) -> None:
        self._world.later(self._world.latency_s(), call, on=self._target.instance)

    def _fail(self, error: RforkError) -> None:
        if not self._closed:
            self._target.handle(SourceFailed(self._connection, error))

    # -- the channel ------------------------------------------------------------------------------------

    def _open(self, source: Instance) -> None:
        served, unix_s = source.served, self._world.unix_s
        fork_id = served.check(self._token, unix_s)
        served.check_can_open(self._target.layout_id)
        self._generation = served.generation
        self._channel_id = served.leases.open(fork_id, unix_s, self._world.new_id("channel"))
        source.listeners.append(self._pump_soon)
        self._later(self._connected)

    def _connected(self) -> None:
        if self._closed:
            return
        self._message_at = self._progress_at = self._world.now
        self._connecting_until = 0.0
        self._target.handle(SourceConnected(self._connection, self._route.transports[0]))
        self._pump_soon()
        self._keep_alive()

    def _keep_alive(self) -> None:
        if not self._closed and not self._world.ended:
            self._pump_soon()
            self._world.later(self._idle_timeout_s / 4, self._keep_alive, on=None)

    def _pump_soon(self) -> None:
        if not self._closed and not self._pumping:
            self._pumping = True
            self._world.later(self._world.latency_s(), self._pump, on=None)

    def _pump(self) -> None:
        """Send the source's progress; runs at the source."""
        self._pumping = False
        source, target = self._source, self._target.instance
        if self._closed or source is None or not target.alive:
            return
        if not source.alive:
            self._later(lambda: self._fail(SourceUnavailable("connection reset")))
            return
        if self._is_unreachable(source) or self._channel_id is None or self._connecting_until:
            return
        served, unix_s = source.served, self._world.unix_s
        if served.generation != self._generation:
            self._end_channel()
            self._later(lambda: self._fail(SourceWeightsChanged("the weights changed")))
            return
        if self._token != self._presented_token:
            self._presented_token = self._token
            try:
                served.check(self._token, unix_s)
            except RforkError as error:
                self._later(partial(self._fail, error))
                return
        served.leases.sweep(unix_s)
        if not served.leases.has_channel(self._channel_id, self._target.fork_id):
            self._later(lambda: self._fail(SourceUnavailable("the source closed the channel")))
            return
        progress = served.progress_since(self._reported, self._world.now)
        storage = progress.storage_activity
        self._reported = ranges.normalise((*self._reported, *progress.chunks))
        manifest = served.manifest

        def deliver() -> None:
            if self._closed:
                return
            now = self._message_at = self._world.now
            if progress.chunks:
                self._progress_at = now
            if storage is not None:
                self._storage_at, self._is_relay = now - storage.idle_s, storage.relayed
            elif self._storage_at is not None:
                self._storage_at, self._progress_at = None, now
            if progress.weights_id is not None and progress.weights_id != self._known_weights_id:
                self._known_weights_id = progress.weights_id
                assert manifest is not None
                self._target.handle(ManifestReceived(self._connection, manifest))
            elif progress.weights_id is None and progress.chunks:
                assert progress.provisional_id is not None
                digests = dict(zip(ranges.indices(progress.chunks), progress.digests, strict=True))
                self._target.handle(ProvisionalDigests(self._connection, progress.provisional_id, digests))
            if progress.chunks and not self._closed:
                self._target.handle(ChunksOffered(self._connection, progress.chunks))

        self._later(deliver)

    def _end_channel(self) -> None:
        if self._channel_id is not None and self._source is not None:
            self._source.served.leases.close(self._channel_id)
            if self._pump_soon in self._source.listeners:
                self._source.listeners.remove(self._pump_soon)
            self._channel_id = None

    # -- reads ------------------------------------------------------------------------------------------

    def read(self, request: ReadChunk) -> None:
        """See `Source`."""
        self._reads[request.chunk] = request
        self._later(lambda: self._begin_read(request))

    def _begin_read(self, request: ReadChunk) -> None:
        """Authorize the read; runs at the source."""
        source = self._source
        if request.chunk not in self._reads or source is None:
            return
        if not source.alive:
            self._fail_read(request, SourceUnavailable("connection reset"))
            return
        if self._is_unreachable(source):
            self._time_out_read(request)
            return
        begin, end = self._target.layout.chunks[request.chunk]
        try:
            source.served.authorize(self._token, begin, end, self._world.unix_s)
        except RforkError as error:
            self._later(partial(self._fail_read, request, error))
            return
        generation, began = source.served.generation, self._world.now
        duration_s = self._world.transfer_s(source, self._target.instance)
        self._world.later(duration_s, lambda: self._end_read(request, generation, began), on=None)

    def _end_read(self, request: ReadChunk, generation: int, began: float) -> None:
        source, target = self._source, self._target
        if request.chunk not in self._reads or source is None or not target.instance.alive:
            return
        if not source.alive:
            self._fail_read(request, SourceUnavailable("connection reset"))
        elif self._is_unreachable(source):
            self._time_out_read(request)
        elif target.instance.stopped:
            # The bytes wait in the kernel.
            self._world.when_resumed(target.instance, lambda: self._end_read(request, generation, began))
        elif source.served.generation != generation:
            self._fail_read(request, SourceWeightsChanged("the weights changed during the read"))
        else:
            self._has_no_bytes = False
            damaged = source.process.corrupt or target.instance.process.bad_memory
            content = GARBAGE if damaged else source.memory[request.chunk]
            target.write(request.chunk, content)
            self._progress_at = self._world.now
            target.handle(ChunkReceived(self._connection, request.chunk, self._world.now - began))
            self._world.later(DIGEST_S, lambda: self._digested(request), on=target.instance)

    def _digested(self, request: ReadChunk) -> None:
        self._reads.pop(request.chunk, None)
        digest = self._target.instance.memory[request.chunk]
        self._target.handle(ChunkDigested(self._connection, request.chunk, digest))

    def _time_out_read(self, request: ReadChunk) -> None:
        wait_s = max(0.0, request.read_by - self._world.now)
        error = SourceTimeout("no byte arrived in time")
        self._world.later(wait_s, lambda: self._fail_read(request, error), on=self._target.instance)

    def _fail_read(self, request: ReadChunk, error: RforkError) -> None:
        if self._reads.pop(request.chunk, None) is not None:
            self._target.handle(ReadFailed(self._connection, request.chunk, error))

    def close(self) -> None:
        """See `Source`."""
        self._closed = True
        source = self._source

        def release() -> None:
            if source is not None and source.alive and not self._is_unreachable(source):
                self._end_channel()

        self._later(release)
        error = SourceUnavailable("the channel is closed")
        for request in list(self._reads.values()):
            self._world.later(CLOSE_S, partial(self._fail_read, request, error), on=None)


class StorageSource:
    """The files of the target itself."""

    def __init__(self, target: Target, connection: int, assignment: StorageAssignment) -> None:
        self._target = target
        self._world = target.world
        self._connection = connection
        self._address = f"{assignment.kind}:{assignment.uri}"
        self._is_elected = bool(assignment.chunks)
        self._closed = False
        self._advanced_at = self._world.now
        self._block_at: float | None = None
        self._reads: dict[int, ReadChunk] = {}

    def start(self) -> None:
        """See `Source`."""
        self._world.later(self._world.latency_s(), self._open, on=self._target.instance)

    def _open(self) -> None:
        files = self._target.instance.files
        if self._closed:
            return
        if files is None or self._target.disk_error:
            self._target.handle(SourceFailed(self._connection, StorageError(f"{self._address}: disk error")))
            return
        opened = StorageOpened(
            self._connection, None, origin_of(files), PREFETCH_CHUNKS, self._world.new_id("files")[:16]
        )
        self._target.handle(opened)

    def compare(self, digests: Mapping[int, bytes]) -> None:
        """Compare the files with these digests."""

        def finish() -> None:
            files = self._target.instance.files or ()
            agrees = all(files[chunk] == digest for chunk, digest in digests.items())
            if not self._closed:
                self._target.handle(FilesCompared(self._connection, digests, agrees))

        self._world.later(self._world.disk_chunk_s * len(digests), finish, on=self._target.instance)

    def activity(self, now: float) -> SourceActivity:
        """See `Source`."""
        idle_s = now - self._advanced_at if self._reads else 0.0
        return SourceActivity(
            message_at=now, progress_at=now, storage_at=self._advanced_at, block_at=self._block_at, idle_s=idle_s
        )

    def read(self, request: ReadChunk) -> None:
        """See `Source`."""
        if not self._reads:
            self._advanced_at = self._world.now
        self._reads[request.chunk] = request
        seconds = self._world.disk_chunk_s * len(self._reads)
        self._world.later(seconds, lambda: self._end_read(request), on=self._target.instance)

    def _end_read(self, request: ReadChunk) -> None:
        target = self._target
        files = target.instance.files
        if request.chunk not in self._reads or target.disk_stalled:
            return
        if files is None or target.disk_error:
            del self._reads[request.chunk]
            error = StorageError(f"{self._address}: disk error")
            target.handle(ReadFailed(self._connection, request.chunk, error))
            return
        self._advanced_at = self._block_at = self._world.now
        if self._is_elected:
            self._world.storage_reads.append((target.instance.name, request.chunk))
        target.write(request.chunk, files[request.chunk])
        target.handle(ChunkReceived(self._connection, request.chunk, self._world.disk_chunk_s))
        self._world.later(DIGEST_S, lambda: self._digested(request), on=target.instance)

    def _digested(self, request: ReadChunk) -> None:
        self._reads.pop(request.chunk, None)
        digest = self._target.instance.memory[request.chunk]
        self._target.handle(ChunkDigested(self._connection, request.chunk, digest))

    def close(self) -> None:
        """See `Source`."""
        self._closed = True
        error = SourceUnavailable(f"{self._address}: storage was closed")
        for request in list(self._reads.values()):

            def fail(request: ReadChunk = request) -> None:
                if self._reads.pop(request.chunk, None) is not None:
                    self._target.handle(ReadFailed(self._connection, request.chunk, error))

            self._world.later(CLOSE_S, fail, on=None)
