"""Target side: copies image ranges from the source's GPU memory into the target's image."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rfork.errors import RforkError, SourceCorrupt, SourceTimeout, SourceUnavailable, TransportUnavailable
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.transport.base import TokenSource
from rfork.transport.cuda_ipc import protocol
from rfork.transport.cuda_ipc.allocations import AllocationTable
from rfork.transport.cuda_ipc.copy_plan import CopyPlan, plan_copies
from rfork.transport.cuda_ipc.driver import Driver
from rfork.transport.cuda_ipc.source_memory import SourceMemory
from rfork.transport.cuda_ipc.source_pin import SourcePin
from rfork.transport.cuda_ipc.stream_copier import StreamCopier
from rfork.transport.mooncake.read_plan import AddressMap, common_pieces
from rfork.transport.unix_socket.client import ConnectionPool
from rfork.transport.unix_socket.connection import close_all
from rfork.transport.unix_socket.messages import Message, get_int, raise_error

log = logger(__name__)


class CudaIpcReader:
    """Reads one source's image. Runs on the target; thread-safe: each concurrent read uses a separate stream.

    Parameters: `remote`, the source's addresses; `target`, this side's allocations; `idle_timeout_s`, timeout
    of a reply. A running copy cannot be cancelled, so leaving a read always waits for running copies: at most
    64 MiB.
    """

    def __init__(
        self,
        driver: Driver,
        connections: ConnectionPool,
        memory: SourceMemory,
        image: Image,
        token: TokenSource,
        *,
        remote: AddressMap,
        target: AllocationTable,
        idle_timeout_s: float,
    ) -> None:
        self._connections = connections
        self._memory = memory
        self._image = image
        self._token = token
        self._remote = remote
        self._target = target
        self._idle_timeout_s = idle_timeout_s
        self._pin_lock = threading.Lock()
        self._source_pin: SourcePin | None = None
        self._changed = threading.Condition()
        self._active_reads = 0
        self._error: RforkError | None = None
        self._broken = threading.Event()
        self._released = threading.Event()
        self._copier = StreamCopier(driver, memory, self._broken, self._check)

    def open(self, deadline: float) -> None:
        """Pin the source, and test each handle type of each GPU by opening one allocation.

        Raises as `read`, and TransportUnavailable or a subclass.
        """
        with self._in_use():
            allocations = self._allocations(deadline)
            numbered = list(enumerate(allocations.table))
            first_of_type = {
                (allocation.device, allocation.handle_type): index for index, allocation in reversed(numbered)
            }
            for device in self._target.devices:
                self._memory.open(list(first_of_type.values()), device, deadline)

    def read(self, begin: int, end: int, deadline: float) -> None:
        """Copy image range `[begin, end)` into the target image; see `Reader.read`.

        Raises ValueError for a range outside the image.
        """
        self._image.segments(begin, end)
        with self._in_use():
            at = begin
            while at < end:
                at += self._read_slice(at, min(end, at + protocol.SLICE_BYTES), deadline)

    def set_rate_limit(self, rate: int | None) -> None:
        """Does nothing: the source throttles. See `Reader.set_rate_limit`."""

    def close(self) -> None:
        """Release the source's memory; reads in progress raise SourceUnavailable. Idempotent."""
        self._fail(SourceUnavailable("the reader was closed"))
        self._released.wait()

    def _read_slice(self, begin: int, end: int, deadline: float) -> int:
        """Copy the first bytes of a range; return how many.

        A lost connection is replaced once: a source that disconnected the reader reports the reason on the
        next request.
        """
        plan = self._plan(begin, end, deadline)
        for device, allocations in plan.allocations_needed.items():
            self._open(allocations, device, deadline)
        try:
            return self._request_range(begin, end, plan, deadline)
        except SourceUnavailable as first:
            self._check()
            log.info("connection replaced", reason=str(first), missing=end - begin)
            return self._request_range(begin, end, plan, deadline)

    def _open(self, allocations: Sequence[int], device: int, deadline: float) -> None:
        """Open allocations. After the transport has been selected, a failure is the source's."""
        try:
            self._memory.open(allocations, device, deadline)
        except TransportUnavailable as error:
            raise SourceUnavailable(f"cannot open more of the source's memory: {error}", hint=error.hint) from error

    def _request_range(self, begin: int, end: int, plan: CopyPlan, deadline: float) -> int:
        with self._connections.lease(self._remaining(deadline)) as connection:
            request: Message = {"operation": "acquire", "token": self._token(), "begin": begin, "end": end}
            connection.send(request, deadline=self._remaining(deadline))
            reply, descriptors = connection.receive(self._remaining(deadline))
            try:
                raise_error(reply)
                granted = get_int(reply, "granted")
                if not 0 < granted <= end - begin:
                    raise SourceCorrupt(f"the source granted {granted} of {end - begin} bytes")
                if granted < end - begin:
                    plan = self._plan(begin, begin + granted, deadline)
                self._copy_range(plan, descriptors, deadline)
            except SourceCorrupt:
                if not connection.is_idle:
                    raise SourceUnavailable("the source revoked the granted range") from None
                raise
            finally:
                close_all(descriptors)
            connection.send({"operation": "release"}, deadline=self._remaining(deadline))
            reply, descriptors = connection.receive(self._remaining(deadline))
            close_all(descriptors)
            raise_error(reply)
            get_int(reply, "released")
        return granted

    def _copy_range(self, plan: CopyPlan, descriptors: Sequence[int], deadline: float) -> None:
        """Run the copies, then read the bytes of host memory from the file, while the range is granted."""
        if plan.copies:
            self._copier.copy(plan, deadline)
        if not plan.on_host:
            return
        if len(descriptors) != 1:
            raise SourceCorrupt("the source sent no file with its bytes in host memory")
        offset = 0
        for begin, end in plan.on_host:
            with self._image.writable(begin, end) as views:
                for view in views:
                    _fill_from(descriptors[0], offset, view)
                    offset += view.nbytes

    def _plan(self, begin: int, end: int, deadline: float) -> CopyPlan:
        pieces = common_pieces(self._remote.segments(begin, end), self._image.segments(begin, end))
        return plan_copies(pieces, begin, self._allocations(deadline), self._target)

    def _allocations(self, deadline: float) -> AllocationTable:
        """Return the source's allocations; the first call pins the source."""
        if not self._pin_lock.acquire(timeout=max(deadline - time.monotonic(), 0)):
            raise SourceTimeout("the source did not confirm in time that it keeps its memory")
        try:
            if self._source_pin is None:
                self._source_pin = SourcePin(self._connections, self._token, self._remaining(deadline), self._fail)
        finally:
            self._pin_lock.release()
        return self._memory.allocations(self._remaining(deadline))

    def _remaining(self, deadline: float) -> float:
        return min(deadline, time.monotonic() + self._idle_timeout_s)

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the source's memory open within the context."""
        with self._changed:
            self._check()
            self._active_reads += 1
        try:
            yield
        except SourceUnavailable:
            self._check()  # prefer the reason why either side closed the reader
            raise
        finally:
            with self._changed:
                self._active_reads -= 1
                self._changed.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise type(self._error)(str(self._error))

    def _fail(self, error: RforkError) -> None:
        """Fail the reader: reads stop, and when none is in progress all resources are released.

        Only the first error counts.
        """
        with self._changed:
            if self._error is not None:
                return
            self._error = error
        self._broken.set()
        self._connections.close()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._active_reads == 0)
            self._copier.close()
            self._memory.close()
            if self._source_pin is not None:
                self._source_pin.release()
        finally:
            self._released.set()


def _fill_from(descriptor: int, offset: int, view: memoryview) -> None:
    """Fill a view from a file. Raises SourceCorrupt if it is too short or not readable."""
    done = 0
    while done < view.nbytes:
        try:
            count = os.preadv(descriptor, [view[done:]], offset + done)
        except OSError as error:
            raise SourceCorrupt(f"the source's bytes in host memory cannot be read: {error.strerror}") from None
        if not count:
            raise SourceCorrupt("the source sent fewer bytes of host memory than it granted")
        done += count
