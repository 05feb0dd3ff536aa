"""The source's memory as the target has it opened: each allocation once, when a read first needs it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rfork.errors import SourceCorrupt, SourceTimeout, SourceUnavailable, VersionMismatch
from rfork.logs import logger
from rfork.transport.base import TokenSource
from rfork.transport.cuda_ipc import protocol
from rfork.transport.cuda_ipc.allocations import MAX_ALLOCATIONS, AllocationTable
from rfork.transport.cuda_ipc.diagnostics import explain_open_error
from rfork.transport.cuda_ipc.driver import (
    HANDLE_BYTES,
    HANDLE_TYPES,
    Allocation,
    Driver,
    DriverError,
    ImportedAllocation,
    IpcHandle,
)
from rfork.transport.unix_socket.client import ConnectionPool
from rfork.transport.unix_socket.connection import UnixSocketConnection, close_all
from rfork.transport.unix_socket.messages import JsonValue, Message, get_int, raise_error

_ROW = 4

log = logger(__name__)


class SourceMemory:
    """Thread-safe.

    Each question shows the newest token. `source_idle_timeout_s`: seconds that the source may take for an answer.
    """

    def __init__(
        self,
        driver: Driver,
        connections: ConnectionPool,
        token: TokenSource,
        parameters: Mapping[str, str],
        stall_s: float,
    ) -> None:
        self._driver = driver
        self._connections = connections
        self._token = token
        self._parameters = parameters
        self._uuids = parameters.get(protocol.DEVICES, "").split(",")
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._closed = False
        self._areas: AllocationTable | None = None
        self._opened: dict[tuple[int, int], ImportedAllocation] = {}

    def areas(self, deadline: float) -> AllocationTable:
        """The source's allocations; `device` of each is its place among the endpoint's devices.

        Raises as `Reader.read` does.
        """
        with self._exclusive(deadline):
            if self._areas is None:
                with self._connections.lease(deadline) as connection:
                    self._areas = AllocationTable(self._query_allocations(connection, deadline))
            return self._areas

    def open(self, indices: Sequence[int], device: int, deadline: float) -> None:
        """Have these of `areas` opened for a device of this side.

        Raises as `Reader.read`, and TransportUnavailable.
        """
        areas = self.areas(deadline)
        with self._exclusive(deadline):
            missing = [index for index in indices if (index, device) not in self._opened]
            if not missing:
                return
            with self._connections.lease(deadline) as connection:
                for first in range(0, len(missing), protocol.HANDLES_PER_PAGE):
                    page = missing[first : first + protocol.HANDLES_PER_PAGE]
                    self._open_page(connection, areas, page, device, deadline)

    def address(self, index: int, device: int) -> int:
        """Where one of `areas` that was opened for this device begins, in this process."""
        return self._opened[index, device].address

    def close(self) -> None:
        """Let go of all that was opened; after all copies out of it have ended. Safe to call twice."""
        with self._lock:
            self._closed = True
            for opened in self._opened.values():
                try:
                    self._driver.close(opened)
                except DriverError as error:  # the source died, or the device did
                    log.warning("the driver does not close a source's memory", because=str(error))
            self._opened.clear()

    @contextmanager
    def _exclusive(self, deadline: float) -> Iterator[None]:
        """One thread at a time asks; the others wait for what it learns."""
        if not self._lock.acquire(timeout=max(deadline - time.monotonic(), 0)):
            raise SourceTimeout("the source's memory was not opened in time")
        try:
            if self._closed:
                raise SourceUnavailable("this reader was closed")
            yield
        finally:
            self._lock.release()

    def _query(self, connection: UnixSocketConnection, query: Message, deadline: float) -> tuple[Message, list[int]]:
        """Ask one question; the descriptors of its answer are the caller's."""
        until = min(deadline, time.monotonic() + self._stall_s)
        connection.send({**query, "token": self._token()}, deadline=until)
        reply, descriptors = connection.receive(until)
        try:
            raise_error(reply)
        except BaseException:
            close_all(descriptors)
            raise
        return reply, descriptors

    def _query_allocations(self, connection: UnixSocketConnection, deadline: float) -> list[Allocation]:
        table: list[Allocation] = []
        while True:
            query: Message = {"ask": "areas", "from": len(table)}
            reply, descriptors = self._query(connection, query, deadline)
            close_all(descriptors)
            rows, count = reply.get("areas"), get_int(reply, "count")
            if not isinstance(rows, list) or not rows or not len(table) < count <= MAX_ALLOCATIONS:
                raise SourceCorrupt("the source's table of allocations is broken")
            table.extend(self._allocation(row) for row in rows)
            if len(table) >= count:
                return table

    def _allocation(self, row: JsonValue) -> Allocation:
        numbers = [part for part in row if type(part) is int] if isinstance(row, list) else []
        if len(numbers) != _ROW or not 0 <= numbers[2] < len(self._uuids):
            raise SourceCorrupt("the source's table of allocations is broken")
        if not 0 <= numbers[3] < len(HANDLE_TYPES):
            raise VersionMismatch("the source has a kind of memory that is not known here", hint="update rfork")
        return Allocation(numbers[0], numbers[1], numbers[2], HANDLE_TYPES[numbers[3]])

    def _open_page(
        self,
        connection: UnixSocketConnection,
        areas: AllocationTable,
        page: Sequence[int],
        device: int,
        deadline: float,
    ) -> None:
        query: Message = {"ask": "handles", "areas": list(page)}
        reply, descriptors = self._query(connection, query, deadline)
        try:
            table = [areas.table[index] for index in page]
            for index, area, handle in zip(page, table, _handles(reply, table, descriptors), strict=True):
                try:
                    opened = self._driver.open(device, area.handle_type, handle, area.size)
                except DriverError as error:
                    uuid = self._uuids[area.device]
                    raise explain_open_error(error, area.handle_type, uuid, self._driver, self._parameters) from error
                self._opened[index, device] = opened
        finally:
            close_all(descriptors)


def _handles(reply: Message, table: Sequence[Allocation], descriptors: Sequence[int]) -> list[IpcHandle]:
    """The handles in an answer. Raises SourceCorrupt where they do not fit the allocations."""
    names = reply.get("handles")
    if not isinstance(names, list) or len(names) != len(table):
        raise SourceCorrupt("the source did not send the handles that it was asked for")
    left, handles = list(descriptors), list[IpcHandle]()
    for name, area in zip(names, table, strict=True):
        if area.handle_type == "descriptor":
            if not left:
                raise SourceCorrupt("the source did not send the descriptors of its memory")
            handles.append(IpcHandle(descriptor=left.pop(0)))
            continue
        try:
            data = bytes.fromhex(name) if isinstance(name, str) else b""
        except ValueError:
            data = b""
        if len(data) != HANDLE_BYTES:
            raise SourceCorrupt(f"the source sent a handle that does not have {HANDLE_BYTES} bytes")
        handles.append(IpcHandle(data))
    return handles
