"""The source side: shows its allocations to readers with a lease, and lends them range by range.

The bytes go from GPU to GPU without this process: it answers a few small questions for each 64 MiB, and runs
no kernel. But each read is admitted, metered and fenced here, and the reader says when it is done.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Iterator
from typing import Final

from rfork.errors import LeaseRefused, SourceBusy, SourceChanged, SourceCorrupt
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.settings import Settings
from rfork.transport.base import Endpoint, Gate, Plain
from rfork.transport.cuda_ipc import words
from rfork.transport.cuda_ipc.areas import areas_to_share, host_ranges
from rfork.transport.cuda_ipc.driver import KINDS, Driver, DriverError, Handle
from rfork.transport.cuda_ipc.namespaces import namespaces
from rfork.transport.same_host.connection import Connection, close_all
from rfork.transport.same_host.messages import Message, number_in, numbers_in, problem_of, text_in
from rfork.transport.same_host.server import LocalServer

IDLE_S: Final = 60.0
"""Seconds a connection that was admitted may rest between two questions, and a hold between two tokens."""
LET_GO_S: Final = 3.0
"""Seconds that a closing source waits for its readers to unmap its memory."""

log = logger(__name__)


class CudaIpcExporter(Plain):
    """One image, readable by the processes of this host that hold a lease. Runs on the source.

    What CUDA leaves open: an allocation that was shown to a process can be read, and written, by it as a
    whole, with all else that lies in it; and cannot be taken back. So a lease lets in a process that keeps
    to the rules: it asks before each read. `close` waits for readers to unmap, for `LET_GO_S`. A reader that
    stands still for longer keeps its mapping: CUDA says that what it then reads, of cudaMalloc's memory that
    was freed, is undefined; memory of cuMemCreate stays as it is until the last mapping has gone.

    Raises TransportUnusable kinds for an image that cannot be shown, SettingsError for a bad socket folder.
    """

    def __init__(self, image: Image, gate: Gate, driver: Driver, settings: Settings) -> None:
        self._areas = areas_to_share(driver, image)
        self._devices = self._areas.devices
        uuids = ",".join(driver.uuid(device) for device in self._devices)
        self._image = image
        self._gate = gate
        self._driver = driver
        self._stall_s = settings.stall_s
        whole = image.segments(0, image.layout.image_bytes)
        self._all_on_devices = not host_ranges(self._areas, whole)
        self._lock = threading.Lock()
        self._closing = False
        self._handles: dict[int, Handle] = {}
        self._holders: set[int] = set()
        self._server = LocalServer("cuda-ipc", settings.local_sockets, self._serve, nice=settings.giving_nice)
        parameters = {
            **self._server.parameters,
            words.DEVICES: uuids,
            **namespaces(),
        }
        self._endpoint = Endpoint("cuda_ipc", parameters, tuple(whole))

    def endpoint(self) -> Endpoint:
        """The socket, the GPUs, and the address of every byte of the image."""
        return self._endpoint

    def close(self) -> None:
        """Cut every reader off, and wait until they have unmapped the memory, `LET_GO_S` at most."""
        with self._lock:
            self._closing = True
        self._server.close()
        with self._lock:
            holders, self._holders = self._holders, set()
        left = _wait_closed(holders, time.monotonic() + LET_GO_S)
        if left:
            log.warning("readers still map this instance's memory: they stand still", readers=left)
        close_all(list(holders))

    def _serve(self, connection: Connection) -> None:
        """Answer one connection's questions until it ends; on a thread of its own."""
        patience_s = self._stall_s  # a stranger's
        while True:
            question, descriptors = connection.receive(time.monotonic() + patience_s)
            close_all(descriptors)
            try:
                goes_on = self._answer(connection, question)
            except (LeaseRefused, SourceBusy, SourceChanged) as error:
                self._say(connection, problem_of(error))
                continue
            if not goes_on:
                return
            patience_s = IDLE_S

    def _answer(self, connection: Connection, question: Message) -> bool:
        """Answer one question; whether another may follow."""
        asked, token = text_in(question, "ask"), text_in(question, "token")
        if asked == "borrow":
            self._lend(connection, token, number_in(question, "begin"), number_in(question, "end"))
            return True
        fork_id = self._gate.admit(token, 0, 0)
        if asked == "hold":
            if not self._server.hold(connection, fork_id):
                raise SourceBusy("this fork holds on to the source already")
            self._hold(connection, fork_id)
            return False
        self._take_slot(connection, fork_id)
        if asked == "areas":
            self._say(connection, self._page(number_in(question, "from")))
        elif asked == "handles":
            self._show(connection, numbers_in(question, "areas"))
        else:
            raise SourceCorrupt(f"a reader asked for {asked[:40]!r}")
        return True

    def _take_slot(self, connection: Connection, fork_id: str) -> None:
        if not self._server.take_slot(connection, fork_id):
            raise SourceBusy("all slots are taken")

    def _page(self, first: int) -> Message:
        table = self._areas.table
        page = table[max(first, 0) : max(first, 0) + words.AREAS_A_PAGE]
        rows = [
            [area.base, area.size, self._devices.index(area.device), KINDS.index(area.kind)] for area in page
        ]
        return {"areas": rows, "count": len(table)}

    def _show(self, connection: Connection, indices: list[int]) -> None:
        """Send handles of some allocations, and descriptors for as long as that takes."""
        table = self._areas.table
        if len(indices) > words.HANDLES_A_PAGE or not all(0 <= index < len(table) for index in indices):
            raise SourceCorrupt("a reader asked for allocations that there are not")
        descriptors: list[int] = []
        try:
            names: list[str] = []
            for index in indices:
                handle = self._handle(index)
                names.append(handle.data.hex())
                if handle.descriptor is not None:
                    descriptors.append(handle.descriptor)
            self._say(connection, {"handles": names}, descriptors)
        except DriverError as error:
            log.warning("the driver does not show an allocation", because=str(error))
            raise SourceBusy(f"the source's driver does not show its memory: {error}") from error
        finally:
            close_all(descriptors)

    def _handle(self, index: int) -> Handle:
        """Made once where it is only a name. Descriptors are made anew: thousands open would be too many."""
        with self._lock:
            kept = self._handles.get(index)
        if kept is None:
            kept = self._driver.export(self._areas.table[index])
            if kept.descriptor is None:
                with self._lock:
                    self._handles[index] = kept
        return kept

    def _hold(self, connection: Connection, fork_id: str) -> None:
        """Wait until the reader, its lease or `close` ends it; the pipe that it has says when it unmapped."""
        kept, given = os.pipe2(os.O_CLOEXEC)
        with self._lock:
            self._holders.add(kept)
        try:
            try:
                self._say(connection, {"held": 1}, [given])
            finally:
                os.close(given)
            self._wait_end(connection, fork_id)
        finally:
            with self._lock:
                if not self._closing:
                    self._holders.discard(kept)
                    os.close(kept)

    def _wait_end(self, connection: Connection, fork_id: str) -> None:
        """Have the reader show its newest token again and again: nobody holds on longer than its lease."""
        while True:
            question, descriptors = connection.receive(time.monotonic() + IDLE_S)
            close_all(descriptors)
            try:
                with contextlib.suppress(SourceBusy):  # which says nothing against the lease
                    if fork_id != self._gate.admit(text_in(question, "token"), 0, 0):
                        raise LeaseRefused("the token is another fork's")
                if text_in(question, "ask") != "hold":
                    raise SourceCorrupt("a reader talks where it is only to hold on")
                self._say(connection, {"held": 1})
            except (LeaseRefused, SourceChanged) as error:
                self._say(connection, problem_of(error))
                return

    def _lend(self, connection: Connection, token: str, begin: int, end: int) -> None:
        """Lend the first bytes of a range until they are returned, or the loan is cut, or too old."""
        if not 0 <= begin < end <= self._image.layout.image_bytes:
            raise SourceCorrupt(f"a reader asked for [{begin}, {end}), which is not within the image")
        fork_id = self._gate.admit(token, begin, end)
        self._take_slot(connection, fork_id)
        until = begin + self._gate.grant(min(end - begin, words.SLICE_BYTES), fork_id)
        with (
            self._gate.reading(token, begin, until, connection.cut),
            self._host_bytes(begin, until) as descriptors,
        ):
            try:
                self._say(connection, {"lent": until - begin}, descriptors)
                answer, unasked = connection.receive(time.monotonic() + self._stall_s)
            except BaseException:
                # Before the bytes are lent no more: a reader that sends its return later must not get far.
                connection.cut()
                raise
        close_all(unasked)
        if text_in(answer, "ask") != "return":
            raise SourceCorrupt("a reader asked for more before it returned what it has")
        # The block ended by itself, and was not cut: what was read is what was lent.
        self._say(connection, {"returned": 1})

    @contextlib.contextmanager
    def _host_bytes(self, begin: int, end: int) -> Iterator[list[int]]:
        """A file of the range's bytes in host memory, where there are any: models keep small ones."""
        ranges = [] if self._all_on_devices else host_ranges(self._areas, self._image.segments(begin, end))
        if not ranges:
            yield []
            return
        descriptor = os.memfd_create("rfork-cuda-ipc", os.MFD_CLOEXEC)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                for first, last in ranges:
                    with self._server.touching(), self._image.readable(first, last) as views:
                        file.writelines(views)
            yield [descriptor]
        finally:
            os.ftruncate(descriptor, 0)  # whoever keeps it keeps no memory with it
            os.close(descriptor)

    def _say(self, connection: Connection, message: Message, descriptors: list[int] | None = None) -> None:
        connection.send(message, descriptors or (), deadline=time.monotonic() + self._stall_s)


def _wait_closed(ends: set[int], deadline: float) -> int:
    """Wait until the other ends of these pipes are closed; how many are not by the deadline."""
    left, poll = set(ends), select.poll()
    for end in left:
        poll.register(end, 0)  # a hang-up is always told
    while left and (time_left := deadline - time.monotonic()) > 0:
        for end, _ in poll.poll(time_left * 1000):
            poll.unregister(end)
            left.discard(end)
    return len(left)
