"""The source's memory as the target has it opened: each allocation once, when a read first needs it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rfork.errors import SourceCorrupt, SourceGone, SourceStalled, VersionMismatch
from rfork.logs import logger
from rfork.transport.base import TokenSource
from rfork.transport.cuda_ipc import words
from rfork.transport.cuda_ipc.areas import MOST_AREAS, Areas
from rfork.transport.cuda_ipc.driver import (
    HANDLE_BYTES,
    KINDS,
    Allocation,
    Driver,
    DriverError,
    Handle,
    Opened,
)
from rfork.transport.cuda_ipc.refusals import refusal
from rfork.transport.same_host.connection import Connection, close_all
from rfork.transport.same_host.dialling import Connections
from rfork.transport.same_host.messages import JsonValue, Message, number_in, raise_problem

_ROW = 4

log = logger(__name__)


class SourceMemory:
    """Thread-safe.

    Each question shows the newest token. `stall_s`: seconds that the source may take for an answer.
    """

    def __init__(
        self,
        driver: Driver,
        connections: Connections,
        token: TokenSource,
        parameters: Mapping[str, str],
        stall_s: float,
    ) -> None:
        self._driver = driver
        self._connections = connections
        self._token = token
        self._parameters = parameters
        self._uuids = parameters.get(words.DEVICES, "").split(",")
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._closed = False
        self._areas: Areas | None = None
        self._opened: dict[tuple[int, int], Opened] = {}

    def areas(self, deadline: float) -> Areas:
        """The source's allocations; `device` of each is its place among the endpoint's devices.

        Raises as `Reader.read` does.
        """
        with self._alone(deadline):
            if self._areas is None:
                with self._connections.borrowed(deadline) as connection:
                    self._areas = Areas(self._ask_areas(connection, deadline))
            return self._areas

    def open(self, indices: Sequence[int], device: int, deadline: float) -> None:
        """Have these of `areas` opened for a device of this side.

        Raises as `Reader.read`, and TransportUnusable.
        """
        areas = self.areas(deadline)
        with self._alone(deadline):
            missing = [index for index in indices if (index, device) not in self._opened]
            if not missing:
                return
            with self._connections.borrowed(deadline) as connection:
                for first in range(0, len(missing), words.HANDLES_A_PAGE):
                    page = missing[first : first + words.HANDLES_A_PAGE]
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
    def _alone(self, deadline: float) -> Iterator[None]:
        """One thread at a time asks; the others wait for what it learns."""
        if not self._lock.acquire(timeout=max(deadline - time.monotonic(), 0)):
            raise SourceStalled("the source's memory was not opened in time")
        try:
            if self._closed:
                raise SourceGone("this reader was closed")
            yield
        finally:
            self._lock.release()

    def _ask(self, connection: Connection, question: Message, deadline: float) -> tuple[Message, list[int]]:
        """Ask one question; the descriptors of its answer are the caller's."""
        until = min(deadline, time.monotonic() + self._stall_s)
        connection.send({**question, "token": self._token()}, deadline=until)
        answer, descriptors = connection.receive(until)
        try:
            raise_problem(answer)
        except BaseException:
            close_all(descriptors)
            raise
        return answer, descriptors

    def _ask_areas(self, connection: Connection, deadline: float) -> list[Allocation]:
        table: list[Allocation] = []
        while True:
            question: Message = {"ask": "areas", "from": len(table)}
            answer, descriptors = self._ask(connection, question, deadline)
            close_all(descriptors)
            rows, count = answer.get("areas"), number_in(answer, "count")
            if not isinstance(rows, list) or not rows or not len(table) < count <= MOST_AREAS:
                raise SourceCorrupt("the source's table of allocations is broken")
            table.extend(self._allocation(row) for row in rows)
            if len(table) >= count:
                return table

    def _allocation(self, row: JsonValue) -> Allocation:
        numbers = [part for part in row if type(part) is int] if isinstance(row, list) else []
        if len(numbers) != _ROW or not 0 <= numbers[2] < len(self._uuids):
            raise SourceCorrupt("the source's table of allocations is broken")
        if not 0 <= numbers[3] < len(KINDS):
            raise VersionMismatch(
                "the source has a kind of memory that is not known here", hint="update rfork"
            )
        return Allocation(numbers[0], numbers[1], numbers[2], KINDS[numbers[3]])

    def _open_page(
        self, connection: Connection, areas: Areas, page: Sequence[int], device: int, deadline: float
    ) -> None:
        question: Message = {"ask": "handles", "areas": list(page)}
        answer, descriptors = self._ask(connection, question, deadline)
        try:
            table = [areas.table[index] for index in page]
            for index, area, handle in zip(page, table, _handles(answer, table, descriptors), strict=True):
                try:
                    opened = self._driver.open(device, area.kind, handle, area.size)
                except DriverError as error:
                    uuid = self._uuids[area.device]
                    raise refusal(error, area.kind, uuid, self._driver, self._parameters) from error
                self._opened[index, device] = opened
        finally:
            close_all(descriptors)


def _handles(answer: Message, table: Sequence[Allocation], descriptors: Sequence[int]) -> list[Handle]:
    """The handles in an answer. Raises SourceCorrupt where they do not fit the allocations."""
    names = answer.get("handles")
    if not isinstance(names, list) or len(names) != len(table):
        raise SourceCorrupt("the source did not send the handles that it was asked for")
    left, handles = list(descriptors), list[Handle]()
    for name, area in zip(names, table, strict=True):
        if area.kind == "descriptor":
            if not left:
                raise SourceCorrupt("the source did not send the descriptors of its memory")
            handles.append(Handle(descriptor=left.pop(0)))
            continue
        try:
            data = bytes.fromhex(name) if isinstance(name, str) else b""
        except ValueError:
            data = b""
        if len(data) != HANDLE_BYTES:
            raise SourceCorrupt(f"the source sent a handle that does not have {HANDLE_BYTES} bytes")
        handles.append(Handle(data))
    return handles
