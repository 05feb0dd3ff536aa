"""Source side of the shared_memory transport: serves chunks in sealed memory files, passed as descriptors.

A file is created when the first reader requests its chunk. It is cached as long as the weights are unchanged
and memory is not short, even if idle: targets that map it keep its memory anyway, and a dropped file would be
created again as another copy. So the source uses memory for up to one more copy of the image, shared by all
its targets. The source's own pages are not replaced by the file's: a write between the copy and the
replacement would be lost.

Some bytes are sent in pieces through a small file per connection, which is emptied when the connection
closes: if memory is short, for chunks beyond the cache limit, and for readers that copy.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Iterator
from typing import Final

from rfork.errors import SourceBusy, SourceCorrupt, SourceWeightsChanged
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.settings import InstanceSettings
from rfork.thread_priority import SERVING_THREAD_NICE
from rfork.transport.base import AccessGate, Endpoint, StatelessExporter
from rfork.transport.same_host.connection import (
    Message,
    UnixSocketConnection,
    encode_error,
    get_int,
    get_ints,
    get_str,
)
from rfork.transport.same_host.memory_file import Descriptor, memory_file
from rfork.transport.same_host.server import LocalServer
from rfork.transport.shared_memory.file_layout import FileLayout
from rfork.transport.shared_memory.memory_budget import MemoryBudget, fits_in_memory
from rfork.transport.shared_memory.sealed_chunk import SealedChunk, SealedChunkCache, write

NAME: Final = "shared_memory"
SLICE_BYTES: Final = 8 << 20
"""Maximum bytes between two checks of the gate."""
PIECE_BYTES: Final = 2 << 20
"""Size of the file for a connection's pieces."""
POLL_INTERVAL_S: Final = 15.0
"""Interval of the checks that enough memory is left for cached chunks."""
KEEPALIVE_INTERVAL_S: Final = 0.5
"""Maximum interval between messages, so that a throttled reader does not consider the source stalled."""

log = logger(__name__)


class SharedMemoryExporter(StatelessExporter):
    """Serves one image in host memory from construction until `close`. Raises SettingsError."""

    def __init__(
        self, image: Image, gate: AccessGate, chunk_cache: SealedChunkCache, settings: InstanceSettings
    ) -> None:
        self._image = image
        self._gate = gate
        self._chunk_cache = chunk_cache
        self._idle_timeout_s = settings.source_idle_timeout_s
        self._memory_budget = MemoryBudget()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._server = LocalServer(NAME, settings.unix_socket_dir, self._serve, nice=SERVING_THREAD_NICE)
        chunk_cache.change_exporters(more=1)
        self._cache_thread = threading.Thread(target=self._cache_loop, name="rfork-shared-memory", daemon=True)
        self._cache_thread.start()

    def endpoint(self) -> Endpoint:
        """Return the socket and the host's identity."""
        return Endpoint(NAME, self._server.parameters)

    def close(self) -> None:
        """Disconnect every reader; their mappings stay valid. Idempotent."""
        with self._lock:
            is_first = not self._closing.is_set()
            self._closing.set()
        self._server.close()
        self._cache_thread.join()
        if is_first:
            self._chunk_cache.change_exporters(more=-1)

    def _cache_loop(self) -> None:
        """Drop chunks of outdated weights, and the oldest chunks while memory is short."""
        while not self._closing.wait(POLL_INTERVAL_S):
            self._chunk_cache.retain_only(self._gate.version_tag())
            while not fits_in_memory(0) and self._chunk_cache.drop_oldest():
                pass

    # -- on one thread per connection ------------------------------------------------------------------

    def _serve(self, connection: UnixSocketConnection) -> None:
        replies = _ReplyStream(connection, self._idle_timeout_s)
        try:
            self._server.serve_requests(
                connection, lambda message: self._respond(message, connection, replies), self._idle_timeout_s
            )
        finally:
            # Disconnect first: a reader must not find an empty piece on an open connection.
            connection.abort()
            replies.end()

    def _respond(self, message: Message, connection: UnixSocketConnection, replies: _ReplyStream) -> bool:
        try:
            request = _Request(message, self._image)
            fork_id = self._gate.authorize(request.token, request.begin, request.end)
            if not self._server.acquire_slot(connection, fork_id):
                raise SourceBusy("no free connection slot")
            sealed = self._seal_chunk(request, fork_id, replies)
            if sealed is None:
                self._send_piece(request, fork_id, replies)
            else:
                self._send_sealed(sealed, request, replies)
        except SourceCorrupt as error:
            replies.send_reply(encode_error(error))
        except OSError as error:
            # Out of descriptors or memory. Cached chunks are the first to be dropped.
            log.warning("cannot share a chunk", reason=str(error))
            self._chunk_cache.drop_oldest()
            raise SourceBusy(f"the source has no memory to share a chunk: {error.strerror}") from None
        return True

    def _send_sealed(self, sealed: SealedChunk, request: _Request, replies: _ReplyStream) -> None:
        # Check again: the lease may have expired and the weights may have changed in the meantime.
        with self._gate.read_guard(request.token, request.begin, request.end, _noop):
            if self._gate.version_tag() != sealed.verified_etag:
                raise SourceWeightsChanged("the weights changed while a chunk was shared")
        replies.charged = (0, 0)
        layout = sealed.layout
        replies.send_reply(
            {"sealed": layout.to_message(), "begin": layout.begin, "end": layout.end},
            sealed.descriptor.number,
        )

    def _seal_chunk(self, request: _Request, fork_id: str, replies: _ReplyStream) -> SealedChunk | None:
        """Return the complete chunk in a sealed file; None if it is not cached and cannot be created."""
        chunk = request.chunk
        if chunk is None:
            return None
        begin, end = self._image.layout.chunks[chunk]
        try:
            self._gate.authorize(request.token, begin, end)
        except SourceBusy:
            return None
        can_make = request.maps and fits_in_memory(end - begin) and not self._chunk_cache.is_full()
        if self._chunk_cache.find(chunk) is None and not can_make:
            return None
        # Charge for the complete chunk, even if a part was requested: the file contains all of it.
        self._charge_bandwidth(begin, end, fork_id, replies)
        with self._chunk_cache.building(chunk, replies.keepalive):
            cached = self._find_verified(chunk, request.token, replies)
            if cached is not None or not request.maps or self._chunk_cache.is_full():
                return cached
            layout = FileLayout.requested(begin, end, request.alignment)
            # Check only now: other requests may have used the free memory in the meantime.
            with self._memory_budget.reserve(layout.size, fits_in_memory) as is_reserved:
                created = self._build(layout, request.token, replies) if is_reserved else None
            if created is not None:
                self._chunk_cache.put(chunk, created)
            return created

    def _find_verified(self, chunk: int, token: str, replies: _ReplyStream) -> SealedChunk | None:
        """Return the cached chunk if its bytes equal the current image."""
        cached = self._chunk_cache.find(chunk)
        if cached is None:
            return None
        etag = self._gate.version_tag()
        if cached.verified_etag == etag:
            return cached
        if not cached.verified_etag and self._matches_image(cached, token, replies):
            if self._gate.version_tag() != etag:
                raise SourceWeightsChanged("the weights changed while a chunk was compared")
            cached.verified_etag = etag
            return cached
        self._chunk_cache.drop(chunk)
        return None

    def _matches_image(self, sealed: SealedChunk, token: str, replies: _ReplyStream) -> bool:
        """Return True if a received chunk has the same bytes as the image."""
        for begin, end in _slices(sealed.layout.begin, sealed.layout.end):
            with self._memory_access(token, begin, end):
                if not sealed.content_equals(self._image, begin, end):
                    return False
            replies.keepalive()
        return True

    @contextlib.contextmanager
    def _memory_access(self, token: str, begin: int, end: int) -> Iterator[None]:
        """Context for access to the image's memory; fails after a fence and after `close`."""
        with self._gate.read_guard(token, begin, end, _noop), self._server.memory_access():
            yield

    def _build(self, layout: FileLayout, token: str, replies: _ReplyStream) -> SealedChunk:
        file = self._file()
        etag = self._gate.version_tag()
        for begin, end in _slices(layout.begin, layout.end):
            with self._memory_access(token, begin, end), self._image.readable(begin, end) as views:
                write(file, layout, begin, views)
            replies.keepalive()
        if self._gate.version_tag() != etag:
            raise SourceWeightsChanged("the weights changed while a chunk was copied")
        created = SealedChunk.create(file, layout)
        created.verified_etag = etag
        return created

    def _file(self, *, sealable: bool = True) -> Descriptor:
        """Create a memory file, dropping the oldest chunks if descriptors run out."""
        while True:
            try:
                return memory_file(sealable=sealable)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._chunk_cache.drop_oldest():
                    raise

    def _send_piece(self, request: _Request, fork_id: str, replies: _ReplyStream) -> None:
        """Send the first bytes of the request in a file that the connection's next piece overwrites."""
        begin = request.begin
        max_bytes = min(request.end - begin, PIECE_BYTES)
        # Do not charge twice for a chunk that was charged but could not be served as a file.
        first, last = replies.charged
        end = (
            min(begin + max_bytes, last)
            if first <= begin < last
            else begin + self._gate.acquire_bytes(max_bytes, fork_id)
        )
        replies.charged = (end, last)
        piece = replies.piece = replies.piece or self._file(sealable=False)
        with self._memory_access(request.token, begin, end), self._image.readable(begin, end) as views:
            write(piece, FileLayout(begin, end, (begin,), (0,)), begin, views)
        replies.send_reply({"piece": 0, "begin": begin, "end": end}, piece.number)

    def _charge_bandwidth(self, begin: int, end: int, fork_id: str, replies: _ReplyStream) -> None:
        """Wait for the egress budget of a complete chunk, sending keep-alives to the reader."""
        charged_end = begin
        while charged_end < end:
            charged_end += self._gate.acquire_bytes(min(end - charged_end, SLICE_BYTES), fork_id)
            replies.keepalive()
        replies.charged = (begin, end)


class _Request:
    """A request for image bytes `[begin, end)`, with the alignment for mapping, if any.

    `chunk` is the chunk that contains them all. Raises SourceCorrupt for a range outside the image.
    """

    def __init__(self, message: Message, image: Image) -> None:
        self.token = get_str(message, "token")
        self.begin, self.end = get_int(message, "begin"), get_int(message, "end")
        if not 0 <= self.begin < self.end <= image.layout.image_bytes:
            raise SourceCorrupt(f"[{self.begin}, {self.end}) is not within the image")
        chunks = image.layout.chunks.covering(self.begin, self.end)
        self.chunk = chunks[0] if len(chunks) == 1 else None
        self.maps = "alignment" in message
        self.alignment = get_ints(message, "alignment") if self.maps else []
        if self.maps and self.chunk is not None:
            try:
                FileLayout.requested(*image.layout.chunks[self.chunk], self.alignment)
            except ValueError as error:
                raise SourceCorrupt(str(error)) from None


class _ReplyStream:
    """Replies to one reader."""

    def __init__(self, connection: UnixSocketConnection, idle_timeout_s: float) -> None:
        self.piece: Descriptor | None = None
        self.charged = (0, 0)
        """Image range that has been charged to the budget but not been sent."""
        self._connection = connection
        self._idle_timeout_s = idle_timeout_s
        self._last_reply_at = time.monotonic()

    def send_reply(self, message: Message, *descriptors: int) -> None:
        """Send a reply. Raises SourceUnavailable or SourceTimeout if the reader disconnected or does not
        read.
        """
        self._last_reply_at = time.monotonic()
        self._connection.send(message, descriptors, deadline=self._last_reply_at + self._idle_timeout_s)

    def keepalive(self) -> None:
        """Make the reader continue to wait."""
        if time.monotonic() - self._last_reply_at >= KEEPALIVE_INTERVAL_S:
            self.send_reply({"wait": 0})

    def end(self) -> None:
        """End the replies and empty the piece, so that a reader cannot keep its memory."""
        if self.piece is not None:
            self.piece.empty()


def _slices(begin: int, end: int) -> Iterator[tuple[int, int]]:
    for at in range(begin, end, SLICE_BYTES):
        yield at, min(at + SLICE_BYTES, end)


def _noop() -> None:
    """Cut a read that copies a few bytes without waiting: it ends immediately anyway."""
