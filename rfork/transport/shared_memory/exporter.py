"""The source side of the shared_memory transport: chunks in sealed memory files, given by descriptor.

A file is made when the first reader asks for its chunk, and kept for the next ones for as long as the
weights stay the same. So beside the image itself the source has up to one more copy of it, which is that of
all its targets: it counts as the source's memory, and is free again once it was wanted by nobody for
`KEPT_S` seconds and no target maps it any more. The source's own pages are not put in place of by the files':
it serves meanwhile, and a write of its own between the copy and the exchange would be lost. Where memory is
short, and to those who want to copy, bytes are given by pieces through one small file for each connection.
"""

from __future__ import annotations

import errno
import threading
import time
from typing import Final

from rfork.errors import LeaseRefused, SourceBusy, SourceChanged, SourceCorrupt
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.settings import Settings
from rfork.transport.base import Endpoint, Gate, Plain
from rfork.transport.same_host.connection import Connection, close_all
from rfork.transport.same_host.messages import Message, number_in, numbers_in, problem_of, text_in
from rfork.transport.same_host.server import LocalServer
from rfork.transport.shared_memory.pages import Kernel
from rfork.transport.shared_memory.placement import Layout
from rfork.transport.shared_memory.room import has_room
from rfork.transport.shared_memory.sealed import Descriptor, Sealed, memory_file, write
from rfork.transport.shared_memory.shelf import Shelf

log = logger(__name__)

NAME: Final = "shared_memory"
SLICE_BYTES: Final = 8 << 20
"""The gate is asked again after at most so many bytes."""
PIECE_BYTES: Final = 2 << 20
"""Bytes of the file that a connection's pieces go through."""
IDLE_S: Final = 60.0
"""Seconds a connection that was admitted may rest between two requests."""
KEPT_S: Final = 60.0
"""Seconds for which chunks are kept that nobody asks for."""
NOTE_S: Final = 0.5
"""A reader hears at least so often that it is held back, and not forgotten."""


class SharedMemoryExporter(Plain):
    """Serves one image of host memory from construction until `close`. Raises SettingsError."""

    def __init__(self, image: Image, gate: Gate, shelf: Shelf, settings: Settings) -> None:
        self._image = image
        self._gate = gate
        self._shelf = shelf
        self._stall_s = settings.stall_s
        self._kernel = Kernel()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._server = LocalServer(NAME, settings.local_sockets, self._serve, nice=settings.giving_nice)
        shelf.exported(more=1)
        self._keeper = threading.Thread(target=self._keep, name="rfork-shared-memory", daemon=True)
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
            self._shelf.exported(more=-1)

    def _keep(self) -> None:
        """Let go of what is wanted no more, or is of weights that are no more."""
        while not self._closing.wait(KEPT_S / 4):
            self._shelf.drop_others(self._gate.etag())
            self._shelf.drop_unused(KEPT_S)

    # -- on a thread for each connection ---------------------------------------------------------------

    def _serve(self, connection: Connection) -> None:
        patience_s = self._stall_s
        talk = _Talk(connection, self._stall_s)
        while True:
            message, descriptors = connection.receive(time.monotonic() + patience_s)
            close_all(descriptors)
            try:
                request = _Request(message, self._image)
                fork_id = self._gate.admit(request.token, request.begin, request.end)
                if not self._server.seat(connection, fork_id):
                    talk.say(problem_of(SourceBusy("all places are taken")))
                    return
                patience_s = IDLE_S
                self._answer(request, fork_id, talk)
            except (LeaseRefused, SourceBusy, SourceChanged, SourceCorrupt) as error:
                talk.say(problem_of(error))
            except OSError as error:
                # Out of descriptors or of memory. What is kept for others is the first to go.
                log.warning("a chunk cannot be shared", because=str(error))
                self._shelf.drop_oldest()
                talk.say(problem_of(SourceBusy(f"the source has no room to share a chunk: {error.strerror}")))

    def _answer(self, request: _Request, fork_id: str, talk: _Talk) -> None:
        sealed = self._sealed(request, fork_id, talk) if request.chunk is not None else None
        if sealed is None:
            self._give_piece(request, fork_id, talk)
            return
        if not request.paid:
            self._pay(request.begin, request.end, fork_id, talk)
        # Time has passed: the lease may be over by now, and the weights others.
        with self._gate.reading(request.token, request.begin, request.end, _nothing):
            if self._gate.etag() != sealed.proven:
                raise SourceChanged("the weights changed while a chunk was shared")
        layout = sealed.layout
        talk.say(
            {"sealed": layout.told(), "begin": layout.begin, "end": layout.end}, sealed.descriptor.number
        )

    def _sealed(self, request: _Request, fork_id: str, talk: _Talk) -> Sealed | None:
        """The whole chunk in a file; None where it is not to be had, or to be made, in one."""
        chunk = request.chunk
        if chunk is None:
            return None
        begin, end = self._image.layout.chunks[chunk]
        try:
            self._gate.admit(request.token, begin, end)
        except SourceBusy:
            return None
        if self._shelf.find(chunk) is None and not (request.maps and has_room(end - begin)):
            return None
        self._pay(request.begin, request.end, fork_id, talk)
        request.paid = True
        with self._shelf.making(chunk):
            found = self._proven(chunk, request.token)
            if found is not None or not request.maps:
                return found
            made = self._made(Layout.wished(begin, end, request.wishes), request.token, talk)
            self._shelf.keep(chunk, made)
            return made

    def _proven(self, chunk: int, token: str) -> Sealed | None:
        """The chunk from the shelf, if it has the bytes that the image has now."""
        found = self._shelf.find(chunk)
        if found is None:
            return None
        begin, end = self._image.layout.chunks[chunk]
        with self._gate.reading(token, begin, end, _nothing):
            etag = self._gate.etag()
            if found.proven == etag:
                return found
            if not found.proven and found.holds_the_bytes_of(self._image, self._kernel):
                found.proven = etag
                return found
        self._shelf.drop(chunk)
        return None

    def _made(self, layout: Layout, token: str, talk: _Talk) -> Sealed:
        file = self._file()
        etag = self._gate.etag()
        for begin in range(layout.begin, layout.end, SLICE_BYTES):
            end = min(begin + SLICE_BYTES, layout.end)
            with self._gate.reading(token, begin, end, _nothing), self._image.readable(begin, end) as views:
                write(file, layout, begin, views)
            talk.note()
        if self._gate.etag() != etag:
            raise SourceChanged("the weights changed while a chunk was copied")
        made = Sealed.made(file, layout)
        made.proven = etag
        return made

    def _file(self) -> Descriptor:
        """A new memory file; what was made longest ago makes room for it where that is needed."""
        while True:
            try:
                return memory_file()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._shelf.drop_oldest():
                    raise

    def _give_piece(self, request: _Request, fork_id: str, talk: _Talk) -> None:
        """Some bytes from the request's begin on, in a file that the connection's next piece overwrites."""
        begin = request.begin
        most = min(request.end - begin, PIECE_BYTES)
        end = begin + (most if request.paid else self._gate.grant(most, fork_id))
        piece = talk.piece = talk.piece or self._file()
        with (
            self._gate.reading(request.token, begin, end, _nothing),
            self._image.readable(begin, end) as views,
        ):
            write(piece, Layout(begin, end, (begin,), (0,)), begin, views)
        talk.say({"piece": 0, "begin": begin, "end": end}, piece.number)

    def _pay(self, begin: int, end: int, fork_id: str, talk: _Talk) -> None:
        """Wait for the budget of a range, as it is given at once, and tell the reader meanwhile."""
        while begin < end:
            begin += self._gate.grant(min(end - begin, SLICE_BYTES), fork_id)
            talk.note()


class _Request:
    """What a reader asks for: image bytes `[begin, end)`, and how it would like to have them.

    `chunk` is the one that holds them all. Raises SourceCorrupt where they are not in the image.
    """

    def __init__(self, message: Message, image: Image) -> None:
        self.token = text_in(message, "token")
        self.begin, self.end = number_in(message, "begin"), number_in(message, "end")
        if not 0 <= self.begin < self.end <= image.layout.image_bytes:
            raise SourceCorrupt(f"[{self.begin}, {self.end}) is not within the image")
        chunks = image.layout.chunks.covering(self.begin, self.end)
        self.chunk = chunks[0] if len(chunks) == 1 else None
        self.maps = "wishes" in message
        self.wishes = numbers_in(message, "wishes") if self.maps else []
        self.paid = False
        """Whether the budget was asked for all of it."""
        if self.maps and self.chunk is not None:
            try:
                Layout.wished(*image.layout.chunks[self.chunk], self.wishes)
            except ValueError as error:
                raise SourceCorrupt(str(error)) from None


class _Talk:
    """What is said to one reader."""

    def __init__(self, connection: Connection, stall_s: float) -> None:
        self.piece: Descriptor | None = None
        self._connection = connection
        self._stall_s = stall_s
        self._said_at = time.monotonic()

    def say(self, message: Message, *descriptors: int) -> None:
        """Raises SourceGone or SourceStalled where the reader is."""
        self._said_at = time.monotonic()
        self._connection.send(message, descriptors, deadline=self._said_at + self._stall_s)

    def note(self) -> None:
        """Have the reader wait on."""
        if time.monotonic() - self._said_at >= NOTE_S:
            self.say({"wait": 0})


def _nothing() -> None:
    """To cut a read that copies a few bytes and waits for nobody: it ends at once by itself."""
