"""This instance's own storage as one source of its fork, beside its peers.

Runs on the target, once the planner elected it to read some chunks for all that wait behind it. Every
chunk can be read at once; what a peer's feed learns from its source, this one finds in the files.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rfork.errors import DeadlinePassed, RforkError, SourceGone, StorageError
from rfork.fork.giver import Listener
from rfork.image.chunks import MIB
from rfork.image.digest import digest_bytes
from rfork.image.memory import Image
from rfork.storage.base import Storage, name_of
from rfork.wire import StorageRead

BLOCK_BYTES = 16 * MIB
"""One read; between two the feed may be closed. Smaller ones reach less of a disk's speed."""


class StorageFeed:
    """One storage of this instance, read by the puller's workers; see `rfork.fork.giver.Giver`.

    `find` gives the storage that the plan names; raises StorageError where there is none. `deadline`
    is the fork's own, a `time.monotonic()` value.
    """

    def __init__(
        self,
        read: StorageRead,
        find: Callable[[StorageRead], Storage],
        image: Image,
        listener: Listener,
        deadline: float,
        *,
        instance_id: str,
        host: str,
    ) -> None:
        self.source_id = self.address = name_of(read.kind, read.uri)
        self.instance_id = instance_id
        self.host = host
        self.transport: str = read.kind
        self.loading = True
        self.advanced_at = time.monotonic()
        self._plan = read
        self._find = find
        self._image = image
        self._listener = listener
        self._deadline = deadline
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rfork-feed-storage", daemon=True)

    def start(self) -> None:
        """Begin on the feed's own thread."""
        self._thread.start()

    def read(self, begin: int, end: int, deadline: float) -> None:
        """Fill image range `[begin, end)`. A disk that is slow is no reason to stop before the fork's end."""
        storage = self._find(self._plan)
        for at in range(begin, end, BLOCK_BYTES):
            self._check_open()
            until = min(at + BLOCK_BYTES, end)
            with self._image.writable(at, until) as views:
                storage.read(at, until, views)
            self.advanced_at = time.monotonic()

    def check(self, now: float, *, starved: bool) -> RforkError | None:
        """A read of a file ends or fails by itself: it is never given up."""
        return None

    def close(self) -> None:
        """Reads under way end at their next block; the files stay open."""
        self._closed.set()

    def join(self) -> None:
        """Wait until the feed's thread has ended; after `close`."""
        self._thread.join()

    def _run(self) -> None:
        try:
            storage = self._find(self._plan)
            if storage.manifest is not None:
                self._listener.on_manifest(self, storage.manifest)
            elif storage.origin is not None:
                agrees = all(self._holds(storage, *held) for held in self._listener.sample().items())
                self._listener.on_files(self, storage.origin, agrees=agrees)
            else:
                raise StorageError(f"{self.address}: neither its manifest nor its origin is known")
            self._listener.on_offer(self, ((0, len(self._image.layout.chunks)),))
        except RforkError as error:
            self._fail(error)
        except Exception as error:  # a bug must end the feed, not hang the fork
            self._fail(StorageError(f"{self.address}: {type(error).__name__}: {error}"))

    def _fail(self, error: RforkError) -> None:
        if not self._closed.is_set():
            self._listener.on_failure(self, error)

    def _holds(self, storage: Storage, chunk: int, digest: bytes) -> bool:
        """Whether the files hold a chunk of this digest; reads it beside the image."""
        begin, end = self._image.layout.chunks[chunk]
        scratch = memoryview(bytearray(end - begin))
        for at in range(begin, end, BLOCK_BYTES):
            self._check_open()
            until = min(at + BLOCK_BYTES, end)
            storage.read(at, until, [scratch[at - begin : until - begin]])
        return digest_bytes([scratch]) == digest

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise SourceGone(f"{self.address}: is read no more")
        if time.monotonic() >= self._deadline:
            raise DeadlinePassed(f"{self.address}: the fork's deadline passed")
