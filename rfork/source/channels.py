"""Open channels of a seed: reader slots and access to a transport, for the duration of a lease. Runs on the
source.

Transports with reads that the seed does not see authorize a reader when its channel opens. Therefore they
must be notified when the channel ends, whether the reader closes it or its lease expires. This may block, so
a separate thread does it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from rfork.errors import SourceWeightsChanged
from rfork.logs import logger
from rfork.source.leases import LeaseTable
from rfork.source.serving_spans import ServingSpans
from rfork.tracing import NOOP_TRACER, Span
from rfork.transport.base import ControlStream, Endpoint, Exporter

SWEEP_S = 0.5
"""Maximum time that a reader keeps access after its lease has expired."""

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Channel:
    """A channel's reader, and the exporter that serves it."""

    channel_id: str
    fork_id: str
    transport: str
    exporter: Exporter
    span: Span


class ChannelTable:
    """Opens and closes channels on `exporters` (by transport). `ended` is called after expired ones were
    removed.
    """

    def __init__(
        self,
        leases: LeaseTable,
        exporters: Mapping[str, Exporter],
        ended: Callable[[], None],
        serving_spans: ServingSpans | None = None,
    ) -> None:
        """`serving_spans` records the bytes served on each channel."""
        self._leases = leases
        self._exporters = exporters
        self._ended = ended
        self._serving_spans = serving_spans or ServingSpans(NOOP_TRACER, lambda: None)
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
            channel_id = self._leases.open(fork_id)
            span = self._serving_spans.begin(fork_id, transport, address)
            self._open_channels[channel_id] = Channel(channel_id, fork_id, transport, exporter, span)
            try:
                exporter.authorize_peer(channel_id, address)
                return channel_id, exporter.endpoint()
            except BaseException:
                self._end(channel_id)
                raise

    def run_control_stream(self, channel_id: str, line: ControlStream) -> None:
        """Run the exporter's side of the channel's control stream until the stream ends; blocks."""
        with self._lock:
            channel = self._open_channels.get(channel_id)
        if channel is None:
            line.close()
        else:
            channel.exporter.run_control_stream(channel_id, line)

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
                swept = self._leases.sweep()
                for channel_id in swept:
                    self.close(channel_id)
                self._revoke()
                if swept:
                    self._ended()
            except Exception:  # a bug: leases that expire later must be handled nevertheless
                log.exception("failed to remove expired leases")
