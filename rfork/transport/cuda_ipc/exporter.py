"""Source side: shares its allocations with readers that have a lease, and grants ranges one by one.

Bytes are copied between GPUs without this process: it answers one small request per slice and runs no kernel.
But it authorizes, meters and fences each slice, and the reader reports when it has finished.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Iterator
from typing import Final

from rfork.cuda.library import DriverError
from rfork.errors import LeaseRejected, SourceBusy, SourceCorrupt, SourceWeightsChanged
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.settings import InstanceSettings
from rfork.thread_priority import SERVING_THREAD_NICE
from rfork.transport.base import AccessGate, Endpoint, StatelessExporter
from rfork.transport.cuda_ipc import protocol
from rfork.transport.cuda_ipc.allocations import host_ranges, shareable_allocations
from rfork.transport.cuda_ipc.driver import HANDLE_TYPES, IpcDriver, IpcHandle
from rfork.transport.same_host.connection import (
    Message,
    UnixSocketConnection,
    close_all,
    encode_error,
    get_int,
    get_ints,
    get_str,
)
from rfork.transport.same_host.memory_file import memory_file, write
from rfork.transport.same_host.server import IDLE_TIMEOUT_S, LocalServer

RELEASE_TIMEOUT_S: Final = 3.0
"""Maximum wait in seconds of a closing source for its readers to unmap its memory."""

log = logger(__name__)


class CudaIpcExporter(StatelessExporter):
    """One image, readable by processes of this host that have a lease. Runs on the source.

    Limits of CUDA: a process that opened an allocation can read and write all of it, and access cannot be
    revoked. So a lease admits a process that follows the protocol: it sends a request before each read.
    `close` waits up to `RELEASE_TIMEOUT_S` for readers to unmap. A reader that is stopped for longer keeps
    its mapping: reading freed cudaMalloc memory is then undefined, according to CUDA; memory of cuMemCreate
    stays valid until the last mapping is removed.

    Raises TransportUnavailable or a subclass for an image that cannot be shared, SettingsError for an invalid
    socket directory.
    """

    def __init__(self, image: Image, gate: AccessGate, driver: IpcDriver, settings: InstanceSettings) -> None:
        self._allocations = shareable_allocations(driver, image)
        self._devices = self._allocations.devices
        uuids = ",".join(driver.uuid(device) for device in self._devices)
        self._image = image
        self._gate = gate
        self._driver = driver
        self._idle_timeout_s = settings.source_idle_timeout_s
        segments = image.segments(0, image.layout.image_bytes)
        self._all_on_devices = not host_ranges(self._allocations, segments)
        self._lock = threading.Lock()
        self._closing = False
        self._handles: dict[int, IpcHandle] = {}
        self._pin_pipes: set[int] = set()
        self._server = LocalServer("cuda-ipc", settings.unix_socket_dir, self._serve, nice=SERVING_THREAD_NICE)
        parameters = {
            **self._server.parameters,
            protocol.DEVICES: uuids,
            **protocol.namespaces(),
        }
        self._endpoint = Endpoint("cuda_ipc", parameters, tuple(segments))

    def endpoint(self) -> Endpoint:
        """Return the socket, the GPUs, and the addresses of the image."""
        return self._endpoint

    def close(self) -> None:
        """Disconnect every reader, and wait up to `RELEASE_TIMEOUT_S` until they have unmapped the memory."""
        with self._lock:
            self._closing = True
        self._server.close()
        with self._lock:
            pipes, self._pin_pipes = self._pin_pipes, set()
        open_ends = _wait_closed(pipes, time.monotonic() + RELEASE_TIMEOUT_S)
        if open_ends:
            log.warning("readers did not unmap this instance's memory in time", readers=open_ends)
        close_all(list(pipes))

    def _serve(self, connection: UnixSocketConnection) -> None:
        """Handle one connection's requests until it closes; on a separate thread."""
        self._server.serve_requests(
            connection, lambda request: self._respond(connection, request), self._idle_timeout_s
        )

    def _respond(self, connection: UnixSocketConnection, request: Message) -> bool:
        """Handle one request; return True if another may follow."""
        operation, token = get_str(request, "operation"), get_str(request, "token")
        if operation == "acquire":
            self._grant_ranges(connection, request)
            return True
        fork_id = self._gate.authorize(token, 0, 0)
        if operation == "pin":
            if not self._server.pin(connection, fork_id):
                raise SourceBusy("this fork already has as many connections to the source as allowed")
            self._serve_pin(connection, fork_id)
            return False
        self._acquire_slot(connection, fork_id)
        if operation == "allocations":
            self._reply(connection, self._allocation_page(get_int(request, "from")))
        elif operation == "handles":
            self._send_handles(connection, get_ints(request, "allocations"))
        else:
            raise SourceCorrupt(f"unknown request {operation[:40]!r}")
        return True

    def _acquire_slot(self, connection: UnixSocketConnection, fork_id: str) -> None:
        if not self._server.acquire_slot(connection, fork_id):
            raise SourceBusy("no free connection slot")

    def _allocation_page(self, first: int) -> Message:
        table = self._allocations.table
        page = table[max(first, 0) : max(first, 0) + protocol.ALLOCATIONS_PER_PAGE]
        rows = [
            [
                allocation.base,
                allocation.size,
                self._devices.index(allocation.device),
                HANDLE_TYPES.index(allocation.handle_type),
            ]
            for allocation in page
        ]
        return {"allocations": rows, "count": len(table)}

    def _send_handles(self, connection: UnixSocketConnection, indices: list[int]) -> None:
        """Send handles of allocations; their descriptors are open only during the call."""
        table = self._allocations.table
        if len(indices) > protocol.HANDLES_PER_PAGE or not all(0 <= index < len(table) for index in indices):
            raise SourceCorrupt("a reader requested unknown allocations")
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
            log.warning("driver cannot export an allocation", reason=str(error))
            raise SourceBusy(f"the source's driver cannot export its memory: {error}") from error
        finally:
            close_all(descriptors)

    def _handle(self, index: int) -> IpcHandle:
        """Return a handle. Only handles without a descriptor are cached, because thousands of descriptors are
        too many.
        """
        with self._lock:
            handle = self._handles.get(index)
        if handle is None:
            handle = self._driver.export(self._allocations.table[index])
            if handle.descriptor is None:
                with self._lock:
                    self._handles[index] = handle
        return handle

    def _serve_pin(self, connection: UnixSocketConnection, fork_id: str) -> None:
        """Keep the pin until the reader, its lease or `close` ends it; closing its pipe signals that the
        reader has unmapped.
        """
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        with self._lock:
            self._pin_pipes.add(read_end)
        try:
            try:
                self._reply(connection, {"pinned": 1}, [write_end])
            finally:
                os.close(write_end)
            self._wait_for_release(connection, fork_id)
        finally:
            with self._lock:
                if not self._closing:
                    self._pin_pipes.discard(read_end)
                    os.close(read_end)

    def _wait_for_release(self, connection: UnixSocketConnection, fork_id: str) -> None:
        """Request the reader's newest token periodically, so that a pin ends with its lease."""
        while True:
            request, descriptors = connection.receive(time.monotonic() + IDLE_TIMEOUT_S)
            close_all(descriptors)
            try:
                with contextlib.suppress(SourceBusy):  # does not invalidate the lease
                    if fork_id != self._gate.authorize(get_str(request, "token"), 0, 0):
                        raise LeaseRejected("the token belongs to another fork")
                if get_str(request, "operation") != "pin":
                    raise SourceCorrupt("unexpected request on a pin's connection")
                self._reply(connection, {"pinned": 1})
            except (LeaseRejected, SourceWeightsChanged) as error:
                self._reply(connection, encode_error(error))
                return

    def _grant_ranges(self, connection: UnixSocketConnection, request: Message) -> None:
        """Grant ranges one after the other, until the reader releases one without requesting another.

        A refusal of the next range still confirms the release of the previous one: its guard has ended.
        """
        released = 0
        while get_str(request, "operation") == "acquire":
            if request.get("release", 0) != released:
                raise SourceCorrupt("a reader requested another range before releasing its range, or released none")
            try:
                request = self._grant_range(connection, request, released)
            except (LeaseRejected, SourceBusy, SourceWeightsChanged) as error:
                self._reply(connection, {**encode_error(error), "released": released})
                return
            released = 1
        if get_str(request, "operation") != "release":
            raise SourceCorrupt("a reader sent another request before releasing its range")
        self._reply(connection, {"released": 1})

    def _grant_range(self, connection: UnixSocketConnection, request: Message, released: int) -> Message:
        """Grant the first bytes of a range until the reader sends its next request, which releases them.

        Return that request: it arrived while the bytes were granted, so the reader has read them. Raises if the
        read is aborted or times out. No guard is kept while the range waits for the egress budget.
        """
        token, begin, end = get_str(request, "token"), get_int(request, "begin"), get_int(request, "end")
        if not 0 <= begin < end <= self._image.layout.image_bytes:
            raise SourceCorrupt(f"a reader requested [{begin}, {end}), which is not within the image")
        fork_id = self._gate.authorize(token, begin, end)
        self._acquire_slot(connection, fork_id)
        granted_end = begin + self._gate.acquire_bytes(self._slice_bytes(begin, end), fork_id)
        with (
            self._gate.read_guard(token, begin, granted_end, connection.abort),
            self._host_bytes(begin, granted_end) as descriptors,
        ):
            try:
                self._reply(connection, {"released": released, "granted": granted_end - begin}, descriptors)
                next_request, received = connection.receive(time.monotonic() + self._idle_timeout_s)
            except BaseException:
                # Abort before the guard ends: a later release must not be accepted.
                connection.abort()
                raise
        close_all(received)
        return next_request

    def _slice_bytes(self, begin: int, end: int) -> int:
        """Return the maximum number of bytes to grant of a range."""
        size = min(end - begin, protocol.SLICE_BYTES)
        on_host = sum(last - first for first, last in self._host_ranges(begin, begin + size))
        return size if on_host <= protocol.HOST_SLICE_BYTES else protocol.HOST_SLICE_BYTES

    def _host_ranges(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of a range that are in host memory."""
        if self._all_on_devices:
            return []
        return list(host_ranges(self._allocations, self._image.segments(begin, end)))

    @contextlib.contextmanager
    def _host_bytes(self, begin: int, end: int) -> Iterator[list[int]]:
        """Yield a file with the range's bytes that are in host memory, if any: models keep small tensors
        there.
        """
        ranges = self._host_ranges(begin, end)
        if not ranges:
            yield []
            return
        file = memory_file(sealable=False)
        offset = 0
        try:
            for first, last in ranges:
                with self._server.memory_access(), self._image.readable(first, last) as views:
                    write(file.number, offset, views)
                offset += last - first
            yield [file.number]
        finally:
            file.empty()  # even if the reader keeps it open

    def _reply(self, connection: UnixSocketConnection, message: Message, descriptors: list[int] | None = None) -> None:
        connection.send(message, descriptors or (), deadline=time.monotonic() + self._idle_timeout_s)


def _wait_closed(ends: set[int], deadline: float) -> int:
    """Wait until the other ends of these pipes are closed; return how many are still open at the deadline."""
    open_ends, poll = set(ends), select.poll()
    for end in open_ends:
        poll.register(end, 0)  # POLLHUP is always reported
    while open_ends and (remaining_s := deadline - time.monotonic()) > 0:
        for end, _ in poll.poll(remaining_s * 1000):
            poll.unregister(end)
            open_ends.discard(end)
    return len(open_ends)
