"""Runs copies on streams, which are created on demand and reused."""

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
WARN_INTERVAL_S: Final = 5.0

log = logger(__name__)


class StreamCopier:
    """Runs the copies of reads. Thread-safe: each call of `copy` uses separate streams.

    A running copy cannot be cancelled, so leaving `copy` always waits for running copies. Once `broken` is
    set, `check` raises the reason.
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
        """Destroy the streams, after the last `copy`."""
        with self._lock:
            streams = [stream for idle in self._idle.values() for stream in idle]
            self._idle.clear()
        for stream in streams:
            _close(stream)

    def copy(self, plan: CopyPlan, deadline: float) -> None:
        """Run the copies. Raises SourceTimeout at the deadline, TargetError if a device fails, or as `check`."""
        streams: list[tuple[int, CopyStream]] = []
        try:
            for device in plan.allocations_needed:
                stream = self._stream(device)
                streams.append((device, stream))
                address = self._memory.address
                stream.queue(
                    [
                        CopyOp(address(copy.allocation, device) + copy.offset, copy.local, copy.length)
                        for copy in plan.copies
                        if copy.device == device
                    ]
                )
            self._wait(streams, deadline)
        except DriverError as error:
            raise TargetError(f"a copy from the source's GPU memory failed: {error}") from error
        finally:
            self._drain(streams)

    def _wait(self, streams: Sequence[tuple[int, CopyStream]], deadline: float) -> None:
        """Return when all copies have finished.

        Raises SourceTimeout at the deadline, DriverError, or as `check`.
        """
        wait = MIN_WAIT_S
        while not all(stream.done() for _, stream in streams):
            if self._broken.wait(wait):
                self._check()
            if time.monotonic() >= deadline:
                raise SourceTimeout("copies from the source's GPU did not finish before the deadline")
            wait = min(wait * 1.5, MAX_WAIT_S)

    def _drain(self, streams: Sequence[tuple[int, CopyStream]]) -> None:
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

    def _stream(self, device: int) -> CopyStream:
        with self._lock:
            if self._idle.get(device):
                return self._idle[device].pop()
        return self._driver.copy_stream(device)


def _close(stream: CopyStream) -> None:
    try:
        stream.close()
    except DriverError as error:
        log.warning("cannot destroy a copy stream", reason=str(error))
