"""The target side: image ranges copied from the source's GPU memory into the target's own."""

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
    """One source's image. Runs on the target; thread-safe: each read under way has a stream of its own.

    `remote` are the source's addresses, `target` this side's allocations, `source_idle_timeout_s` the seconds that the
    source may take for an answer. A copy that was begun cannot be broken off, so every way out of a read
    waits for those under way: 64 MiB at most.
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
        stall_s: float,
    ) -> None:
        self._connections = connections
        self._memory = memory
        self._image = image
        self._token = token
        self._remote = remote
        self._target = target
        self._stall_s = stall_s
        self._attaching = threading.Lock()
        self._source_pin: SourcePin | None = None
        self._changed = threading.Condition()
        self._inside = 0
        self._error: RforkError | None = None
        self._broken = threading.Event()
        self._down = threading.Event()
        self._copier = StreamCopier(driver, memory, self._broken, self._check)

    def open(self, deadline: float) -> None:
        """Hold on to the source, and open an allocation of each kind on each GPU, to see whether it works.

        Raises as `read` does, and TransportUnavailable kinds.
        """
        with self._use():
            areas = self._areas(deadline)
            rising = list(enumerate(areas.table))
            firsts = {(area.device, area.handle_type): index for index, area in reversed(rising)}
            for device in self._target.devices:
                self._memory.open(list(firsts.values()), device, deadline)

    def read(self, begin: int, end: int, deadline: float) -> None:
        """Copy image range `[begin, end)` into the target image; see `Reader.read`.

        A range outside the image is a ValueError.
        """
        self._image.segments(begin, end)
        with self._use():
            at = begin
            while at < end:
                at += self._slice(at, min(end, at + protocol.SLICE_BYTES), deadline)

    def set_rate_limit(self, rate: int | None) -> None:
        """Nothing to do: the source lends as slowly as it likes. See `Reader.set_rate_limit`."""

    def close(self) -> None:
        """Let go of the source's memory; reads under way raise SourceUnavailable. Safe to call twice."""
        self._end(SourceUnavailable("this reader was closed"))
        self._down.wait()

    def _slice(self, begin: int, end: int, deadline: float) -> int:
        """Copy the first bytes of a range; how many.

        A connection that drops is replaced once: a source that cut this reader off says why when it is asked
        again.
        """
        wanted = self._steps(begin, end, deadline)
        for device, areas in wanted.allocations_needed.items():
            self._open(areas, device, deadline)
        try:
            return self._request_range(begin, end, wanted, deadline)
        except SourceUnavailable as first:
            self._check()
            log.info("connection replaced", because=str(first), missing=end - begin)
            return self._request_range(begin, end, wanted, deadline)

    def _open(self, areas: Sequence[int], device: int, deadline: float) -> None:
        """What did not show when this transport was chosen counts as the source's failure now."""
        try:
            self._memory.open(areas, device, deadline)
        except TransportUnavailable as error:
            raise SourceUnavailable(f"the rest of the source cannot be had: {error}", hint=error.hint) from error

    def _request_range(self, begin: int, end: int, wanted: CopyPlan, deadline: float) -> int:
        with self._connections.lease(self._remaining(deadline)) as connection:
            question: Message = {"ask": "borrow", "token": self._token(), "begin": begin, "end": end}
            connection.send(question, deadline=self._remaining(deadline))
            reply, descriptors = connection.receive(self._remaining(deadline))
            try:
                raise_error(reply)
                lent = get_int(reply, "lent")
                if not 0 < lent <= end - begin:
                    raise SourceCorrupt(f"the source lent {lent} of {end - begin} bytes")
                if lent < end - begin:
                    wanted = self._steps(begin, begin + lent, deadline)
                self._copy_range(wanted, descriptors, deadline)
            except SourceCorrupt:
                if not connection.is_idle:
                    raise SourceUnavailable("the source took back what it lent") from None
                raise
            finally:
                close_all(descriptors)
            connection.send({"ask": "return"}, deadline=self._remaining(deadline))
            reply, descriptors = connection.receive(self._remaining(deadline))
            close_all(descriptors)
            raise_error(reply)
            get_int(reply, "returned")
        return lent

    def _copy_range(self, wanted: CopyPlan, descriptors: Sequence[int], deadline: float) -> None:
        """Do the copies, then take what came in a file, while the bytes are lent."""
        if wanted.copies:
            self._copier.copy(wanted, deadline)
        if not wanted.on_host:
            return
        if len(descriptors) != 1:
            raise SourceCorrupt("the source sent no file of its bytes in host memory")
        offset = 0
        for begin, end in wanted.on_host:
            with self._image.writable(begin, end) as views:
                for view in views:
                    _fill_from(descriptors[0], offset, view)
                    offset += view.nbytes

    def _steps(self, begin: int, end: int, deadline: float) -> CopyPlan:
        pieces = common_pieces(self._remote.segments(begin, end), self._image.segments(begin, end))
        return plan_copies(pieces, begin, self._areas(deadline), self._target)

    def _areas(self, deadline: float) -> AllocationTable:
        """The source's allocations; it is held on to from the first question on."""
        if not self._attaching.acquire(timeout=max(deadline - time.monotonic(), 0)):
            raise SourceTimeout("the source did not let this side hold on to it in time")
        try:
            if self._source_pin is None:
                self._source_pin = SourcePin(self._connections, self._token, self._remaining(deadline), self._end)
        finally:
            self._attaching.release()
        return self._memory.areas(self._remaining(deadline))

    def _remaining(self, deadline: float) -> float:
        return min(deadline, time.monotonic() + self._stall_s)

    @contextmanager
    def _use(self) -> Iterator[None]:
        """Keep the source's memory open inside the block."""
        with self._changed:
            self._check()
            self._inside += 1
        try:
            yield
        except SourceUnavailable:
            self._check()  # closed by this side, or by the source: that is the reason
            raise
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise type(self._error)(str(self._error))

    def _end(self, error: RforkError) -> None:
        """Spend the reader: no read goes on, and once none is under way all is let go.

        Only the first one counts.
        """
        with self._changed:
            if self._error is not None:
                return
            self._error = error
        self._broken.set()
        self._connections.close()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._inside == 0)
            self._copier.close()
            self._memory.close()
            if self._source_pin is not None:
                self._source_pin.release()
        finally:
            self._down.set()


def _fill_from(descriptor: int, offset: int, view: memoryview) -> None:
    """Fill a view from a file. Raises SourceCorrupt where it ends too early, or is none."""
    done = 0
    while done < view.nbytes:
        try:
            count = os.preadv(descriptor, [view[done:]], offset + done)
        except OSError as error:
            raise SourceCorrupt(f"the source's bytes in host memory cannot be read: {error.strerror}") from None
        if not count:
            raise SourceCorrupt("the source sent fewer bytes of host memory than it lent")
        done += count
