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

from rfork.errors import LeaseRejected, SourceBusy, SourceCorrupt, SourceWeightsChanged
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.settings import InstanceSettings
from rfork.transport.base import AccessGate, Endpoint, StatelessExporter
from rfork.transport.cuda_ipc import protocol
from rfork.transport.cuda_ipc.allocations import host_ranges, shareable_allocations
from rfork.transport.cuda_ipc.driver import HANDLE_TYPES, Driver, DriverError, IpcHandle
from rfork.transport.cuda_ipc.namespaces import namespaces
from rfork.transport.unix_socket.connection import UnixSocketConnection, close_all
from rfork.transport.unix_socket.messages import Message, encode_error, get_int, get_ints, get_str
from rfork.transport.unix_socket.server import LocalServer

IDLE_S: Final = 60.0
"""Seconds a connection that was admitted may rest between two questions, and a hold between two tokens."""
RELEASE_TIMEOUT_S: Final = 3.0
"""Seconds that a closing source waits for its readers to unmap its memory."""

log = logger(__name__)


class CudaIpcExporter(StatelessExporter):
    """One image, readable by the processes of this host that hold a lease. Runs on the source.

    What CUDA leaves open: an allocation that was shown to a process can be read, and written, by it as a
    whole, with all else that lies in it; and cannot be taken back. So a lease lets in a process that keeps
    to the rules: it asks before each read. `close` waits for readers to unmap, for `RELEASE_TIMEOUT_S`. A reader that
    stands still for longer keeps its mapping: CUDA says that what it then reads, of cudaMalloc's memory that
    was freed, is undefined; memory of cuMemCreate stays as it is until the last mapping has gone.

    Raises TransportUnavailable kinds for an image that cannot be shown, SettingsError for a bad socket folder.
    """

    def __init__(self, image: Image, gate: AccessGate, driver: Driver, settings: InstanceSettings) -> None:
        self._areas = shareable_allocations(driver, image)
        self._devices = self._areas.devices
        uuids = ",".join(driver.uuid(device) for device in self._devices)
        self._image = image
        self._gate = gate
        self._driver = driver
        self._stall_s = settings.source_idle_timeout_s
        segments = image.segments(0, image.layout.image_bytes)
        self._all_on_devices = not host_ranges(self._areas, segments)
        self._lock = threading.Lock()
        self._closing = False
        self._handles: dict[int, IpcHandle] = {}
        self._holders: set[int] = set()
        self._server = LocalServer("cuda-ipc", settings.unix_socket_dir, self._serve, nice=settings.serving_thread_nice)
        parameters = {
            **self._server.parameters,
            protocol.DEVICES: uuids,
            **namespaces(),
        }
        self._endpoint = Endpoint("cuda_ipc", parameters, tuple(segments))

    def endpoint(self) -> Endpoint:
        """The socket, the GPUs, and the address of every byte of the image."""
        return self._endpoint

    def close(self) -> None:
        """Cut every reader off, and wait until they have unmapped the memory, `RELEASE_TIMEOUT_S` at most."""
        with self._lock:
            self._closing = True
        self._server.close()
        with self._lock:
            holders, self._holders = self._holders, set()
        left = _wait_closed(holders, time.monotonic() + RELEASE_TIMEOUT_S)
        if left:
            log.warning("readers still map this instance's memory: they stand still", readers=left)
        close_all(list(holders))

    def _serve(self, connection: UnixSocketConnection) -> None:
        """Answer one connection's questions until it ends; on a thread of its own."""
        timeout_s = self._stall_s  # a stranger's
        while True:
            question, descriptors = connection.receive(time.monotonic() + timeout_s)
            close_all(descriptors)
            try:
                goes_on = self._respond(connection, question)
            except (LeaseRejected, SourceBusy, SourceWeightsChanged) as error:
                self._reply(connection, encode_error(error))
                continue
            if not goes_on:
                return
            timeout_s = IDLE_S

    def _respond(self, connection: UnixSocketConnection, question: Message) -> bool:
        """Answer one question; whether another may follow."""
        request_name, token = get_str(question, "ask"), get_str(question, "token")
        if request_name == "borrow":
            self._grant_range(connection, token, get_int(question, "begin"), get_int(question, "end"))
            return True
        fork_id = self._gate.authorize(token, 0, 0)
        if request_name == "hold":
            if not self._server.pin(connection, fork_id):
                raise SourceBusy("this fork holds on to the source already")
            self._pin(connection, fork_id)
            return False
        self._acquire_slot(connection, fork_id)
        if request_name == "areas":
            self._reply(connection, self._page_of(get_int(question, "from")))
        elif request_name == "handles":
            self._send_handles(connection, get_ints(question, "areas"))
        else:
            raise SourceCorrupt(f"a reader asked for {request_name[:40]!r}")
        return True

    def _acquire_slot(self, connection: UnixSocketConnection, fork_id: str) -> None:
        if not self._server.acquire_slot(connection, fork_id):
            raise SourceBusy("all slots are taken")

    def _page_of(self, first: int) -> Message:
        table = self._areas.table
        page = table[max(first, 0) : max(first, 0) + protocol.ALLOCATIONS_PER_PAGE]
        rows = [
            [area.base, area.size, self._devices.index(area.device), HANDLE_TYPES.index(area.handle_type)]
            for area in page
        ]
        return {"areas": rows, "count": len(table)}

    def _send_handles(self, connection: UnixSocketConnection, indices: list[int]) -> None:
        """Send handles of some allocations, and descriptors for as long as that takes."""
        table = self._areas.table
        if len(indices) > protocol.HANDLES_PER_PAGE or not all(0 <= index < len(table) for index in indices):
            raise SourceCorrupt("a reader asked for allocations that there are not")
        descriptors: list[int] = []
        try:
            names: list[str] = []
            for index in indices:
                handle = self._handle(index)
                names.append(handle.data.hex())
                if handle.descriptor is not None:
                    descriptors.append(handle.descriptor)
            self._reply(connection, {"handles": names}, descriptors)
        except DriverError as error:
            log.warning("the driver does not show an allocation", because=str(error))
            raise SourceBusy(f"the source's driver does not show its memory: {error}") from error
        finally:
            close_all(descriptors)

    def _handle(self, index: int) -> IpcHandle:
        """Made once where it is only a name. Descriptors are made anew: thousands open would be too many."""
        with self._lock:
            read_end = self._handles.get(index)
        if read_end is None:
            read_end = self._driver.export(self._areas.table[index])
            if read_end.descriptor is None:
                with self._lock:
                    self._handles[index] = read_end
        return read_end

    def _pin(self, connection: UnixSocketConnection, fork_id: str) -> None:
        """Wait until the reader, its lease or `close` ends it; the pipe that it has says when it unmapped."""
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        with self._lock:
            self._holders.add(read_end)
        try:
            try:
                self._reply(connection, {"held": 1}, [write_end])
            finally:
                os.close(write_end)
            self._wait_for_release(connection, fork_id)
        finally:
            with self._lock:
                if not self._closing:
                    self._holders.discard(read_end)
                    os.close(read_end)

    def _wait_for_release(self, connection: UnixSocketConnection, fork_id: str) -> None:
        """Have the reader show its newest token again and again: nobody holds on longer than its lease."""
        while True:
            question, descriptors = connection.receive(time.monotonic() + IDLE_S)
            close_all(descriptors)
            try:
                with contextlib.suppress(SourceBusy):  # which says nothing against the lease
                    if fork_id != self._gate.authorize(get_str(question, "token"), 0, 0):
                        raise LeaseRejected("the token is another fork's")
                if get_str(question, "ask") != "hold":
                    raise SourceCorrupt("a reader talks where it is only to hold on")
                self._reply(connection, {"held": 1})
            except (LeaseRejected, SourceWeightsChanged) as error:
                self._reply(connection, encode_error(error))
                return

    def _grant_range(self, connection: UnixSocketConnection, token: str, begin: int, end: int) -> None:
        """Lend the first bytes of a range until they are returned, or the loan is cut, or too old."""
        if not 0 <= begin < end <= self._image.layout.image_bytes:
            raise SourceCorrupt(f"a reader asked for [{begin}, {end}), which is not within the image")
        fork_id = self._gate.authorize(token, begin, end)
        self._acquire_slot(connection, fork_id)
        until = begin + self._gate.acquire_bytes(min(end - begin, protocol.SLICE_BYTES), fork_id)
        with (
            self._gate.read_guard(token, begin, until, connection.abort),
            self._host_bytes(begin, until) as descriptors,
        ):
            try:
                self._reply(connection, {"lent": until - begin}, descriptors)
                reply, unasked = connection.receive(time.monotonic() + self._stall_s)
            except BaseException:
                # Before the bytes are lent no more: a reader that sends its return later must not get far.
                connection.abort()
                raise
        close_all(unasked)
        if get_str(reply, "ask") != "return":
            raise SourceCorrupt("a reader asked for more before it returned what it has")
        # The block ended by itself, and was not cut: what was read is what was lent.
        self._reply(connection, {"returned": 1})

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
                    with self._server.memory_access(), self._image.readable(first, last) as views:
                        file.writelines(views)
            yield [descriptor]
        finally:
            os.ftruncate(descriptor, 0)  # whoever keeps it keeps no memory with it
            os.close(descriptor)

    def _reply(self, connection: UnixSocketConnection, message: Message, descriptors: list[int] | None = None) -> None:
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
