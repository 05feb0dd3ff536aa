"""Streams of copies: made when wanted, waited for with a deadline, and kept for the next read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from rfork.errors import SourceTimeout, TargetError
from rfork.logs import logger
from rfork.transport.cuda_ipc.copy_plan import CopyPlan
from rfork.transport.cuda_ipc.driver import CopyOp, CopyStream, Driver, DriverError
from rfork.transport.cuda_ipc.source_memory import SourceMemory

MIN_WAIT_S, MAX_WAIT_S = 0.00005, 0.002
WARN_S: Final = 5.0

log = logger(__name__)


class StreamCopier:
    """Does the copies of reads; thread-safe: each copies on streams of its own.

    A copy that was begun cannot be broken off, so every way out of `copy` waits for those under way. Once
    `broken` is set, `check` says why by raising it.
    """

    def __init__(
        self, driver: Driver, memory: SourceMemory, broken: threading.Event, check: Callable[[], None]
    ) -> None:
        self._driver = driver
        self._memory = memory
        self._broken = broken
        self._check = check
        self._lock = threading.Lock()
        self._idle: dict[int, list[CopyStream]] = {}

    def close(self) -> None:
        """Let the streams go; after the last `copy`."""
        with self._lock:
            streams = [lane for idle in self._idle.values() for lane in idle]
            self._idle.clear()
        for lane in streams:
            _close(lane)

    def copy(self, wanted: CopyPlan, deadline: float) -> None:
        """Do them. Raises SourceTimeout at the deadline, TargetError when a device fails, or as `check`."""
        streams: list[tuple[int, CopyStream]] = []
        try:
            for device in wanted.allocations_needed:
                lane = self._stream(device)
                streams.append((device, lane))
                address = self._memory.address
                lane.queue(
                    [
                        CopyOp(address(step.allocation, device) + step.offset, step.local, step.length)
                        for step in wanted.copies
                        if step.device == device
                    ]
                )
            self._wait(streams, deadline)
        except DriverError as error:
            raise TargetError(f"a copy from the source's GPU memory failed: {error}") from error
        finally:
            self._drain(streams)

    def _wait(self, streams: Sequence[tuple[int, CopyStream]], deadline: float) -> None:
        """Return once all copies have ended.

        Raises SourceTimeout at the deadline, DriverError, or what ended this.
        """
        wait = MIN_WAIT_S
        while not all(lane.done() for _, lane in streams):
            if self._broken.wait(wait):
                self._check()
            if time.monotonic() >= deadline:
                raise SourceTimeout("copies from the source's GPU were not done by the deadline")
            wait = min(wait * 1.5, MAX_WAIT_S)

    def _drain(self, streams: Sequence[tuple[int, CopyStream]]) -> None:
        """Give the streams back once nothing is under way on them; those that failed are dropped."""
        for device, lane in streams:
            try:
                warn_at = time.monotonic() + WARN_S
                # However long: bytes that land later, where another source's are by then, are worse. A device
                # that is lost says so, and nothing lands any more.
                while not lane.done():
                    if time.monotonic() >= warn_at:
                        log.warning("copies out of a source's GPU memory still go on", device=device)
                        warn_at += WARN_S
                    time.sleep(MAX_WAIT_S)
            except DriverError as error:
                log.warning("a stream of copies failed", device=device, because=str(error))
                _close(lane)
            else:
                with self._lock:
                    self._idle.setdefault(device, []).append(lane)

    def _stream(self, device: int) -> CopyStream:
        with self._lock:
            if self._idle.get(device):
                return self._idle[device].pop()
        return self._driver.copies(device)


def _close(lane: CopyStream) -> None:
    try:
        lane.close()
    except DriverError as error:
        log.warning("a stream cannot be let go", because=str(error))
