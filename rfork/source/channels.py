"""Readers of a seed: their channels, what is served to them, and their running reads. Runs on the source.

A channel is a reader slot and access to a transport, for the duration of a lease.

Transports with reads that the seed does not see authorize a reader when its channel opens. Therefore they
must be notified when the channel ends, whether the reader closes it or its lease expires. This may block, so
a separate thread does it.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass

from rfork.errors import SourceWeightsChanged
from rfork.logs import logger
from rfork.source.egress_limiter import EgressLimiter
from rfork.source.served_image import Leases
from rfork.tracing import NO_SPAN, Span, Tracer
from rfork.transport.base import ControlStream, Endpoint, Exporter

SWEEP_S = 0.5
"""Maximum time that a reader keeps access after its lease has expired."""
WARN_S = 1.0
"""A read that is still running this long after it was aborted is logged."""

log = logger(__name__)


class InflightReads:
    """Registry of running reads. Thread-safe; a read is one block of `track`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inflight: dict[int, Callable[[], None]] = {}
        self._next_id = 0

    @contextlib.contextmanager
    def track(self, abort: Callable[[], None]) -> Iterator[None]:
        """Register a read of the image's memory; `abort`, called from another thread, makes the block end soon."""
        with self._changed:
            self._next_id += 1
            number = self._next_id
            self._inflight[number] = abort
        try:
            yield
        finally:
            with self._changed:
                del self._inflight[number]
                self._changed.notify_all()

    def drain(self, timeout_s: float) -> int:
        """Return once every read that has started has ended; return how many had to be aborted.

        Reads that are still running after `timeout_s` seconds are aborted.
        """
        with self._changed:
            last = self._next_id
            if self._changed.wait_for(lambda: not self._started_before(last), timeout_s):
                return 0
            aborts = self._started_before(last)
        for abort in aborts:
            abort()
        with self._changed:
            # Without a timeout: bytes that change while they are sent are worse than a late update.
            while not self._changed.wait_for(lambda: not self._started_before(last), WARN_S):
                log.warning("aborted reads are still running and delay a change of the bytes", reads=len(aborts))
        return len(aborts)

    def _started_before(self, last: int) -> list[Callable[[], None]]:
        """Return the abort functions of running reads that started as number `last` or before."""
        return [abort for number, abort in self._inflight.items() if number <= last]


class ServingSpans:
    """Counts bytes served to forks, if tracing is enabled, and records the limit of all readers.

    Transports with reads that run no code here are not counted: their spans have no bytes. Thread-safe.
    """

    def __init__(self, tracer: Tracer, limiter: EgressLimiter, instance_id: str) -> None:
        self._tracer = tracer
        self._instance_id = instance_id
        self._limiter = limiter
        self._lock = threading.Lock()
        self._bytes: Counter[str] = Counter()  # by fork, for those with a channel
        self._channels: Counter[str] = Counter()

    def begin(self, fork_id: str, transport: str, address: str) -> Span:
        """Record a channel opened for the reader at this IP address, which made the call."""
        if not self._tracer.enabled:
            return NO_SPAN
        with self._lock:
            self._channels[fork_id] += 1
        return self._tracer.start_span(
            "serve",
            kind="server",
            instance=self._instance_id,
            fork=fork_id,
            transport=transport,
            reader=address,
            rate_limit_bytes_per_s=self._limiter.current_limit,
        )

    def add(self, fork_id: str, nbytes: int) -> None:
        """Record that `nbytes` bytes are about to be sent."""
        if self._tracer.enabled:
            with self._lock:
                if fork_id in self._channels:
                    self._bytes[fork_id] += nbytes

    def end(self, fork_id: str, span: Span) -> None:
        """End a channel's span. Concurrent channels of a fork each report what the fork received until then."""
        if not self._tracer.enabled:
            return
        with self._lock:
            nbytes = self._bytes[fork_id]
            self._channels[fork_id] -= 1
            if self._channels[fork_id] <= 0:
                del self._channels[fork_id], self._bytes[fork_id]
        span.set(bytes=nbytes or None, rate_limit_bytes_per_s=self._limiter.current_limit)
        span.end()


@dataclass(frozen=True, slots=True)
class Channel:
    """A channel's reader, and the exporter that serves it."""

    channel_id: str
    fork_id: str
    transport: str
    exporter: Exporter
    span: Span


class ChannelTable:
    """Opens and closes channels on `exporters` (by transport).

    `leases_lock` guards `leases`; `clock` is the planner's time, in seconds since the epoch. `serving_spans` records
    the bytes served on each channel. `on_expired` is called after expired channels were removed.
    """

    def __init__(
        self,
        leases: Leases,
        leases_lock: threading.RLock,
        clock: Callable[[], float],
        exporters: Mapping[str, Exporter],
        serving_spans: ServingSpans,
        on_expired: Callable[[], None],
    ) -> None:
        self._leases = leases
        self._leases_lock = leases_lock
        self._clock = clock
        self._exporters = exporters
        self._serving_spans = serving_spans
        self._on_expired = on_expired
        self._lock = threading.Lock()
        self._open_channels: dict[str, Channel] = {}  # by channel
        self._closed_channels: deque[Channel] = deque()  # readers whose access has not been revoked yet
        self._revoke_lock = threading.Lock()
        self._closing = threading.Event()
        self._woken = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep, name="rfork-leases", daemon=True)

    def start(self) -> None:
        """Start to check for expired leases."""
        self._sweeper.start()

    def stop(self) -> None:
        """Stop checking. Idempotent, and allowed without a start."""
        self._closing.set()
        self._woken.set()
        if self._sweeper.ident is not None:
            self._sweeper.join()
        with self._lock:
            for channel in self._open_channels.values():
                self._serving_spans.end(channel.fork_id, channel.span)

    def open(self, fork_id: str, transport: str, address: str) -> tuple[str, Endpoint]:
        """Open a channel on this transport for the reader at this IP address.

        Raises SourceBusy, also if the transport is not ready yet; TransportUnavailable if it never will be;
        and SourceWeightsChanged if it is not exported.
        """
        exporter = self._exporters.get(transport)
        if exporter is None:
            offered = ", ".join(sorted(self._exporters)) or "no transport"
            raise SourceWeightsChanged(f"the source offers {offered} now, not {transport}")
        # All under the lock: a lease that expires meanwhile is removed once its access is recorded.
        with self._lock:
            with self._leases_lock:
                channel_id = self._leases.open(fork_id, self._clock())
            span = self._serving_spans.begin(fork_id, transport, address)
            self._open_channels[channel_id] = Channel(channel_id, fork_id, transport, exporter, span)
            try:
                exporter.authorize_peer(channel_id, address)
                return channel_id, exporter.endpoint()
            except BaseException:
                self._end(channel_id)
                raise

    def run_control_stream(self, channel_id: str, stream: ControlStream) -> None:
        """Run the exporter's side of the channel's control stream until the stream ends; blocks."""
        with self._lock:
            channel = self._open_channels.get(channel_id)
        if channel is None:
            stream.close()
        else:
            channel.exporter.run_control_stream(channel_id, stream)

    def close(self, channel_id: str) -> None:
        """Release the slot immediately, and revoke the access soon after; an unknown channel is not an error."""
        with self._lock:
            self._end(channel_id)

    def close_all(self) -> bool:
        """Release all slots and wait until access is revoked for all readers; return True if there were any."""
        with self._lock:
            ending = list(self._open_channels)
            for channel_id in ending:
                self._end(channel_id)
        self._revoke()
        return bool(ending)

    def reader_count(self, transports: Container[str]) -> int:
        """Return the number of forks with a channel on one of these transports."""
        with self._lock:
            return len({channel.fork_id for channel in self._open_channels.values() if channel.transport in transports})

    def _end(self, channel_id: str) -> None:
        with self._leases_lock:
            self._leases.close(channel_id)
        channel = self._open_channels.pop(channel_id, None)
        if channel is not None:
            self._serving_spans.end(channel.fork_id, channel.span)
            self._closed_channels.append(channel)
            self._woken.set()

    def _revoke(self) -> None:
        with self._revoke_lock:
            while self._closed_channels:
                channel = self._closed_channels.popleft()
                try:
                    channel.exporter.revoke_peer(channel.channel_id)
                except Exception:  # the next ones must be revoked nevertheless
                    log.exception(
                        "failed to revoke a reader's access", fork=channel.fork_id, transport=channel.transport
                    )

    def _sweep(self) -> None:
        while not self._closing.is_set():
            self._woken.wait(SWEEP_S)
            self._woken.clear()
            try:
                with self._leases_lock:
                    swept = self._leases.sweep(self._clock())
                for channel_id in swept:
                    self.close(channel_id)
                self._revoke()
                if swept:
                    self._on_expired()
            except Exception:  # a bug: leases that expire later must be handled nevertheless
                log.exception("failed to remove expired leases")
