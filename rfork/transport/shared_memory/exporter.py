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

from rfork.errors import LeaseRefused, SourceBusy, SourceChanged, SourceCorrupt
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.settings import Settings
from rfork.transport.base import Endpoint, Gate, Plain
from rfork.transport.same_host.connection import Connection, close_all
from rfork.transport.same_host.messages import problem_of
from rfork.transport.same_host.server import LocalServer
from rfork.transport.shared_memory.pages import Kernel
from rfork.transport.shared_memory.placement import Layout
from rfork.transport.shared_memory.room import Room, has_room
from rfork.transport.shared_memory.sealed import Descriptor, Sealed, memory_file, write
from rfork.transport.shared_memory.shelf import Shelf
from rfork.transport.shared_memory.talking import Request, Talk

log = logger(__name__)

NAME: Final = "shared_memory"
SLICE_BYTES: Final = 8 << 20
"""The gate is asked again after at most so many bytes."""
PIECE_BYTES: Final = 2 << 20
"""Bytes of the file that a connection's pieces go through."""
IDLE_S: Final = 60.0
"""Seconds a connection that was admitted may rest between two requests."""
LOOK_S: Final = 15.0
"""Seconds between two looks at whether there is still memory for what is kept."""


class SharedMemoryExporter(Plain):
    """Serves one image of host memory from construction until `close`. Raises SettingsError."""

    def __init__(self, image: Image, gate: Gate, shelf: Shelf, settings: Settings) -> None:
        self._image = image
        self._gate = gate
        self._shelf = shelf
        self._stall_s = settings.stall_s
        self._kernel = Kernel()
        self._room = Room()
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
        """Let go of what is of weights that are no more, and of all that memory is too short for."""
        while not self._closing.wait(LOOK_S):
            self._shelf.drop_others(self._gate.etag())
            while not has_room(0) and self._shelf.drop_oldest():
                pass

    # -- on a thread for each connection ---------------------------------------------------------------

    def _serve(self, connection: Connection) -> None:
        talk = Talk(connection, self._stall_s)
        try:
            self._answer_all(connection, talk)
        finally:
            # First cut: who still reads the piece must not find it empty, and the connection well.
            connection.cut()
            talk.end()

    def _answer_all(self, connection: Connection, talk: Talk) -> None:
        patience_s = self._stall_s
        while True:
            message, descriptors = connection.receive(time.monotonic() + patience_s)
            close_all(descriptors)
            try:
                request = Request(message, self._image)
                fork_id = self._gate.admit(request.token, request.begin, request.end)
                if not self._server.take_slot(connection, fork_id):
                    talk.say(problem_of(SourceBusy("all slots are taken")))
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

    def _answer(self, request: Request, fork_id: str, talk: Talk) -> None:
        sealed = self._sealed(request, fork_id, talk) if request.chunk is not None else None
        if sealed is None:
            self._give_piece(request, fork_id, talk)
            return
        # Time has passed: the lease may be over by now, and the weights others.
        with self._gate.reading(request.token, request.begin, request.end, _nothing):
            if self._gate.etag() != sealed.proven:
                raise SourceChanged("the weights changed while a chunk was shared")
        talk.paid = (0, 0)
        layout = sealed.layout
        talk.say(
            {"sealed": layout.told(), "begin": layout.begin, "end": layout.end}, sealed.descriptor.number
        )

    def _sealed(self, request: Request, fork_id: str, talk: Talk) -> Sealed | None:
        """The whole chunk in a file; None where it is not to be had, or to be made, in one."""
        chunk = request.chunk
        if chunk is None:
            return None
        begin, end = self._image.layout.chunks[chunk]
        try:
            self._gate.admit(request.token, begin, end)
        except SourceBusy:
            return None
        can_make = request.maps and has_room(end - begin) and not self._shelf.full()
        if self._shelf.find(chunk) is None and not can_make:
            return None
        # Whatever part was asked for: who has the file has the chunk.
        self._pay(begin, end, fork_id, talk)
        with self._shelf.making(chunk, talk.note):
            found = self._proven(chunk, request.token, talk)
            if found is not None or not request.maps or self._shelf.full():
                return found
            layout = Layout.wished(begin, end, request.wishes)
            # Asked only now: meanwhile others may have taken what was free.
            with self._room.promised(layout.size, has_room) as has:
                made = self._made(layout, request.token, talk) if has else None
            if made is not None:
                self._shelf.keep(chunk, made)
            return made

    def _proven(self, chunk: int, token: str, talk: Talk) -> Sealed | None:
        """The chunk from the shelf, if it has the bytes that the image has now."""
        found = self._shelf.find(chunk)
        if found is None:
            return None
        etag = self._gate.etag()
        if found.proven == etag:
            return found
        if not found.proven and self._holds(found, token, talk):
            if self._gate.etag() != etag:
                raise SourceChanged("the weights changed while a chunk was compared")
            found.proven = etag
            return found
        self._shelf.drop(chunk)
        return None

    def _holds(self, sealed: Sealed, token: str, talk: Talk) -> bool:
        """Whether what was received has the bytes that the image has here."""
        for begin, end in _slices(sealed.layout.begin, sealed.layout.end):
            with self._reading(token, begin, end):
                if not sealed.holds_the_bytes_of(self._image, begin, end, self._kernel):
                    return False
            talk.note()
        return True

    @contextlib.contextmanager
    def _reading(self, token: str, begin: int, end: int) -> Iterator[None]:
        """What touches the image's memory: not after a fence, nor after `close`."""
        with self._gate.reading(token, begin, end, _nothing), self._server.touching():
            yield

    def _made(self, layout: Layout, token: str, talk: Talk) -> Sealed:
        file = self._file()
        etag = self._gate.etag()
        for begin, end in _slices(layout.begin, layout.end):
            with self._reading(token, begin, end), self._image.readable(begin, end) as views:
                write(file, layout, begin, views)
            talk.note()
        if self._gate.etag() != etag:
            raise SourceChanged("the weights changed while a chunk was copied")
        made = Sealed.made(file, layout)
        made.proven = etag
        return made

    def _file(self, *, sealable: bool = True) -> Descriptor:
        """A new memory file; what was made longest ago makes room for it where that is needed."""
        while True:
            try:
                return memory_file(sealable=sealable)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._shelf.drop_oldest():
                    raise

    def _give_piece(self, request: Request, fork_id: str, talk: Talk) -> None:
        """Some bytes from the request's begin on, in a file that the connection's next piece overwrites."""
        begin = request.begin
        most = min(request.end - begin, PIECE_BYTES)
        # A chunk that was paid for, and then was not to be had as a file, is not paid for twice.
        first, last = talk.paid
        end = min(begin + most, last) if first <= begin < last else begin + self._gate.grant(most, fork_id)
        talk.paid = (end, last)
        piece = talk.piece = talk.piece or self._file(sealable=False)
        with self._reading(request.token, begin, end), self._image.readable(begin, end) as views:
            write(piece, Layout(begin, end, (begin,), (0,)), begin, views)
        talk.say({"piece": 0, "begin": begin, "end": end}, piece.number)

    def _pay(self, begin: int, end: int, fork_id: str, talk: Talk) -> None:
        """Wait for the budget of a chunk, as it is given at once, and tell the reader meanwhile."""
        at = begin
        while at < end:
            at += self._gate.grant(min(end - at, SLICE_BYTES), fork_id)
            talk.note()
        talk.paid = (begin, end)


def _slices(begin: int, end: int) -> Iterator[tuple[int, int]]:
    for at in range(begin, end, SLICE_BYTES):
        yield at, min(at + SLICE_BYTES, end)


def _nothing() -> None:
    """To cut a read that copies a few bytes and waits for nobody: it ends at once by itself."""
