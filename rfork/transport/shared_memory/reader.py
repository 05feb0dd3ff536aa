"""Target side of the shared_memory transport: maps or copies a source's chunks into the image."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rfork.errors import SourceCorrupt, SourceTimeout, SourceUnavailable
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.transport.base import TokenSource
from rfork.transport.same_host import memory_file
from rfork.transport.same_host.client import ConnectionPool
from rfork.transport.same_host.connection import (
    Message,
    UnixSocketConnection,
    close_all,
    get_int,
    get_ints,
    raise_error,
)
from rfork.transport.same_host.memory_file import Descriptor
from rfork.transport.shared_memory.file_layout import FileLayout, FileRun, alignment_request, split_mappable
from rfork.transport.shared_memory.page_remapper import PageRemapper, ReplaceableMemory
from rfork.transport.shared_memory.sealed_chunk import SealedChunk, SealedChunkCache

log = logger(__name__)


class SharedMemoryReader:
    """Reads image ranges from one source of this host. Thread-safe: each concurrent read uses a separate
    connection.

    `maps`: replace pages of the image by pages of the source's files.
    """

    def __init__(
        self,
        connections: ConnectionPool,
        image: Image,
        token: TokenSource,
        chunk_cache: SealedChunkCache,
        *,
        maps: bool,
    ) -> None:
        self._connections = connections
        self._image = image
        self._token = token
        self._chunk_cache = chunk_cache
        self._memory = ReplaceableMemory(image)
        self._remapper = PageRemapper()
        self._maps = maps

    def read(self, begin: int, end: int, deadline: float) -> None:
        """Fill image range `[begin, end)` with the source's bytes; raises as `Reader.read`.

        Raises ValueError for a range outside the image.
        """
        chunks, size = self._image.layout.chunks, self._image.layout.image_bytes
        if not 0 <= begin <= end <= size:
            raise ValueError(f"[{begin}, {end}) is not within the image's {size} bytes")
        for chunk in chunks.covering(begin, end):
            first, last = chunks[chunk]
            self._read_chunk(chunk, max(begin, first), min(end, last), deadline)

    def set_rate_limit(self, rate: int | None) -> None:
        """Does nothing: the source throttles. See `Reader.set_rate_limit`."""

    def close(self) -> None:
        """Close all connections; reads in progress raise SourceUnavailable. Mapped memory stays valid."""
        self._connections.close()
        self._chunk_cache.reader_closed()

    def _read_chunk(self, chunk: int, begin: int, end: int, deadline: float) -> None:
        first, last = self._image.layout.chunks[chunk]
        mappable = self._memory.remappable_ranges(first, last) if self._maps else []
        with self._connections.lease(deadline) as connection:
            while begin < end:
                request: dict[str, str | int | list[int]] = {
                    "token": self._token(),
                    "begin": begin,
                    "end": end,
                }
                if mappable:
                    request["alignment"] = alignment_request(first, mappable)
                connection.send(request, deadline=self._connections.reply_deadline(deadline))
                message, descriptor = self._receive_reply(connection, deadline)
                if "sealed" in message:
                    sealed = _sealed(message, descriptor, begin, end)
                    self._receive(sealed, begin, end, mappable)
                    if (begin, end) == (first, last) == (sealed.layout.begin, sealed.layout.end):
                        self._chunk_cache.put(chunk, sealed)
                    return
                begin = self._receive_piece(connection, message, descriptor, begin, end)

    def _receive_reply(self, connection: UnixSocketConnection, deadline: float) -> tuple[Message, Descriptor]:
        """Return the source's reply and its descriptor."""
        while True:
            message, descriptors = connection.receive(self._connections.reply_deadline(deadline))
            if len(descriptors) == 1:
                return message, Descriptor(descriptors[0])
            close_all(descriptors)
            raise_error(message)
            if descriptors or "wait" not in message:
                raise SourceCorrupt("the source's reply has no memory file")
            if time.monotonic() >= deadline:
                raise SourceTimeout("the source was too slow: the read's deadline has passed")

    def _receive(self, sealed: SealedChunk, begin: int, end: int, mappable: Sequence[FileRun]) -> None:
        """Map image range `[begin, end)` where possible, and copy the rest."""
        file_runs = list(sealed.layout.runs(begin, end))
        pages, copied = split_mappable(_within(mappable, begin, end), file_runs)
        for part in pages:
            try:
                self._remapper.replace(part.address, part.length, sealed.descriptor.number, part.file_offset)
            except OSError as error:
                log.debug("mapping failed, copying instead", bytes=part.length, reason=str(error))
                copied.append(FileRun(part.begin, part.file_offset, part.length))
        for run in copied:
            memory_file.fill(self._image, run.begin, run.begin + run.length, sealed.descriptor.number, run.file_offset)

    def _receive_piece(
        self, connection: UnixSocketConnection, message: Message, descriptor: Descriptor, begin: int, end: int
    ) -> int:
        """Copy a part of the range; return the start of the rest."""
        until = get_int(message, "end")
        if get_int(message, "begin") != begin or not begin < until <= end:
            raise SourceCorrupt(f"the source sent a part outside [{begin}, {end})")
        try:
            memory_file.fill(self._image, begin, until, descriptor.number, get_int(message, "piece"))
        except SourceCorrupt:
            if not connection.is_idle:
                raise SourceUnavailable("the source closed the connection and withdrew its data") from None
            raise
        return until


def _sealed(message: Message, descriptor: Descriptor, begin: int, end: int) -> SealedChunk:
    """Validate the source's reply. Raises SourceCorrupt."""
    first, last = get_int(message, "begin"), get_int(message, "end")
    if not first <= begin < end <= last:
        raise SourceCorrupt(f"the source sent [{first}, {last}) instead of [{begin}, {end})")
    try:
        layout = FileLayout.from_message(first, last, get_ints(message, "sealed"))
    except ValueError as error:
        raise SourceCorrupt(f"the source sent a chunk with an invalid layout: {error}") from None
    return SealedChunk.from_fd(descriptor, layout)


def _within(runs: Sequence[FileRun], begin: int, end: int) -> list[FileRun]:
    """Return the parts of memory runs within image range `[begin, end)`."""
    parts: list[FileRun] = []
    for run in runs:
        first, last = max(run.begin, begin), min(run.begin + run.length, end)
        if first < last:
            parts.append(FileRun(first, run.file_offset + first - run.begin, last - first))
    return parts
