"""One source of a fork, as the target sees it: its channel, its progress stream and its reader.

Runs on the target, on a thread of its own for each source, so that a source that hangs holds up
nobody else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Protocol

from rfork.errors import RforkError, SourceGone, SourceStalled, TargetError
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.image.ranges import Range
from rfork.peer.base import Dial, Peer
from rfork.settings import Settings
from rfork.transport.base import Reader, Transport
from rfork.wire import Lease, Route

SHOW_AFTER = 1 / 3
"""Part of a lease's life after which the source is shown the next one, even if nothing is read."""


class FeedListener(Protocol):
    """What a feed tells the puller, on the feed's own thread."""

    def on_manifest(self, feed: Feed, manifest: Manifest) -> None:
        """What the source's image holds; before its first offer. May raise what ends the feed."""
        ...

    def on_offer(self, feed: Feed, chunks: tuple[Range, ...]) -> None:
        """These chunks can be read from the source from now on."""
        ...

    def on_failure(self, feed: Feed, error: RforkError) -> None:
        """The feed has ended by itself."""
        ...


class Feed:
    """Opens a channel to one source and keeps its readable chunks up to date.

    `deadline` is the fork's own, a `time.monotonic()` value.
    """

    def __init__(
        self,
        route: Route,
        image: Image,
        transports: Mapping[str, Transport],
        dial: Dial,
        settings: Settings,
        listener: FeedListener,
        deadline: float,
    ) -> None:
        self.source_id = route.source_id
        self.host = route.placement.host
        self.address = route.address
        self.transport = ""
        self.heard_at = time.monotonic()
        self.advanced_at = self.heard_at
        self._route = route
        self._image = image
        self._transports = transports
        self._dial = dial
        self._settings = settings
        self._listener = listener
        self._deadline = deadline
        self._token = route.lease.token
        self._shown = route.lease.token
        self._show_every_s = route.lease.expires_in_s * SHOW_AFTER
        self._show_at = self.heard_at + self._show_every_s
        self._peer: Peer | None = None
        self._reader: Reader | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"rfork-feed-{route.source_id[:8]}", daemon=True
        )

    def start(self) -> None:
        """Begin on the feed's own thread."""
        self._thread.start()

    def renew(self, lease: Lease) -> None:
        """Show a newer token from now on."""
        self._token = lease.token

    def read(self, begin: int, end: int, deadline: float) -> None:
        """Fill image range `[begin, end)`; see `rfork.transport.base.Reader.read`."""
        if self._reader is None:
            raise SourceGone(f"{self.address}: the channel is closed")
        self._reader.read(begin, end, deadline)

    def close(self) -> None:
        """Drop all connections; the source sees the stream end and takes the reader's place back."""
        self._closed.set()
        if self._reader is not None:
            self._reader.close()
        if self._peer is not None:
            self._peer.close()

    def join(self) -> None:
        """Wait until the feed's thread has ended; after `close`."""
        self._thread.join()

    def _run(self) -> None:
        try:
            self._follow()
        except RforkError as error:
            if not self._closed.is_set():
                self._listener.on_failure(self, error)
        except Exception as error:  # a bug on this side must end the feed, not hang the fork
            if not self._closed.is_set():
                self._listener.on_failure(
                    self, TargetError(f"{self.address}: {type(error).__name__}: {error}")
                )

    def _follow(self) -> None:
        step = min(time.monotonic() + self._settings.stall_s, self._deadline)
        layout = self._image.layout
        peer = self._peer = self._dial(self.address, lambda: self._token)
        self._check_open()
        offered = tuple(name for name in self._route.transports if name in self._transports)
        channel_id, endpoint = peer.open(layout.layout_id, offered, step)
        self.transport = endpoint.transport
        self.heard_at = time.monotonic()
        self._reader = self._transports[endpoint.transport].connect(
            endpoint, self._image, lambda: self._token, step
        )
        self._check_open()
        self._watch(peer, channel_id)

    def _check_open(self) -> None:
        """`close` may have come before there was anything to close; this thread then does it."""
        if self._closed.is_set():
            self.close()
            raise SourceGone(f"{self.address}: the channel is closed")

    def _watch(self, peer: Peer, channel_id: str) -> None:
        informed = False
        for news in peer.watch(channel_id, self._settings.stall_s / 4):
            self.heard_at = time.monotonic()
            self._show_lease(peer)
            if not news.chunks:
                continue
            self.advanced_at = self.heard_at
            if not informed:
                # A relay knows its manifest before it has its first chunk: now it answers at once.
                step = min(self.heard_at + self._settings.stall_s, self._deadline)
                self._listener.on_manifest(self, peer.manifest(self._image.layout, step))
                informed = True
            self._listener.on_offer(self, news.chunks)
        raise SourceGone(f"{self.address}: the source closed the channel")

    def _show_lease(self, peer: Peer) -> None:
        """The source takes a place back when the last lease it saw is over, also from a reader that waits."""
        if self._token != self._shown and self.heard_at >= self._show_at:
            self._shown = self._token
            self._show_at = self.heard_at + self._show_every_s
            peer.renew(min(self.heard_at + self._settings.stall_s, self._deadline))

    def check(self, now: float, *, starved: bool) -> SourceStalled | None:
        """Why this source counts as stalled at `now`, if it does.

        Silence (not even a keep-alive) is judged after `stall_s`; a relay that lives but offers
        nothing new after three times that, since it may be waiting for a source of its own.
        """
        silent = now - max(self.heard_at, self.advanced_at)
        if silent > self._settings.stall_s:
            return SourceStalled(f"{self.address}: silent for {silent:.1f} s")
        idle = now - self.advanced_at
        if starved and idle > 3 * self._settings.stall_s:
            return SourceStalled(f"{self.address}: offered no new chunk for {idle:.1f} s")
        return None
