"""Target side: copies image ranges from the source's GPU memory into the target's image."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from rfork.cuda.device import CopyOp, CudaStream
from rfork.cuda.library import DriverError
from rfork.errors import RforkError, SourceCorrupt, SourceTimeout, SourceUnavailable, TargetError, TransportUnavailable
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.transport.base import TokenSource
from rfork.transport.cuda_ipc import protocol
from rfork.transport.cuda_ipc.allocations import AllocationTable, CopyPlan, plan_copies
from rfork.transport.cuda_ipc.driver import IpcDriver
from rfork.transport.cuda_ipc.source_memory import SourceMemory
from rfork.transport.mooncake.read_plan import AddressMap, common_pieces
from rfork.transport.same_host.client import ConnectionPool
from rfork.transport.same_host.connection import Message, UnixSocketConnection, close_all, get_int, raise_error
from rfork.transport.same_host.memory_file import fill

MIN_WAIT_S, MAX_WAIT_S = 0.00005, 0.002
WARN_INTERVAL_S: Final = 5.0

log = logger(__name__)


class CudaIpcReader:
    """Reads one source's image. Runs on the target; thread-safe: each concurrent read uses a separate stream.

    Parameters: `parameters`, those of the source's endpoint; `remote`, the source's addresses; `target`, this
    side's allocations. A running copy cannot be cancelled, so leaving a read always waits for running copies:
    at most one slice.
    """

    def __init__(
        self,
        driver: IpcDriver,
        connections: ConnectionPool,
        image: Image,
        token: TokenSource,
        parameters: Mapping[str, str],
        *,
        remote: AddressMap,
        target: AllocationTable,
    ) -> None:
        self._connections = connections
        self._image = image
        self._token = token
        self._remote = remote
        self._target = target
        self._changed = threading.Condition()
        self._active_reads = 0
        self._error: RforkError | None = None
        self._broken = threading.Event()
        self._released = threading.Event()
        self._memory = SourceMemory(driver, connections, token, parameters, self._fail)
        self._copier = _StreamCopier(driver, self._memory, self._broken, self._check)

    def open(self, deadline: float) -> None:
        """Pin the source, and test each handle type of each GPU by opening one allocation.

        Raises as `read`, and TransportUnavailable or a subclass.
        """
        with self._in_use():
            numbered = list(enumerate(self._memory.allocations(deadline).table))
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
            # Before the first slice is granted: a fence would wait for the opening.
            for device, allocations in self._plan(begin, end, deadline).allocations_needed.items():
                self._open(allocations, device, deadline)
            received, lost_at = begin, -1
            while received < end:
                try:
                    for slice_end in self._read_slices(received, end, deadline):
                        received = slice_end
                except SourceUnavailable as error:
                    # A lost connection is replaced once: a source that disconnected the reader reports the reason
                    # on the next request.
                    self._check()
                    if received == lost_at:
                        raise
                    lost_at = received
                    log.info("connection replaced", reason=str(error), missing=end - received)

    def set_rate_limit(self, rate: int | None) -> None:
        """Does nothing: the source throttles. See `Reader.set_rate_limit`."""

    def close(self) -> None:
        """Release the source's memory; reads in progress raise SourceUnavailable. Idempotent."""
        self._fail(SourceUnavailable("the reader was closed"))
        self._released.wait()

    def _open(self, allocations: Sequence[int], device: int, deadline: float) -> None:
        """Open allocations. After the transport has been selected, a failure is the source's."""
        try:
            self._memory.open(allocations, device, deadline)
        except TransportUnavailable as error:
            raise SourceUnavailable(f"cannot open more of the source's memory: {error}", hint=error.hint) from error

    def _read_slices(self, begin: int, end: int, deadline: float) -> Iterator[int]:
        """Copy a range slice by slice over one connection. Yield the end of what has been received after each.

        The request for a slice releases the previous one, whose bytes count once the reply confirms that.
        """
        reply_deadline = self._connections.reply_deadline
        with self._connections.lease(deadline) as connection:
            at = begin
            while at < end:
                slice_end, release = min(end, at + protocol.SLICE_BYTES), int(at > begin)
                plan = self._plan(at, slice_end, deadline)
                request: Message = {
                    "operation": "acquire",
                    "token": self._token(),
                    "begin": at,
                    "end": slice_end,
                    "release": release,
                }
                connection.send(request, deadline=reply_deadline(deadline))
                reply, descriptors = connection.receive(reply_deadline(deadline))
                try:
                    if release:
                        _check_released(reply)
                        yield at
                    raise_error(reply)
                    at += self._copy_granted(connection, reply, descriptors, at, slice_end, plan, deadline)
                finally:
                    close_all(descriptors)
            reply, descriptors = connection.exchange({"operation": "release"}, reply_deadline(deadline))
            close_all(descriptors)
            _check_released(reply)
        yield end

    def _copy_granted(
        self,
        connection: UnixSocketConnection,
        reply: Message,
        descriptors: Sequence[int],
        begin: int,
        end: int,
        plan: CopyPlan,
        deadline: float,
    ) -> int:
        """Copy what the source granted of a slice with this `plan`; return how many bytes."""
        try:
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
            fill(self._image, begin, end, descriptors[0], offset)
            offset += end - begin

    def _plan(self, begin: int, end: int, deadline: float) -> CopyPlan:
        pieces = common_pieces(self._remote.segments(begin, end), self._image.segments(begin, end))
        return plan_copies(pieces, begin, self._memory.allocations(deadline), self._target)

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
        finally:
            self._released.set()


def _check_released(reply: Message) -> None:
    """Raise the error in the reply, or SourceCorrupt, unless it confirms the release of the granted range."""
    if reply.get("released") != 1:
        raise_error(reply)
        raise SourceCorrupt("the source did not confirm that a range was released")


class _StreamCopier:
    """Runs the copies of reads on streams, which are created on demand and reused.

    Thread-safe: each call of `copy` uses separate streams. A running copy cannot be cancelled, so leaving
    `copy` always waits for running copies. Once `broken` is set, `check` raises the reason.
    """

    def __init__(
        self, driver: IpcDriver, memory: SourceMemory, broken: threading.Event, check: Callable[[], None]
    ) -> None:
        self._driver = driver
        self._memory = memory
        self._broken = broken
        self._check = check
        self._lock = threading.Lock()
        self._idle: dict[int, list[CudaStream]] = {}

    def close(self) -> None:
        """Destroy the streams, after the last `copy`."""
        with self._lock:
            streams = [stream for idle in self._idle.values() for stream in idle]
            self._idle.clear()
        for stream in streams:
            _close(stream)

    def copy(self, plan: CopyPlan, deadline: float) -> None:
        """Run the copies. Raises SourceTimeout at the deadline, TargetError if a device fails, or as `check`."""
        streams: list[tuple[int, CudaStream]] = []
        address = self._memory.address
        try:
            for device in plan.allocations_needed:
                stream = self._stream(device)
                streams.append((device, stream))
                stream.copy(
                    [
                        CopyOp(address(copy.allocation, device) + copy.offset, copy.local, copy.length)
                        for copy in plan.copies
                        if copy.device == device
                    ]
                )
            self._wait([stream for _, stream in streams], deadline)
        except DriverError as error:
            raise TargetError(f"a copy from the source's GPU memory failed: {error}") from error
        finally:
            self._drain(streams)

    def _wait(self, streams: Sequence[CudaStream], deadline: float) -> None:
        """Return when all copies have finished.

        Raises SourceTimeout at the deadline, DriverError, or as `check`.
        """
        wait = MIN_WAIT_S
        while not all(stream.done() for stream in streams):
            if self._broken.wait(wait):
                self._check()
            if time.monotonic() >= deadline:
                raise SourceTimeout("copies from the source's GPU did not finish before the deadline")
            wait = min(wait * 1.5, MAX_WAIT_S)

    def _drain(self, streams: Sequence[tuple[int, CudaStream]]) -> None:
        """Return the streams to the pool once nothing runs on them; drop those that failed."""
        for device, stream in streams:
            try:
                warn_at = time.monotonic() + WARN_INTERVAL_S
                # Wait without limit: bytes that arrive after another source has filled the range would
                # corrupt it. If the device is lost, done() raises and no more bytes arrive.
                while not stream.done():
                    if time.monotonic() >= warn_at:
                        log.warning("copies from a source's GPU memory are still running", device=device)
                        warn_at += WARN_INTERVAL_S
                    time.sleep(MAX_WAIT_S)
            except DriverError as error:
                log.warning("copy stream failed", device=device, reason=str(error))
                _close(stream)
            else:
                with self._lock:
                    self._idle.setdefault(device, []).append(stream)

    def _stream(self, device: int) -> CudaStream:
        with self._lock:
            if self._idle.get(device):
                return self._idle[device].pop()
        return self._driver.copy_stream(device)


def _close(stream: CudaStream) -> None:
    try:
        stream.close()
    except DriverError as error:
        log.warning("cannot destroy a copy stream", reason=str(error))
