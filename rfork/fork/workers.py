"""The workers of a pull: a window of threads that each read one chunk and check it where it landed.

Runs on the target. Verification of one chunk overlaps the arrival of others; a verified chunk goes to
the board, from where this instance, as a relay, gives it onwards.
"""

from __future__ import annotations

import threading
import time

from rfork.errors import RforkError, SourceCorrupt, SourceGone, StorageError, TargetError
from rfork.fork.deadline import Deadline
from rfork.fork.digests import Digests
from rfork.fork.giver import Giver
from rfork.fork.intake import Intake
from rfork.fork.pace import Pace
from rfork.fork.schedule import Read, Schedule
from rfork.fork.storage_feed import StorageFeed
from rfork.image.board import ChunkBoard
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.settings import Settings

log = logger(__name__)


class Workers:
    """The threads, and the work of one read. `changed` is the puller's lock and its bell."""

    def __init__(
        self,
        image: Image,
        board: ChunkBoard,
        settings: Settings,
        schedule: Schedule,
        digests: Digests,
        intake: Intake,
        changed: threading.Condition,
        deadline: Deadline,
    ) -> None:
        self.bytes_read = 0
        """Bytes of the chunks that arrived so far, right or wrong."""
        self._image = image
        self._board = board
        self._settings = settings
        self._schedule = schedule
        self._digests = digests
        self._intake = intake
        self._sources = intake.sources
        self._changed = changed
        self._deadline = deadline
        self._chunks = image.layout.chunks
        self._stopping = False
        self._pace = Pace(settings.window)
        self._threads = [
            threading.Thread(target=self._work, name=f"rfork-pull-{number}", daemon=True)
            for number in range(settings.window)
        ]

    def start(self) -> None:
        """Begin to read whatever the schedule gives."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Take nothing new."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until nothing more is written to the image; after `stop`."""
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                read = None
                while not self._stopping and (read := self._schedule.take(self._window)) is None:
                    self._changed.wait()
                if read is None:
                    return
                feed = self._sources.find(read.source_id)
                window = self._window(read.source_id)
            error: RforkError | None = None
            digest: bytes | None = None
            try:
                if feed is None:
                    raise SourceGone("the source was given up")
                digest = self._fetch(feed, read, window)
            except RforkError as caught:
                error = caught
            except Exception as caught:  # out of memory, or a bug: this side's failure, and not a hang
                log.exception("reader failed", source=read.source_id[:8])
                error = TargetError(f"{type(caught).__name__}: {caught}")
            with self._changed:
                self._settle(feed, read, digest, error)

    def _window(self, source_id: str) -> int:
        """Most reads under way from a source; the caller holds the lock."""
        feed = self._sources.find(source_id)
        return self._pace.window("" if feed is None else feed.transport)

    def _fetch(self, feed: Giver, read: Read, window: int) -> bytes | None:
        """Read one chunk; returns its digest, where that is wanted. `window`: the source's, before."""
        begin, end = self._chunks[read.chunk]
        patience = self._settings.stall_s + (end - begin) / self._settings.min_rate
        began = time.monotonic()
        feed.read(begin, end, min(began + patience, self._deadline.at))
        with self._changed:
            self.bytes_read += end - begin
            beside = self._schedule.beside(read)
            if isinstance(feed, StorageFeed):
                # It reads ahead, so a chunk takes as long as it took since the one before.
                began, beside = feed.advanced_at, 0
            feed.advanced_at = time.monotonic()
            self._pace.arrived(end - begin, feed.advanced_at - began, beside)
            if self._window(read.source_id) > window:
                self._changed.notify_all()
        wanted = self._settings.verify or isinstance(feed, StorageFeed)
        return self._image.digest(read.chunk) if wanted else None

    def _settle(self, feed: Giver | None, read: Read, digest: bytes | None, error: RforkError | None) -> None:
        """A read has ended; the caller holds the lock. What the chunk must hold is asked only now."""
        if error is None and feed is not None:
            try:
                right = self._checked(feed, read, digest)
            except RforkError as caught:
                error = caught
            else:
                begin, end = self._chunks[read.chunk]
                if isinstance(feed, StorageFeed):
                    self._digests.confirm(read.chunk)
                self._board.mark(read.chunk, right)
                self._schedule.verified(read)
                self._sources.credit(feed.source_id, feed.host, feed.transport, 1, end - begin)
                # One chunk less is news for the caller's thread only, and only if it was the last.
                if self._schedule.complete:
                    self._changed.notify_all()
                return
        self._schedule.dropped(read)
        if feed is not None and error is not None:
            self._intake.fail(feed, error)
        self._changed.notify_all()

    def _checked(self, feed: Giver, read: Read, digest: bytes | None) -> bytes | None:
        """The right digest of a chunk, which is also what was read."""
        expected = self._digests.expected(read.source_id, read.chunk)
        if digest is None:
            return expected
        if expected is not None and digest != expected:
            text = f"{feed.address}: chunk {read.chunk} does not match its digest"
            raise StorageError(text) if isinstance(feed, StorageFeed) else SourceCorrupt(text)
        return digest
