"""This instance's own storage as one source of its fork, beside its peers.

Runs on the target, once the planner elected it to read some chunks for all that wait behind it. Every
chunk can be read at once; what a peer's feed learns from its source, this one finds in the files.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rfork.errors import RforkError, SourceGone, StorageError
from rfork.fork.blocks import Blocks
from rfork.fork.giver import Listener
from rfork.fork.reading import Reading
from rfork.image.digest import digest_bytes
from rfork.image.host_memory import copy_block
from rfork.image.memory import Image
from rfork.image.ranges import Range
from rfork.settings import StorageSettings
from rfork.storage.base import Storage, name_of
from rfork.wire import StorageRead


class StorageFeed:
    """One storage of this instance, read by the puller's workers; see `rfork.fork.giver.Giver`.

    `find` gives the storage that the plan names; raises StorageError where there is none. No deadline
    ends its reads: they end when they give nothing for `stall_s` seconds, or when the feed is closed.
    """

    relayed = False

    def __init__(
        self,
        read: StorageRead,
        find: Callable[[StorageRead], Storage],
        image: Image,
        listener: Listener,
        stall_s: float,
        settings: StorageSettings,
        *,
        instance_id: str,
        host: str,
        reading: Reading | None = None,
    ) -> None:
        self.source_id = self.address = name_of(read.kind, read.uri)
        self.instance_id = instance_id
        self.host = host
        self.transport: str = read.kind
        self.reading = reading or Reading()
        self.advanced_at = time.monotonic()
        self._plan = read
        self._find = find
        self._image = image
        self._listener = listener
        self._stall_s = stall_s
        self._storage: Storage | None = None
        self._blocks = Blocks(self.address, settings)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rfork-feed-storage", daemon=True)

    @property
    def read_at(self) -> float | None:
        """See `Giver.read_at`."""
        return self._blocks.advanced_at

    @property
    def gave_at(self) -> float | None:
        """When the last block came; None: none has."""
        return self._blocks.gave_at

    def start(self) -> None:
        """Begin on the feed's own thread."""
        self._thread.start()

    def read(self, begin: int, end: int, deadline: float) -> None:
        """Fill image range `[begin, end)`. A disk that is slow is no reason to stop at the deadline."""
        storage = self._storage
        if storage is None:
            raise SourceGone(f"{self.address}: is not read yet")
        for at, block in self._blocks.read(storage, begin, end, self._look_ahead):
            with self._image.writable(at, at + block.nbytes) as views:
                copy_block(block, views)
        self.reading.came(end - begin)

    def _look_ahead(self) -> tuple[list[Range], list[Range]]:
        """What is read of the storage now, and what is read next, as far as it is worth to look."""
        chunks = self._image.layout.chunks
        taken, coming = self._listener.upcoming(self, -(-self._blocks.ahead_bytes // chunks.chunk_size))
        return [chunks[chunk] for chunk in taken], [chunks[chunk] for chunk in coming]

    def check(self, now: float, *, starved: bool) -> RforkError | None:
        """A read that gives nothing for so long hangs: somebody else has to read."""
        idle = self._blocks.idle_s(now)
        if idle > self._stall_s:
            return StorageError(f"{self.address}: gave nothing for {idle:.1f} s")
        return None

    def close(self) -> None:
        """Reads under way end at once; what hangs is left behind. The files stay open."""
        self._closed.set()
        self._blocks.close()
        self.reading.end(self.transport)

    def join(self) -> None:
        """Wait until the feed's thread has ended; after `close`."""
        self._thread.join()

    def _run(self) -> None:
        try:
            storage = self._storage = self._find(self._plan)
            if storage.manifest is not None:
                self._listener.on_manifest(self, storage.manifest)
            elif storage.origin is not None:
                self._compare(storage, storage.origin)
            else:
                raise StorageError(f"{self.address}: neither its manifest nor its origin is known")
            self._listener.on_offer(self, ((0, len(self._image.layout.chunks)),))
        except RforkError as error:
            self._fail(error)
        except Exception as error:  # a bug must end the feed, not hang the fork
            self._fail(StorageError(f"{self.address}: {type(error).__name__}: {error}"))

    def _compare(self, storage: Storage, origin: str) -> None:
        """Find each chunk that this fork holds in the files, before anything of them is given on."""
        compared: dict[int, bytes] = {}
        left = self._listener.held()
        while True:
            differs = next(
                (chunk for chunk, digest in left.items() if not self._holds(storage, chunk, digest)), None
            )
            compared |= left
            # What came meanwhile, from a peer that still gives, is compared too.
            left = self._listener.on_files(self, origin, compared, agrees=differs is None)
            if not left:
                return

    def _fail(self, error: RforkError) -> None:
        if not self._closed.is_set():
            self._listener.on_failure(self, error)

    def _holds(self, storage: Storage, chunk: int, digest: bytes) -> bool:
        """Whether the files hold a chunk of this digest; reads it beside the image."""
        begin, end = self._image.layout.chunks[chunk]
        scratch = memoryview(bytearray(end - begin))
        for at, block in self._blocks.read(storage, begin, end):
            scratch[at - begin : at - begin + block.nbytes] = block
        return digest_bytes([scratch]) == digest
