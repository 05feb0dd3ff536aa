"""The source's memory as opened by the target: each allocation once, on first use.

It is pinned while any of it is open: the source keeps its memory valid until the target has unmapped it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Final

from rfork.cuda import library as cuda
from rfork.cuda.library import HANDLE_BYTES, DriverError
from rfork.errors import (
    NotSameHost,
    PeerAccessUnavailable,
    RforkError,
    SourceCorrupt,
    SourceTimeout,
    SourceUnavailable,
    TransportUnavailable,
    VersionMismatch,
)
from rfork.logs import logger
from rfork.transport.base import TokenSource
from rfork.transport.cuda_ipc import protocol
from rfork.transport.cuda_ipc.allocations import MAX_ALLOCATIONS, AllocationTable
from rfork.transport.cuda_ipc.driver import (
    HANDLE_TYPES,
    Allocation,
    HandleType,
    ImportedAllocation,
    IpcDriver,
    IpcHandle,
)
from rfork.transport.same_host.client import ConnectionPool
from rfork.transport.same_host.connection import (
    JsonValue,
    Message,
    UnixSocketConnection,
    close_all,
    get_int,
    raise_error,
)

REPLY_TIMEOUT_S: Final = 60.0
"""Timeout of the source's reply to a pin's token: long, because it may be stopped, and reads have their own
deadlines.
"""
TOKEN_REFRESH_S: Final = 10.0
"""Interval in seconds at which a pin sends its newest token; the source waits a minute for it."""
_ROW: Final = 4

log = logger(__name__)


class SourceMemory:
    """Opened allocations of the source. Thread-safe. Each request carries the newest token.

    `parameters`: those of the source's endpoint. `on_end`: called on a thread of its own when the source
    requests the release of its memory, or has died; must close this object.
    """

    def __init__(
        self,
        driver: IpcDriver,
        connections: ConnectionPool,
        token: TokenSource,
        parameters: Mapping[str, str],
        on_end: Callable[[RforkError], None],
    ) -> None:
        self._driver = driver
        self._connections = connections
        self._token = token
        self._parameters = parameters
        self._on_end = on_end
        self._uuids = parameters.get(protocol.DEVICES, "").split(",")
        self._lock = threading.Lock()
        self._closed = False
        self._pin: _SourcePin | None = None
        self._allocations: AllocationTable | None = None
        self._opened: dict[tuple[int, int], ImportedAllocation] = {}

    def allocations(self, deadline: float) -> AllocationTable:
        """Return the source's allocations; their `device` is an index into the endpoint's devices.

        The first call pins the source. Raises as `Reader.read`.
        """
        with self._exclusive(deadline):
            if self._pin is None:
                self._pin = _SourcePin(self._connections, self._token, deadline, self._on_end)
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
        """Close all allocations and remove the pin, after all copies from them have finished and all
        connections were closed. Call once.
        """
        with self._lock:
            self._closed = True
            for opened in self._opened.values():
                try:
                    self._driver.close(opened)
                except DriverError as error:  # the source or the device failed
                    log.warning("driver failed to close a source's memory", reason=str(error))
            self._opened.clear()
        if self._pin is not None:
            self._pin.release()

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
        return connection.exchange({**query, "token": self._token()}, self._connections.reply_deadline(deadline))

    def _query_allocations(self, connection: UnixSocketConnection, deadline: float) -> list[Allocation]:
        table: list[Allocation] = []
        while True:
            reply, descriptors = self._query(connection, {"operation": "allocations", "from": len(table)}, deadline)
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


class _SourcePin:
    """Connection and descriptor that coordinate the release of a source's memory.

    The source closes the connection to request the release: `on_end` is then called on the pin's thread and
    must release the memory. Closing the descriptor signals the source that the memory has been released. The
    constructor sets the pin; raises as `Reader.read`.
    """

    def __init__(
        self,
        connections: ConnectionPool,
        token: TokenSource,
        deadline: float,
        on_end: Callable[[RforkError], None],
    ) -> None:
        self._connections = connections
        self._token = token
        self._on_end = on_end
        self._pinned: Future[int] = Future()
        self._thread = threading.Thread(target=self._run, args=(deadline,), name="rfork-cuda-ipc-pin", daemon=True)
        self._thread.start()
        self._descriptor = self._pinned.result()  # each step has a deadline

    def release(self) -> None:
        """Close the descriptor, after all connections to the source were closed. Call once."""
        os.close(self._descriptor)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self, deadline: float) -> None:
        try:
            with self._connections.lease(deadline) as connection:
                descriptors = self._send_token(connection, self._connections.reply_deadline(deadline))
                if len(descriptors) != 1:
                    close_all(descriptors)
                    raise SourceCorrupt("the source sent no descriptor that keeps its memory")
                self._pinned.set_result(descriptors[0])
                while True:
                    self._wait_for_refresh(connection)
                    close_all(self._send_token(connection, time.monotonic() + REPLY_TIMEOUT_S))
        except RforkError as error:
            if self._pinned.done():
                self._on_end(error)
            else:
                self._pinned.set_exception(error)
        except Exception as error:  # an unexpected error must reach the caller that waits for the pin
            log.exception("unexpected error in the connection that keeps a source's memory")
            if not self._pinned.done():
                self._pinned.set_exception(error)

    def _send_token(self, connection: UnixSocketConnection, deadline: float) -> list[int]:
        _, descriptors = connection.exchange({"operation": "pin", "token": self._token()}, deadline)
        return descriptors

    def _wait_for_refresh(self, connection: UnixSocketConnection) -> None:
        """Wait until the next token is due. Raises the error with which the source ends the pin."""
        try:
            message, descriptors = connection.receive(time.monotonic() + TOKEN_REFRESH_S)
        except SourceTimeout:
            return
        close_all(descriptors)
        raise_error(message)
        raise SourceCorrupt("unexpected message from the source")


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


_PEER_ACCESS_CODES: Final = (cuda.PEER_ACCESS_UNSUPPORTED, cuda.TOO_MANY_PEERS)
_MISMATCH_CODES: Final = (cuda.SYSTEM_DRIVER_MISMATCH, cuda.COMPAT_NOT_SUPPORTED_ON_DEVICE)
_PEER_ACCESS_HINT: Final = (
    "see `nvidia-smi topo -p2p r`: GPUs without NVLink need a common PCIe root without IOMMU or ACS between them, "
    "and MIG devices have no peer access; use another source or another transport"
)
_NAMESPACE_HINT: Final = (
    "share a PID namespace (one pod with shareProcessNamespace, or hostPID; docker: --pid) and the IPC namespace "
    "(hostIPC; --ipc); or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True on the source: such "
    "memory needs neither"
)
_VISIBILITY_HINT: Final = (
    "expose the GPUs of both instances to both containers (NVIDIA_VISIBLE_DEVICES); select with CUDA_VISIBLE_DEVICES"
)


def require_peer_access(driver: IpcDriver, uuids: Sequence[str], devices: Sequence[int]) -> None:
    """Raise PeerAccessUnavailable if a device of the target cannot address one of the source's devices.

    A GPU that is not visible here is not checked: if CUDA_VISIBLE_DEVICES hides it, its memory can still be
    opened; if the container lacks it, opening fails later. Raises DriverError.
    """
    for uuid in uuids:
        peer = driver.device_index(uuid)
        for device in devices:
            if peer is not None and not driver.can_access_peer(device, peer):
                raise PeerAccessUnavailable(
                    f"GPU {device} ({driver.uuid(device)}) cannot address the source's GPU {peer} ({uuid})",
                    hint=_PEER_ACCESS_HINT,
                )


def explain_open_error(
    error: DriverError, handle_type: HandleType, uuid: str, driver: IpcDriver, parameters: Mapping[str, str]
) -> TransportUnavailable:
    """Return the most likely reason for the driver's refusal to open the source's memory on the GPU `uuid`."""
    message = f"the source's GPU memory cannot be opened: {error}"
    if error.code in _PEER_ACCESS_CODES:
        return PeerAccessUnavailable(message, hint=_PEER_ACCESS_HINT)
    if error.code in _MISMATCH_CODES:
        return VersionMismatch(message, hint="the container's CUDA compatibility libraries do not match the driver")
    if handle_type == "legacy" and (names := protocol.differing_namespaces(parameters)):
        other_namespaces = " and another ".join(f"{name} namespace" for name in names)
        return NotSameHost(f"{message}; the source runs in another {other_namespaces}", hint=_NAMESPACE_HINT)
    if not _is_visible(driver, uuid):
        return TransportUnavailable(
            f"{message}; the source's GPU {uuid} is not visible to this process", hint=_VISIBILITY_HINT
        )
    if handle_type == "fabric":
        return TransportUnavailable(
            message, hint="grant the container access to the IMEX channel (/dev/nvidia-caps-imex-channels)"
        )
    return TransportUnavailable(message, hint="both instances need the same driver, and GPUs with unified addressing")


def _is_visible(driver: IpcDriver, uuid: str) -> bool:
    try:
        return driver.device_index(uuid) is not None
    except DriverError:
        return False
