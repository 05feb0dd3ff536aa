"""The source side of the shared_memory transport: chunks in sealed memory files, given by descriptor.

A file is made when the first reader asks for its chunk, and kept for the next ones for as long as the
weights stay the same and memory is not short, however long nobody asks: a target that maps it holds the
memory anyway, and a file that was dropped would be made once more beside it. So beside the image itself the
source has up to one more copy of it, which is that of all its targets, and counts as the source's memory. The
source's own pages are not put in place of by the files': it serves meanwhile, and a write of its own between
the copy and the exchange would be lost. Where memory is short, for chunks beyond those that may be kept, and
to those who want to copy, bytes are given by pieces through one small file for each connection, which is
empty again when that ends.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Iterator
from typing import Final

from rfork.errors import LeaseRejected, SourceBusy, SourceCorrupt, SourceWeightsChanged
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.settings import InstanceSettings
from rfork.transport.base import AccessGate, Endpoint, StatelessExporter
from rfork.transport.shared_memory.chunk_cache import SealedChunkCache
from rfork.transport.shared_memory.file_layout import FileLayout
from rfork.transport.shared_memory.memfd import Descriptor, SealedChunk, memory_file, write
from rfork.transport.shared_memory.memory_budget import MemoryBudget, fits_in_memory
from rfork.transport.shared_memory.protocol import ReplyStream, SharedMemoryRequest
from rfork.transport.shared_memory.remap import PageRemapper
from rfork.transport.unix_socket.connection import UnixSocketConnection, close_all
from rfork.transport.unix_socket.messages import encode_error
from rfork.transport.unix_socket.server import LocalServer

log = logger(__name__)

NAME: Final = "shared_memory"
SLICE_BYTES: Final = 8 << 20
"""The gate is asked again after at most so many bytes."""
PIECE_BYTES: Final = 2 << 20
"""Bytes of the file that a connection's pieces go through."""
IDLE_S: Final = 60.0
"""Seconds a connection that was admitted may rest between two requests."""
POLL_INTERVAL_S: Final = 15.0
"""Seconds between two looks at whether there is still memory for what is kept."""


class SharedMemoryExporter(StatelessExporter):
    """Serves one image of host memory from construction until `close`. Raises SettingsError."""

    def __init__(self, image: Image, gate: AccessGate, shelf: SealedChunkCache, settings: InstanceSettings) -> None:
        self._image = image
        self._gate = gate
        self._chunk_cache = shelf
        self._stall_s = settings.source_idle_timeout_s
        self._kernel = PageRemapper()
        self._memory_budget = MemoryBudget()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._server = LocalServer(NAME, settings.unix_socket_dir, self._serve, nice=settings.serving_thread_nice)
        shelf.exported(more=1)
        self._keeper = threading.Thread(target=self._cache_loop, name="rfork-shared-memory", daemon=True)
        self._keeper.start()

    def endpoint(self) -> Endpoint:
        """The socket, and what names this host."""
        return Endpoint(NAME, self._server.parameters)

    def close(self) -> None:
        """Cut every reader; what they have mapped stays theirs. Safe to call twice."""
        with self._lock:
            first = not self._closing.is_set()
            self._closing.set()
        self._server.close()
        self._keeper.join()
        if first:
            self._chunk_cache.exported(more=-1)

    def _cache_loop(self) -> None:
        """Let go of what is of weights that are no more, and of all that memory is too short for."""
        while not self._closing.wait(POLL_INTERVAL_S):
            self._chunk_cache.retain_only(self._gate.version_tag())
            while not fits_in_memory(0) and self._chunk_cache.drop_oldest():
                pass

    # -- on a thread for each connection ---------------------------------------------------------------

    def _serve(self, connection: UnixSocketConnection) -> None:
        talk = ReplyStream(connection, self._stall_s)
        try:
            self._serve_requests(connection, talk)
        finally:
            # First cut: who still reads the piece must not find it empty, and the connection well.
            connection.abort()
            talk.end()

    def _serve_requests(self, connection: UnixSocketConnection, talk: ReplyStream) -> None:
        timeout_s = self._stall_s
        while True:
            message, descriptors = connection.receive(time.monotonic() + timeout_s)
            close_all(descriptors)
            try:
                request = SharedMemoryRequest(message, self._image)
                fork_id = self._gate.authorize(request.token, request.begin, request.end)
                if not self._server.acquire_slot(connection, fork_id):
                    talk.send_reply(encode_error(SourceBusy("all slots are taken")))
                    return
                timeout_s = IDLE_S
                self._respond(request, fork_id, talk)
            except (LeaseRejected, SourceBusy, SourceWeightsChanged, SourceCorrupt) as error:
                talk.send_reply(encode_error(error))
            except OSError as error:
                # Out of descriptors or of memory. What is kept for others is the first to go.
                log.warning("a chunk cannot be shared", because=str(error))
                self._chunk_cache.drop_oldest()
                talk.send_reply(encode_error(SourceBusy(f"the source has no room to share a chunk: {error.strerror}")))

    def _respond(self, request: SharedMemoryRequest, fork_id: str, talk: ReplyStream) -> None:
        sealed = self._seal_chunk(request, fork_id, talk) if request.chunk is not None else None
        if sealed is None:
            self._send_piece(request, fork_id, talk)
            return
        # Time has passed: the lease may be over by now, and the weights others.
        with self._gate.read_guard(request.token, request.begin, request.end, _noop):
            if self._gate.version_tag() != sealed.proven:
                raise SourceWeightsChanged("the weights changed while a chunk was shared")
        talk.paid = (0, 0)
        layout = sealed.layout
        talk.send_reply(
            {"sealed": layout.to_message(), "begin": layout.begin, "end": layout.end},
            sealed.descriptor.number,
        )

    def _seal_chunk(self, request: SharedMemoryRequest, fork_id: str, talk: ReplyStream) -> SealedChunk | None:
        """The whole chunk in a file; None where it is not to be had, or to be made, in one."""
        chunk = request.chunk
        if chunk is None:
            return None
        begin, end = self._image.layout.chunks[chunk]
        try:
            self._gate.authorize(request.token, begin, end)
        except SourceBusy:
            return None
        can_make = request.maps and fits_in_memory(end - begin) and not self._chunk_cache.full()
        if self._chunk_cache.find(chunk) is None and not can_make:
            return None
        # Whatever part was asked for: who has the file has the chunk.
        self._charge_bandwidth(begin, end, fork_id, talk)
        with self._chunk_cache.building(chunk, talk.keepalive):
            found = self._is_verified(chunk, request.token, talk)
            if found is not None or not request.maps or self._chunk_cache.full():
                return found
            layout = FileLayout.requested(begin, end, request.layout_request)
            # Asked only now: meanwhile others may have taken what was free.
            with self._memory_budget.reserve(layout.size, fits_in_memory) as has:
                made = self._build(layout, request.token, talk) if has else None
            if made is not None:
                self._chunk_cache.keep(chunk, made)
            return made

    def _is_verified(self, chunk: int, token: str, talk: ReplyStream) -> SealedChunk | None:
        """The chunk from the shelf, if it has the bytes that the image has now."""
        found = self._chunk_cache.find(chunk)
        if found is None:
            return None
        etag = self._gate.version_tag()
        if found.proven == etag:
            return found
        if not found.proven and self._matches_image(found, token, talk):
            if self._gate.version_tag() != etag:
                raise SourceWeightsChanged("the weights changed while a chunk was compared")
            found.proven = etag
            return found
        self._chunk_cache.drop(chunk)
        return None

    def _matches_image(self, sealed: SealedChunk, token: str, talk: ReplyStream) -> bool:
        """Whether what was received has the bytes that the image has here."""
        for begin, end in _slices(sealed.layout.begin, sealed.layout.end):
            with self._reading(token, begin, end):
                if not sealed.content_equals(self._image, begin, end, self._kernel):
                    return False
            talk.keepalive()
        return True

    @contextlib.contextmanager
    def _reading(self, token: str, begin: int, end: int) -> Iterator[None]:
        """What touches the image's memory: not after a fence, nor after `close`."""
        with self._gate.read_guard(token, begin, end, _noop), self._server.memory_access():
            yield

    def _build(self, layout: FileLayout, token: str, talk: ReplyStream) -> SealedChunk:
        file = self._file()
        etag = self._gate.version_tag()
        for begin, end in _slices(layout.begin, layout.end):
            with self._reading(token, begin, end), self._image.readable(begin, end) as views:
                write(file, layout, begin, views)
            talk.keepalive()
        if self._gate.version_tag() != etag:
            raise SourceWeightsChanged("the weights changed while a chunk was copied")
        made = SealedChunk.create(file, layout)
        made.proven = etag
        return made

    def _file(self, *, sealable: bool = True) -> Descriptor:
        """A new memory file; what was made longest ago makes room for it where that is needed."""
        while True:
            try:
                return memory_file(sealable=sealable)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._chunk_cache.drop_oldest():
                    raise

    def _send_piece(self, request: SharedMemoryRequest, fork_id: str, talk: ReplyStream) -> None:
        """Some bytes from the request's begin on, in a file that the connection's next piece overwrites."""
        begin = request.begin
        max_bytes = min(request.end - begin, PIECE_BYTES)
        # A chunk that was paid for, and then was not to be had as a file, is not paid for twice.
        first, last = talk.paid
        end = (
            min(begin + max_bytes, last)
            if first <= begin < last
            else begin + self._gate.acquire_bytes(max_bytes, fork_id)
        )
        talk.paid = (end, last)
        piece = talk.piece = talk.piece or self._file(sealable=False)
        with self._reading(request.token, begin, end), self._image.readable(begin, end) as views:
            write(piece, FileLayout(begin, end, (begin,), (0,)), begin, views)
        talk.send_reply({"piece": 0, "begin": begin, "end": end}, piece.number)

    def _charge_bandwidth(self, begin: int, end: int, fork_id: str, talk: ReplyStream) -> None:
        """Wait for the budget of a chunk, as it is given at once, and tell the reader meanwhile."""
        at = begin
        while at < end:
            at += self._gate.acquire_bytes(min(end - at, SLICE_BYTES), fork_id)
            talk.keepalive()
        talk.paid = (begin, end)


def _slices(begin: int, end: int) -> Iterator[tuple[int, int]]:
    for at in range(begin, end, SLICE_BYTES):
        yield at, min(at + SLICE_BYTES, end)


def _noop() -> None:
    """To cut a read that copies a few bytes and waits for nobody: it ends at once by itself."""
