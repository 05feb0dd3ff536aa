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
    SourceGone,
    SourceStalled,
    TargetError,
    TransportUnusable,
)
from rfork.fork.deadline import Deadline
from rfork.fork.giver import Listener
from rfork.fork.reading import Reading
from rfork.image import ranges
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.peer.base import Dial, Peer, Progress
from rfork.settings import Settings
from rfork.tracing import within
from rfork.transport.base import Reader, Transport
from rfork.wire import Lease, Route

log = logger(__name__)

DRAFT = re.compile(r"[0-9a-f]{32}(-[0-9a-f]{16})?")
SHOW_AFTER = 1 / 3
"""Part of a lease's life after which the source is shown the next one, even if nothing is read."""


class Feed:
    """Opens a channel to one source and keeps its readable chunks up to date.

    `deadline` is the fork's own.
    """

    def __init__(
        self,
        route: Route,
        image: Image,
        transports: Mapping[str, Transport],
        dial: Dial,
        settings: Settings,
        listener: Listener,
        deadline: Deadline,
        reading: Reading | None = None,
    ) -> None:
        self.source_id = self.instance_id = route.source_id
        self.host = route.placement.host
        self.address = route.address
        self.transport = ""
        self.reading = reading or Reading()
        self.read_at: float | None = None
        """When the storage that the source, or whom it waits for, reads last gave something."""
        self.relayed = False
        self.heard_at = time.monotonic()
        self.advanced_at = self.heard_at
        self._route = route
        self._image = image
        self._transports = transports
        self._dial = dial
        self._settings = settings
        self._listener = listener
        self._deadline = deadline
        self._connecting_until = 0.0  # what is done until then has a deadline of its own
        self.began_at = self.heard_at
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

    @property
    def unanswered(self) -> bool:
        """Whether not one byte of the image has come from this source yet, as far as its transport knows."""
        return self._reader is None or not getattr(self._reader, "answered", True)

    def renew(self, lease: Lease) -> None:
        """Show a newer token from now on."""
        self._token = lease.token

    def read(self, begin: int, end: int, deadline: float) -> None:
        """Fill image range `[begin, end)`; see `rfork.transport.base.Reader.read`."""
        if self._reader is None:
            raise SourceGone(f"{self.address}: the channel is closed")
        self._reader.read(begin, end, deadline)
        self.reading.came(end - begin)

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
            with within(self.reading.span.context):
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
        peer = self._peer = self._dial(self.address, lambda: self._token)
        self._check_open()
        offered = [name for name in self._route.transports if name in self._transports]
        while self._reader is None:
            # Anew for each transport: one that took its time to fail leaves the next one its own.
            step = self._step()
            channel_id, endpoint = peer.open(self._image.layout.layout_id, tuple(offered), step)
            if endpoint.transport not in offered:
                raise SourceCorrupt(f"{self.address}: opens {endpoint.transport!r}, asked for {offered}")
            self.transport = endpoint.transport
            self.heard_at = time.monotonic()
            self._connecting_until = step
            try:
                self._reader = self._transports[endpoint.transport].connect(
                    endpoint, self._image, lambda: self._token, step, partial(peer.talk, channel_id)
                )
            except TransportUnusable as error:
                offered.remove(endpoint.transport)
                if offered:
                    self._listener.on_detour(self, error)
                self._leave(peer, channel_id)
                if not offered:
                    raise
            self._check_open()
        # A source need not say anything while this side connects: its silence counts from here.
        self.heard_at = self.advanced_at = time.monotonic()
        self._connecting_until = 0.0
        self._watch(peer, channel_id)

    def _step(self) -> float:
        """Until when one thing that is asked of the source may take."""
        return min(time.monotonic() + self._settings.stall_s, self._deadline.at)

    def _leave(self, peer: Peer, channel_id: str) -> None:
        """Its place is taken until the lease ends, for there is no stream whose end would tell."""
        step = self._connecting_until = self._step()
        try:
            peer.leave(channel_id, step)
        except RforkError as error:  # the source takes it back by itself then, only later
            log.info("a place could not be given back", source=self.address, error=error.kind)

    def _check_open(self) -> None:
        """`close` may have come before there was anything to close; this thread then does it."""
        if self._closed.is_set():
            self.close()
            raise SourceGone(f"{self.address}: the channel is closed")

    def _watch(self, peer: Peer, channel_id: str) -> None:
        known = ""
        for news in peer.watch(channel_id, self._settings.stall_s / 4):
            self.heard_at = time.monotonic()
            self._show_lease(peer)
            self._note_reading(news)
            if self._reader is not None:
                self._reader.hold_to(news.rate)
            if news.chunks:
                self.advanced_at = self.heard_at
            if news.weights_id is not None and news.weights_id != known:
                manifest = peer.manifest(self._image.layout, self._step())
                self._listener.on_manifest(self, manifest)
                known = manifest.weights_id
            elif news.weights_id is None and news.chunks:
                self._listener.on_draft(self, *self._drafted(news))
            if news.chunks:
                self._listener.on_offer(self, news.chunks)
        raise SourceGone(f"{self.address}: the source closed the channel")

    def _note_reading(self, news: Progress) -> None:
        if news.reading is not None:
            self.read_at, self.relayed = self.heard_at - news.reading.idle_s, news.reading.relayed
        elif self.read_at is not None:
            # Who waited for storage has to look for something else now, and gets the time for it.
            self.read_at, self.advanced_at = None, self.heard_at

    def _drafted(self, news: Progress) -> tuple[str, dict[int, bytes]]:
        """The draft and the digests in what the source said."""
        count = len(self._image.layout.chunks)
        sane = all(begin <= end <= count for begin, end in news.chunks)
        if not sane or len(news.digests) != ranges.count(news.chunks):
            raise SourceCorrupt(f"{self.address}: offers chunks without a manifest and without digests")
        if news.draft is None or not DRAFT.fullmatch(news.draft):
            raise SourceCorrupt(f"{self.address}: {news.draft!r} is no draft")
        return news.draft, dict(zip(ranges.indices(news.chunks), news.digests, strict=True))

    def _show_lease(self, peer: Peer) -> None:
        """The source takes a place back when the last lease it saw is over, also from a reader that waits."""
        if self._token != self._shown and self.heard_at >= self._show_at:
            self._shown = self._token
            self._show_at = self.heard_at + self._show_every_s
            peer.renew(self._step())

    def check(self, now: float, *, starved: bool) -> SourceStalled | None:
        """Why this source counts as stalled at `now`, if it does.

        Silence (not even a keep-alive) is judged after `stall_s`; a relay that lives but offers
        nothing new after three times that, since it may be waiting for a source of its own. While
        storage is read, by it or by whom it waits for, what counts is when that last gave something:
        `storage_stall_s` later it stands still. A relay then has `stall_s` more, to find another source.
        To connect has a deadline of its own, until which none of this counts.
        """
        silent = now - max(self.heard_at, self.advanced_at, self._connecting_until)
        if silent > self._settings.stall_s:
            return SourceStalled(f"{self.address}: silent for {silent:.1f} s")
        if self.read_at is not None:
            still = now - max(self.advanced_at, self.read_at)
            patience = self._settings.storage_stall_s + (self._settings.stall_s if self.relayed else 0.0)
            if starved and still > patience:
                return SourceStalled(f"{self.address}: its storage gave nothing for {still:.1f} s")
            return None
        idle = now - max(self.advanced_at, self._connecting_until)
        if starved and idle > 3 * self._settings.stall_s:
            return SourceStalled(f"{self.address}: offered no new chunk for {idle:.1f} s")
        return None
