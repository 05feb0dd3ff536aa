"""A loader that fills the whole image, in the stead of a pull. Runs on the target, on the caller's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rfork.errors import RforkError
from rfork.fork.digests import Digests, Giving
from rfork.fork.pulse import Pulse
from rfork.fork.schedule import Schedule
from rfork.fork.sources import Sources
from rfork.image.board import ChunkBoard
from rfork.image.manifest import Manifest
from rfork.logs import logger
from rfork.storage.base import name_of
from rfork.wire import StorageRead

log = logger(__name__)

LOOK_S = 0.25

LoadWhole = Callable[[StorageRead], Manifest]
"""Fills the image by a loader that this instance offered; raises RforkError kinds where that failed."""


class Whole:
    """Runs the loader that the planner elected this instance for; it writes every byte itself."""

    def __init__(
        self,
        board: ChunkBoard,
        schedule: Schedule,
        digests: Digests,
        sources: Sources,
        giving: Giving,
        load_whole: LoadWhole,
        changed: threading.Condition,
        identity: tuple[str, str],
    ) -> None:
        """`changed` is the puller's lock and its bell; `identity` this instance's id and host."""
        self.bytes_read = 0
        """Bytes that the loader left."""
        self._board = board
        self._schedule = schedule
        self._digests = digests
        self._sources = sources
        self._giving = giving
        self._load_whole = load_whole
        self._changed = changed
        self._identity = identity

    def load(self, read: StorageRead) -> None:
        """Fill the image, or keep the fault for the planner. No thread but this one writes meanwhile."""
        name, size = name_of(read.kind, read.uri), self._board.chunks.image_bytes
        instance_id, host = self._identity
        log.info("loading for all that wait", storage=name)
        with self._changed:
            self._sources.retire_all()
            retired = self._sources.take_retired()
        for feed in retired:
            feed.close()
        with self._changed:
            while self._schedule.in_flight:
                self._changed.wait(LOOK_S)
            self._digests.drop_all("a loader writes them anew")
            self._giving.say_reading(Pulse().at)
        try:
            manifest = self._load_whole(read)
        except RforkError as error:
            with self._changed:
                self._sources.fail_storage(name, instance_id, error)
            return
        finally:
            self._giving.say_reading(None)
        with self._changed:
            self._digests.learn(manifest)
            for chunk, digest in enumerate(manifest.digests):
                self._board.mark(chunk, digest)
            self._schedule.fill()
            self.bytes_read += size
            self._sources.credit(name, host, read.kind, len(self._board.chunks), size)
