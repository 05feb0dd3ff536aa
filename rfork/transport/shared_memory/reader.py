"""The target side of the shared_memory transport: a source's chunks, mapped or copied into the image."""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence

from rfork.errors import SourceCorrupt, SourceGone, SourceStalled, TargetError
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.transport.base import TokenSource
from rfork.transport.same_host.connection import Connection, close_all
from rfork.transport.same_host.dialling import Connections
from rfork.transport.same_host.messages import Message, number_in, numbers_in, raise_problem
from rfork.transport.shared_memory.own_memory import OwnMemory
from rfork.transport.shared_memory.pages import Kernel
from rfork.transport.shared_memory.placement import Layout, Run, split, wishes_of
from rfork.transport.shared_memory.sealed import Descriptor, Sealed, read
from rfork.transport.shared_memory.shelf import Shelf

log = logger(__name__)


class SharedMemoryReader:
    """Reads image ranges from one source of this host. Thread-safe: each read has a connection of its own.

    `maps`: whether pages of the source's files are put in place of the image's. `stall_s`: seconds without
    a word after which a source counts as stalled.
    """

    def __init__(
        self,
        connections: Connections,
        image: Image,
        token: TokenSource,
        shelf: Shelf,
        *,
        maps: bool,
        stall_s: float,
    ) -> None:
        self._connections = connections
        self._image = image
        self._token = token
        self._shelf = shelf
        self._memory = OwnMemory(image)
        self._kernel = Kernel()
        self._maps = maps
        self._stall_s = stall_s

    def read(self, begin: int, end: int, deadline: float) -> None:
        """Have image range `[begin, end)` hold the source's bytes; raises as `Reader.read` says.

        A range outside the image is a ValueError.
        """
        chunks, size = self._image.layout.chunks, self._image.layout.image_bytes
        if not 0 <= begin <= end <= size:
            raise ValueError(f"[{begin}, {end}) is not within the image's {size} bytes")
        for chunk in chunks.covering(begin, end):
            first, last = chunks[chunk]
            self._read_of_chunk(chunk, max(begin, first), min(end, last), deadline)

    def hold_to(self, rate: int | None) -> None:
        """Nothing to do: the source gives as slowly as it likes. See `Reader.hold_to`."""

    def close(self) -> None:
        """Drop all connections; reads under way raise SourceGone. What is mapped stays."""
        self._connections.close()
        self._shelf.reader_closed()

    def _read_of_chunk(self, chunk: int, begin: int, end: int, deadline: float) -> None:
        first, last = self._image.layout.chunks[chunk]
        mappable = self._memory.mappable(first, last) if self._maps else []
        with self._connections.borrowed(deadline) as connection:
            while begin < end:
                request: dict[str, str | int | list[int]] = {
                    "token": self._token(),
                    "begin": begin,
                    "end": end,
                }
                if mappable:
                    request["wishes"] = wishes_of(first, mappable)
                connection.send(request, deadline=self._until(deadline))
                message, descriptor = self._answer(connection, deadline)
                if "sealed" in message:
                    sealed = _sealed(message, descriptor, begin, end)
                    self._take(sealed, begin, end, mappable)
                    if (begin, end) == (first, last) == (sealed.layout.begin, sealed.layout.end):
                        self._shelf.keep(chunk, sealed)
                    return
                begin = self._take_piece(connection, message, descriptor, begin, end)

    def _answer(self, connection: Connection, deadline: float) -> tuple[Message, Descriptor]:
        """The source's answer, and the one descriptor that comes along."""
        while True:
            message, descriptors = connection.receive(self._until(deadline))
            if len(descriptors) == 1:
                return message, Descriptor(descriptors[0])
            close_all(descriptors)
            raise_problem(message)
            if descriptors or "wait" not in message:
                raise SourceCorrupt("the source's answer has no memory file")
            if time.monotonic() >= deadline:
                raise SourceStalled("the source was too slow: the read's deadline has passed")

    def _until(self, deadline: float) -> float:
        return min(deadline, time.monotonic() + self._stall_s)

    def _take(self, sealed: Sealed, begin: int, end: int, mappable: Sequence[Run]) -> None:
        """Map what can be mapped of image range `[begin, end)`, and copy the rest."""
        filed = list(sealed.layout.runs(begin, end))
        pages, copied = split(_within(mappable, begin, end), filed)
        for part in pages:
            try:
                self._kernel.replace(part.address, part.length, sealed.descriptor.number, part.place)
            except OSError as error:
                log.debug("copied, as it cannot be mapped", bytes=part.length, because=str(error))
                copied.append(Run(part.begin, part.place, part.length))
        for run in copied:
            self._copy(sealed.descriptor, run)

    def _take_piece(
        self, connection: Connection, message: Message, descriptor: Descriptor, begin: int, end: int
    ) -> int:
        """Copy a part of the range; returns where the rest begins."""
        until = number_in(message, "end")
        if number_in(message, "begin") != begin or not begin < until <= end:
            raise SourceCorrupt(f"the source gives another part than one of [{begin}, {end})")
        try:
            self._copy(descriptor, Run(begin, number_in(message, "piece"), until - begin))
        except SourceCorrupt:
            if not connection.quiet:
                raise SourceGone("the source ended the connection, and took back what it gave") from None
            raise
        return until

    def _copy(self, descriptor: Descriptor, run: Run) -> None:
        with self._image.writable(run.begin, run.begin + run.length) as views:
            try:
                read(descriptor, run.place, views)
            except (OSError, OverflowError) as error:
                if isinstance(error, OSError) and error.errno == errno.EFAULT:
                    raise TargetError("the target's own memory cannot be written") from error
                raise SourceCorrupt(f"the source's memory file cannot be read: {error}") from None


def _sealed(message: Message, descriptor: Descriptor, begin: int, end: int) -> Sealed:
    """What the source gave, once it is known to be what it should. Raises SourceCorrupt."""
    first, last = number_in(message, "begin"), number_in(message, "end")
    if not first <= begin < end <= last:
        raise SourceCorrupt(f"the source gives [{first}, {last}), and not [{begin}, {end})")
    try:
        layout = Layout.of(first, last, numbers_in(message, "sealed"))
    except ValueError as error:
        raise SourceCorrupt(f"the source gives a chunk that cannot be found: {error}") from None
    return Sealed.received(descriptor, layout)


def _within(runs: Sequence[Run], begin: int, end: int) -> list[Run]:
    """The parts of runs of memory that lie in image range `[begin, end)`."""
    found: list[Run] = []
    for run in runs:
        first, last = max(run.begin, begin), min(run.begin + run.length, end)
        if first < last:
            found.append(Run(first, run.place + first - run.begin, last - first))
    return found
