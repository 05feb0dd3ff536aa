"""The open channels of a seed: a reader's place, and its way in, for as long as its lease lasts.

Runs on the source. A transport whose reads the seed does not see lets a reader in when its channel
opens, so it has to be told when that is over, whether the reader says so or its lease just ends. That may
take it a while, so a thread of its own tells it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from rfork.errors import SourceWeightsChanged
from rfork.logs import logger
from rfork.source.leases import LeaseVerifier
from rfork.source.serving_spans import ServingSpans
from rfork.tracing import NOOP_TRACER, Span
from rfork.transport.base import ControlStream, Endpoint, Exporter

SWEEP_S = 0.5
"""A reader whose lease has ended keeps its way in no longer than this."""

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Channel:
    """Where a channel leads: whose it is, and what gives it the bytes."""

    channel_id: str
    fork_id: str
    transport: str
    exporter: Exporter
    span: Span


class ChannelTable:
    """Opens and ends channels on `exporters` (by transport). `ended` is called after some were swept."""

    def __init__(
        self,
        leases: LeaseVerifier,
        exporters: Mapping[str, Exporter],
        ended: Callable[[], None],
        serving_spans: ServingSpans | None = None,
    ) -> None:
        """`serving_spans` says of each channel what was given on it."""
        self._leases = leases
        self._exporters = exporters
        self._ended = ended
        self._serving_spans = serving_spans or ServingSpans(NOOP_TRACER, lambda: None)
        self._lock = threading.Lock()
        self._open_channels: dict[str, Channel] = {}  # by channel
        self._closed_channels: deque[Channel] = deque()  # whose readers have still to be let out
        self._revoke_lock = threading.Lock()
        self._closing = threading.Event()
        self._woken = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep, name="rfork-leases", daemon=True)

    def start(self) -> None:
        """Begin to look for leases that have ended."""
        self._sweeper.start()

    def stop(self) -> None:
        """Look no more. Safe to call twice, and without a start."""
        self._closing.set()
        self._woken.set()
        if self._sweeper.ident is not None:
            self._sweeper.join()
        with self._lock:
            for channel in self._open_channels.values():
                self._serving_spans.end(channel.fork_id, channel.span)

    def open(self, fork_id: str, transport: str, address: str) -> tuple[str, Endpoint]:
        """A channel for the reader at this IP address, on this transport.

        Raises SourceBusy, also where the transport is not ready yet; TransportUnavailable where it never will
        be; and SourceWeightsChanged where it is not exported.
        """
        exporter = self._exporters.get(transport)
        if exporter is None:
            raise SourceWeightsChanged(f"the source offers {sorted(self._exporters)}, not {transport}")
        # All under the lock: a lease that ends meanwhile is then swept once its way in is known.
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
        """Let the channel's exporter talk with its reader until the line ends; blocks."""
        with self._lock:
            channel = self._open_channels.get(channel_id)
        if channel is None:
            line.close()
        else:
            channel.exporter.run_control_stream(channel_id, line)

    def close(self, channel_id: str) -> None:
        """Take the place back at once, and the way in soon after; a channel that is gone is no error."""
        with self._lock:
            self._end(channel_id)

    def close_all(self) -> bool:
        """Take all slots back, and return once all readers are out; whether there were any."""
        with self._lock:
            ending = list(self._open_channels)
            for channel_id in ending:
                self._end(channel_id)
        self._revoke()
        return bool(ending)

    def reader_count(self, transports: Container[str]) -> int:
        """How many forks have a channel on one of these transports."""
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
                except Exception:  # the next ones have to go all the same
                    log.exception("a reader could not be cut off", fork=channel.fork_id, transport=channel.transport)

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
            except Exception:  # a bug: those whose lease ends later have to go all the same
                log.exception("leases that ended could not be swept")
