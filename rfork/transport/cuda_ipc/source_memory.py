"""The source's memory as opened by the target: each allocation once, on first use."""

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
    """Opened allocations of the source. Thread-safe.

    Each request carries the newest token. `idle_timeout_s`: timeout of a reply in seconds.
    """

    def __init__(
        self,
        driver: Driver,
        connections: ConnectionPool,
        token: TokenSource,
        parameters: Mapping[str, str],
        idle_timeout_s: float,
    ) -> None:
        self._driver = driver
        self._connections = connections
        self._token = token
        self._parameters = parameters
        self._uuids = parameters.get(protocol.DEVICES, "").split(",")
        self._idle_timeout_s = idle_timeout_s
        self._lock = threading.Lock()
        self._closed = False
        self._allocations: AllocationTable | None = None
        self._opened: dict[tuple[int, int], ImportedAllocation] = {}

    def allocations(self, deadline: float) -> AllocationTable:
        """Return the source's allocations; their `device` is an index into the endpoint's devices.

        Raises as `Reader.read`.
        """
        with self._exclusive(deadline):
            if self._allocations is None:
                with self._connections.lease(deadline) as connection:
                    self._allocations = AllocationTable(self._query_allocations(connection, deadline))
            return self._allocations

    def open(self, indices: Sequence[int], device: int, deadline: float) -> None:
        """Open these allocations for a device of the target, unless they are open.

        Raises as `Reader.read`, and TransportUnavailable.
        """
        allocations = self.allocations(deadline)
        with self._exclusive(deadline):
            missing = [index for index in indices if (index, device) not in self._opened]
            if not missing:
                return
            with self._connections.lease(deadline) as connection:
                for first in range(0, len(missing), protocol.HANDLES_PER_PAGE):
                    page = missing[first : first + protocol.HANDLES_PER_PAGE]
                    self._open_page(connection, allocations, page, device, deadline)

    def address(self, index: int, device: int) -> int:
        """Return the address in this process of an allocation opened for this device."""
        return self._opened[index, device].address

    def close(self) -> None:
        """Close all allocations, after all copies from them have finished. Idempotent."""
        with self._lock:
            self._closed = True
            for opened in self._opened.values():
                try:
                    self._driver.close(opened)
                except DriverError as error:  # the source or the device failed
                    log.warning("driver failed to close a source's memory", reason=str(error))
            self._opened.clear()

    @contextmanager
    def _exclusive(self, deadline: float) -> Iterator[None]:
        """Let one thread at a time send requests; the others wait and reuse the result."""
        if not self._lock.acquire(timeout=max(deadline - time.monotonic(), 0)):
            raise SourceTimeout("the source's memory was not opened in time")
        try:
            if self._closed:
                raise SourceUnavailable("the reader was closed")
            yield
        finally:
            self._lock.release()

    def _query(self, connection: UnixSocketConnection, query: Message, deadline: float) -> tuple[Message, list[int]]:
        """Send a request; the caller owns the descriptors of the reply."""
        expires_at = min(deadline, time.monotonic() + self._idle_timeout_s)
        connection.send({**query, "token": self._token()}, deadline=expires_at)
        reply, descriptors = connection.receive(expires_at)
        try:
            raise_error(reply)
        except BaseException:
            close_all(descriptors)
            raise
        return reply, descriptors

    def _query_allocations(self, connection: UnixSocketConnection, deadline: float) -> list[Allocation]:
        table: list[Allocation] = []
        while True:
            query: Message = {"operation": "allocations", "from": len(table)}
            reply, descriptors = self._query(connection, query, deadline)
            close_all(descriptors)
            rows, count = reply.get("allocations"), get_int(reply, "count")
            if not isinstance(rows, list) or not rows or not len(table) < count <= MAX_ALLOCATIONS:
                raise SourceCorrupt("the source's table of allocations is invalid")
            table.extend(self._allocation(row) for row in rows)
            if len(table) >= count:
                return table

    def _allocation(self, row: JsonValue) -> Allocation:
        numbers = [part for part in row if type(part) is int] if isinstance(row, list) else []
        if len(numbers) != _ROW or not 0 <= numbers[2] < len(self._uuids):
            raise SourceCorrupt("the source's table of allocations is invalid")
        if not 0 <= numbers[3] < len(HANDLE_TYPES):
            raise VersionMismatch("the source has an unknown type of memory", hint="update rfork")
        return Allocation(numbers[0], numbers[1], numbers[2], HANDLE_TYPES[numbers[3]])

    def _open_page(
        self,
        connection: UnixSocketConnection,
        allocations: AllocationTable,
        page: Sequence[int],
        device: int,
        deadline: float,
    ) -> None:
        query: Message = {"operation": "handles", "allocations": list(page)}
        reply, descriptors = self._query(connection, query, deadline)
        try:
            table = [allocations.table[index] for index in page]
            for index, allocation, handle in zip(page, table, _handles(reply, table, descriptors), strict=True):
                try:
                    opened = self._driver.open(device, allocation.handle_type, handle, allocation.size)
                except DriverError as error:
                    uuid = self._uuids[allocation.device]
                    raise explain_open_error(
                        error, allocation.handle_type, uuid, self._driver, self._parameters
                    ) from error
                self._opened[index, device] = opened
        finally:
            close_all(descriptors)


def _handles(reply: Message, table: Sequence[Allocation], descriptors: Sequence[int]) -> list[IpcHandle]:
    """Return the handles in a reply. Raises SourceCorrupt if they do not match the allocations."""
    names = reply.get("handles")
    if not isinstance(names, list) or len(names) != len(table):
        raise SourceCorrupt("the source did not send the requested handles")
    unused, handles = list(descriptors), list[IpcHandle]()
    for name, allocation in zip(names, table, strict=True):
        if allocation.handle_type == "descriptor":
            if not unused:
                raise SourceCorrupt("the source did not send the descriptors of its memory")
            handles.append(IpcHandle(descriptor=unused.pop(0)))
            continue
        try:
            data = bytes.fromhex(name) if isinstance(name, str) else b""
        except ValueError:
            data = b""
        if len(data) != HANDLE_BYTES:
            raise SourceCorrupt(f"the source sent a handle that does not have {HANDLE_BYTES} bytes")
        handles.append(IpcHandle(data))
    return handles
