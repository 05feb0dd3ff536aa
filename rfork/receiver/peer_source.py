"""One source of a fork, as the target sees it: its channel, its progress stream and its reader.

Runs on the target, on a thread of its own for each source, so that a source that hangs holds up
nobody else.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from functools import partial

from rfork.errors import (
    RforkError,
    SourceCorrupt,
    SourceTimeout,
    SourceUnavailable,
    TargetError,
    TransportUnavailable,
)
from rfork.image import ranges
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.peer.base import Dial, Peer, Progress
from rfork.receiver.deadline import Deadline
from rfork.receiver.source import SourceListener
from rfork.receiver.source_span import SourceSpan
from rfork.schema import Lease, Route
from rfork.settings import InstanceSettings
from rfork.tracing import use_context
from rfork.transport.base import Reader, Transport

log = logger(__name__)

PROVISIONAL_ID_PATTERN = re.compile(r"[0-9a-f]{32}(-[0-9a-f]{16})?")
LEASE_REFRESH_FRACTION = 1 / 3
"""Part of a lease's life after which the source is shown the next one, even if nothing is read."""


class PeerSource:
    """Opens a channel to one source and keeps its readable chunks up to date.

    `deadline` is the fork's own.
    """

    def __init__(
        self,
        route: Route,
        image: Image,
        transports: Mapping[str, Transport],
        dial: Dial,
        settings: InstanceSettings,
        listener: SourceListener,
        deadline: Deadline,
        reading: SourceSpan | None = None,
    ) -> None:
        self.source_id = self.instance_id = route.source_id
        self.host = route.placement.host
        self.address = route.address
        self.transport = ""
        self.reading = reading or SourceSpan()
        self.last_storage_activity_at: float | None = None
        """When the storage that the source, or whom it waits for, reads last gave something."""
        self.is_relay = False
        self.last_message_at = time.monotonic()
        self.last_progress_at = self.last_message_at
        self._route = route
        self._image = image
        self._transports = transports
        self._dial = dial
        self._settings = settings
        self._listener = listener
        self._deadline = deadline
        self._connecting_until = 0.0  # what is done until then has a deadline of its own
        self.began_at = self.last_message_at
        self._token = route.lease.token
        self._presented_token = route.lease.token
        self._lease_refresh_s = route.lease.expires_in_s * LEASE_REFRESH_FRACTION
        self._next_presentation_at = self.last_message_at + self._lease_refresh_s
        self._peer: Peer | None = None
        self._reader: Reader | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"rfork-feed-{route.source_id[:8]}", daemon=True)

    def start(self) -> None:
        """Begin on the feed's own thread."""
        self._thread.start()

    @property
    def has_no_bytes(self) -> bool:
        """Whether not one byte of the image has come from this source yet, as far as its transport knows."""
        return self._reader is None or not getattr(self._reader, "answered", True)

    def renew(self, lease: Lease) -> None:
        """Show a newer token from now on."""
        self._token = lease.token

    def read(self, begin: int, end: int, deadline: float) -> None:
        """Fill image range `[begin, end)`; see `rfork.transport.base.Reader.read`."""
        if self._reader is None:
            raise SourceUnavailable(f"{self.address}: the channel is closed")
        self._reader.read(begin, end, deadline)
        self.reading.add_bytes(end - begin)

    def close(self) -> None:
        """Drop all connections; the source sees the stream end and takes the reader's place back."""
        self._closed.set()
        if self._reader is not None:
            self._reader.close()
        if self._peer is not None:
            self._peer.close()
        self.reading.end(self.transport)

    def join(self) -> None:
        """Wait until the feed's thread has ended; after `close`."""
        self._thread.join()

    def _run(self) -> None:
        try:
            with use_context(self.reading.span.context):
                self._consume_progress()
        except RforkError as error:
            if not self._closed.is_set():
                self._listener.on_failure(self, error)
        except Exception as error:  # a bug on this side must end the feed, not hang the fork
            if not self._closed.is_set():
                self._listener.on_failure(self, TargetError(f"{self.address}: {type(error).__name__}: {error}"))

    def _consume_progress(self) -> None:
        peer = self._peer = self._dial(self.address, lambda: self._token)
        self._check_open()
        offered = [name for name in self._route.transports if name in self._transports]
        while self._reader is None:
            # Anew for each transport: one that took its time to fail leaves the next one its own.
            step = self._step_deadline()
            channel_id, endpoint = peer.open(self._image.layout.layout_id, tuple(offered), step)
            if endpoint.transport not in offered:
                raise SourceCorrupt(f"{self.address}: opens {endpoint.transport!r}, asked for {offered}")
            self.transport = endpoint.transport
            self.last_message_at = time.monotonic()
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
                    self._listener.on_transport_unavailable(self, error)
                self._close_channel(peer, channel_id)
                if not offered:
                    raise
            self._check_open()
        # A source need not say anything while this side connects: its silence counts from here.
        self.last_message_at = self.last_progress_at = time.monotonic()
        self._connecting_until = 0.0
        self._watch_progress(peer, channel_id)

    def _step_deadline(self) -> float:
        """Until when one thing that is asked of the source may take."""
        return min(time.monotonic() + self._settings.source_idle_timeout_s, self._deadline.monotonic_time)

    def _close_channel(self, peer: Peer, channel_id: str) -> None:
        """Its place is taken until the lease ends, for there is no stream whose end would tell."""
        step = self._connecting_until = self._step_deadline()
        try:
            peer.close_channel(channel_id, step)
        except RforkError as error:  # the source takes it back by itself then, only later
            log.info("a place could not be given back", source=self.address, error=error.kind)

    def _check_open(self) -> None:
        """`close` may have come before there was anything to close; this thread then does it."""
        if self._closed.is_set():
            self.close()
            raise SourceUnavailable(f"{self.address}: the channel is closed")

    def _watch_progress(self, peer: Peer, channel_id: str) -> None:
        known = ""
        for update in peer.watch(channel_id, self._settings.source_idle_timeout_s / 4):
            self.last_message_at = time.monotonic()
            self._present_lease(peer)
            self._record_upstream_activity(update)
            if self._reader is not None:
                self._reader.set_rate_limit(update.rate)
            if update.chunks:
                self.last_progress_at = self.last_message_at
            if update.weights_id is not None and update.weights_id != known:
                manifest = peer.manifest(self._image.layout, self._step_deadline())
                self._listener.on_manifest(self, manifest)
                known = manifest.weights_id
            elif update.weights_id is None and update.chunks:
                self._listener.on_provisional_digests(self, *self._provisional_digests(update))
            if update.chunks:
                self._listener.on_chunks_available(self, update.chunks)
        raise SourceUnavailable(f"{self.address}: the source closed the channel")

    def _record_upstream_activity(self, update: Progress) -> None:
        if update.storage_activity is not None:
            self.last_storage_activity_at, self.is_relay = (
                self.last_message_at - update.storage_activity.idle_s,
                update.storage_activity.relayed,
            )
        elif self.last_storage_activity_at is not None:
            # Who waited for storage has to look for something else now, and gets the time for it.
            self.last_storage_activity_at, self.last_progress_at = None, self.last_message_at

    def _provisional_digests(self, update: Progress) -> tuple[str, dict[int, bytes]]:
        """The draft and the digests in what the source said."""
        count = len(self._image.layout.chunks)
        sane = all(begin <= end <= count for begin, end in update.chunks)
        if not sane or len(update.digests) != ranges.count(update.chunks):
            raise SourceCorrupt(f"{self.address}: offers chunks without a manifest and without digests")
        if update.provisional_id is None or not PROVISIONAL_ID_PATTERN.fullmatch(update.provisional_id):
            raise SourceCorrupt(f"{self.address}: {update.provisional_id!r} is no draft")
        return update.provisional_id, dict(zip(ranges.indices(update.chunks), update.digests, strict=True))

    def _present_lease(self, peer: Peer) -> None:
        """The source takes a place back when the last lease it saw is over, also from a reader that waits."""
        if self._token != self._presented_token and self.last_message_at >= self._next_presentation_at:
            self._presented_token = self._token
            self._next_presentation_at = self.last_message_at + self._lease_refresh_s
            peer.renew(self._step_deadline())

    def check(self, now: float, *, starved: bool) -> SourceTimeout | None:
        """Why this source counts as stalled at `now`, if it does.

        Silence (not even a keep-alive) is judged after `source_idle_timeout_s`; a relay that lives but offers
        nothing new after three times that, since it may be waiting for a source of its own. While
        storage is read, by it or by whom it waits for, what counts is when that last gave something:
        `storage_idle_timeout_s` later it stands still. A relay then has `source_idle_timeout_s` more, to find another source.
        To connect has a deadline of its own, until which none of this counts.
        """
        silent = now - max(self.last_message_at, self.last_progress_at, self._connecting_until)
        if silent > self._settings.source_idle_timeout_s:
            return SourceTimeout(f"{self.address}: silent for {silent:.1f} s")
        if self.last_storage_activity_at is not None:
            still = now - max(self.last_progress_at, self.last_storage_activity_at)
            timeout_s = self._settings.storage_idle_timeout_s + (
                self._settings.source_idle_timeout_s if self.is_relay else 0.0
            )
            if starved and still > timeout_s:
                return SourceTimeout(f"{self.address}: its storage gave nothing for {still:.1f} s")
            return None
        idle = now - max(self.last_progress_at, self._connecting_until)
        if starved and idle > 3 * self._settings.source_idle_timeout_s:
            return SourceTimeout(f"{self.address}: offered no new chunk for {idle:.1f} s")
        return None
