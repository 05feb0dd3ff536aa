"""Streams of copies: made when wanted, waited for with a deadline, and kept for the next read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from rfork.errors import SourceStalled, TargetError
from rfork.logs import logger
from rfork.transport.cuda_ipc.driver import Copies, Copy, Driver, DriverError
from rfork.transport.cuda_ipc.mapping import SourceMemory
from rfork.transport.cuda_ipc.steps import Steps

SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.00005, 0.002
WARN_S: Final = 5.0

log = logger(__name__)


class Copier:
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
        self._idle: dict[int, list[Copies]] = {}

    def close(self) -> None:
        """Let the streams go; after the last `copy`."""
        with self._lock:
            lanes = [lane for idle in self._idle.values() for lane in idle]
            self._idle.clear()
        for lane in lanes:
            _close(lane)

    def copy(self, wanted: Steps, deadline: float) -> None:
        """Do them. Raises SourceStalled at the deadline, TargetError when a device fails, or as `check`."""
        lanes: list[tuple[int, Copies]] = []
        try:
            for device in wanted.needed:
                lane = self._lane(device)
                lanes.append((device, lane))
                address = self._memory.address
                lane.queue(
                    [
                        Copy(address(step.area, device) + step.offset, step.local, step.length)
                        for step in wanted.copies
                        if step.device == device
                    ]
                )
            self._wait(lanes, deadline)
        except DriverError as error:
            raise TargetError(f"a copy from the source's GPU memory failed: {error}") from error
        finally:
            self._drain(lanes)

    def _wait(self, lanes: Sequence[tuple[int, Copies]], deadline: float) -> None:
        """Return once all copies have ended.

        Raises SourceStalled at the deadline, DriverError, or what ended this.
        """
        wait = SHORTEST_WAIT_S
        while not all(lane.done() for _, lane in lanes):
            if self._broken.wait(wait):
                self._check()
            if time.monotonic() >= deadline:
                raise SourceStalled("copies from the source's GPU were not done by the deadline")
            wait = min(wait * 1.5, LONGEST_WAIT_S)

    def _drain(self, lanes: Sequence[tuple[int, Copies]]) -> None:
        """Give the streams back once nothing is under way on them; those that failed are dropped."""
        for device, lane in lanes:
            try:
                warn_at = time.monotonic() + WARN_S
                # However long: bytes that land later, where another source's are by then, are worse. A device
                # that is lost says so, and nothing lands any more.
                while not lane.done():
                    if time.monotonic() >= warn_at:
                        log.warning("copies out of a source's GPU memory still go on", device=device)
                        warn_at += WARN_S
                    time.sleep(LONGEST_WAIT_S)
            except DriverError as error:
                log.warning("a stream of copies failed", device=device, because=str(error))
                _close(lane)
            else:
                with self._lock:
                    self._idle.setdefault(device, []).append(lane)

    def _lane(self, device: int) -> Copies:
        with self._lock:
            if self._idle.get(device):
                return self._idle[device].pop()
        return self._driver.copies(device)


def _close(lane: Copies) -> None:
    try:
        lane.close()
    except DriverError as error:
        log.warning("a stream cannot be let go", because=str(error))
