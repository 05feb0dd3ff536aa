"""A peer as a source of a fork: its channel, its progress stream and its reader.

Runs on the target, on one thread per source, so that a source that hangs does not delay the others.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from functools import partial

from rfork.errors import (
    NetworkError,
    RforkError,
    SourceCorrupt,
    SourceError,
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
"""Fraction of a lease's duration after which the next one is presented to the source, even without reads."""


class PeerSource:
    """Opens a channel to one source and keeps its readable chunks up to date.

    `deadline` is the fork's.
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
        source_span: SourceSpan | None = None,
    ) -> None:
        self.source_id = self.instance_id = route.source_id
        self.host = route.placement.host
        self.address = route.address
        self.transport = ""
        self.source_span = source_span or SourceSpan()
        self.last_storage_activity_at: float | None = None
        """Time of the last activity of the storage that the source reads, or that it waits for."""
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
        self._connecting_until = 0.0  # connecting has its own deadline
        self.began_at = self.last_message_at
        self._token = route.lease.token
        self._presented_token = route.lease.token
        self._lease_refresh_s = route.lease.expires_in_s * LEASE_REFRESH_FRACTION
        self._next_presentation_at = self.last_message_at + self._lease_refresh_s
        self._peer: Peer | None = None
        self._reader: Reader | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"rfork-source-{route.source_id[:8]}", daemon=True)

    def start(self) -> None:
        """Start the source's thread."""
        self._thread.start()

    @property
    def has_no_bytes(self) -> bool:
        """True if no byte of the image has arrived from this source yet, as far as its transport knows."""
        return self._reader is None or not getattr(self._reader, "answered", True)

    def renew(self, lease: Lease) -> None:
        """Present a newer token from now on."""
        self._token = lease.token

    def read(self, begin: int, end: int, deadline: float) -> None:
        """Fill image range `[begin, end)`; see `rfork.transport.base.Reader.read`."""
        if self._reader is None:
            raise SourceUnavailable(f"{self.address}: the channel is closed")
        try:
            self._reader.read(begin, end, deadline)
        except (SourceError, NetworkError) as error:
            error.add_party(self.address)
            raise
        self.source_span.add_bytes(end - begin)

    def close(self) -> None:
        """Close all connections; the source detects the end of the stream and releases the reader slot."""
        self._closed.set()
        if self._reader is not None:
            self._reader.close()
        if self._peer is not None:
            self._peer.close()
        self.source_span.end(self.transport)

    def join(self) -> None:
        """Wait until the source's thread has ended; call it after `close`."""
        self._thread.join()

    def _run(self) -> None:
        try:
            with use_context(self.source_span.span.context):
                self._consume_progress()
        except RforkError as error:
            if isinstance(error, SourceError | NetworkError):
                error.add_party(self.address)
            if not self._closed.is_set():
                self._listener.on_failure(self, error)
        except Exception as error:  # a bug on this side must end the source, not hang the fork
            if not self._closed.is_set():
                text = f"{self.address}: unexpected error on the target: {type(error).__name__}: {error}"
                self._listener.on_failure(self, TargetError(text))

    def _consume_progress(self) -> None:
        peer = self._peer = self._dial(self.address, lambda: self._token)
        self._check_open()
        offered = [name for name in self._route.transports if name in self._transports]
        while self._reader is None:
            # A new deadline for each transport: a slow failure leaves the next one its full time.
            step = self._step_deadline()
            channel_id, endpoint = peer.open(self._image.layout.layout_id, tuple(offered), step)
            if endpoint.transport not in offered:
                raise SourceCorrupt(f"{self.address}: opened {endpoint.transport!r}, but the request was for {offered}")
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
        # A source may be silent while this side connects: silence counts from here.
        self.last_message_at = self.last_progress_at = time.monotonic()
        self._connecting_until = 0.0
        self._watch_progress(peer, channel_id)

    def _step_deadline(self) -> float:
        """Return the deadline of one request to the source."""
        return min(time.monotonic() + self._settings.source_idle_timeout_s, self._deadline.monotonic_time)

    def _close_channel(self, peer: Peer, channel_id: str) -> None:
        """Release the reader slot explicitly.

        Without a progress stream, the source would keep it until the lease ends.
        """
        step = self._connecting_until = self._step_deadline()
        try:
            peer.close_channel(channel_id, step)
        except RforkError as error:  # the source releases it when the lease expires
            log.info("failed to release the reader slot", source=self.address, error=error.kind)

    def _check_open(self) -> None:
        """Close on this thread if `close` was called before there was anything to close."""
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
            # The storage reader must now find another source, and gets the time for it.
            self.last_storage_activity_at, self.last_progress_at = None, self.last_message_at

    def _provisional_digests(self, update: Progress) -> tuple[str, dict[int, bytes]]:
        """Return the provisional image's id and digests of an update."""
        count = len(self._image.layout.chunks)
        sane = all(begin <= end <= count for begin, end in update.chunks)
        if not sane or len(update.digests) != ranges.count(update.chunks):
            raise SourceCorrupt(f"{self.address}: offered chunks without a manifest and without digests")
        if update.provisional_id is None or not PROVISIONAL_ID_PATTERN.fullmatch(update.provisional_id):
            raise SourceCorrupt(f"{self.address}: {update.provisional_id!r} is not the id of a provisional image")
        return update.provisional_id, dict(zip(ranges.indices(update.chunks), update.digests, strict=True))

    def _present_lease(self, peer: Peer) -> None:
        """Present the current lease to the source.

        It releases the slot when the last presented lease expires, even if the reader waits.
        """
        if self._token != self._presented_token and self.last_message_at >= self._next_presentation_at:
            self._presented_token = self._token
            self._next_presentation_at = self.last_message_at + self._lease_refresh_s
            peer.renew(self._step_deadline())

    def check(self, now: float, *, starved: bool) -> SourceTimeout | None:
        """Return the error if this source counts as stalled at `now`, otherwise None.

        Silence (not even a keep-alive) counts after `source_idle_timeout_s`; a relay that is alive but offers
        nothing new after three times that, since it may be waiting for its own source. While storage is read,
        by the source or one that it waits for, only the storage's last activity counts: it has stalled
        `storage_idle_timeout_s` later, and a relay then has `source_idle_timeout_s` more to find another
        source. Connecting has its own deadline, during which none of this counts.
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
                return SourceTimeout(f"{self.address}: its storage made no progress for {still:.1f} s")
            return None
        idle = now - max(self.last_progress_at, self._connecting_until)
        if starved and idle > 3 * self._settings.source_idle_timeout_s:
            return SourceTimeout(f"{self.address}: offered no new chunk for {idle:.1f} s")
        return None
