"""What a storage server does wrong, and when: scripts for `tests.storage_server` and `tests.fault_proxy`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StallFault:
    """Sends `after` bytes of the body (None: not even a head), then nothing until the script is released."""

    after: int | None = 0


@dataclass(frozen=True, slots=True)
class ResetFault:
    """Resets the connection (RST) after so many bytes of the body; None: before the head."""

    after: int | None = 0


@dataclass(frozen=True, slots=True)
class TruncateFault:
    """Ends the connection in order after so many bytes of a body that was promised whole; None: no head."""

    after: int | None = 0


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """Answers with a status, fields and a text, which may come in chunked coding."""

    status: int
    fields: Mapping[str, str] = field(default_factory=dict)
    text: bytes = b""
    chunked: bool = False


@dataclass(frozen=True, slots=True)
class HeaderFields:
    """Answers as it should, but for these fields of the head (None: left out). For `StorageServer` alone."""

    fields: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class FullObject:
    """Answers 200 with the whole object, whatever range was asked for. For `StorageServer` alone."""


@dataclass(frozen=True, slots=True)
class ReplaceObject:
    """Sends `after` bytes of the object, then puts `data` in its place and ends the connection in order.

    For `StorageServer` alone.
    """

    data: bytes
    after: int = 0


Fault = StallFault | ResetFault | TruncateFault | ErrorStatus | HeaderFields | FullObject | ReplaceObject


class FaultScript:
    """Which answers go wrong, in the order of requests. Thread-safe.

    ::

        script.then(Reset(after=1000), None, Status(503))   # the first and third of the next three requests
        script.then(Whole(), path="a.bin")                  # the next request whose path holds "a.bin"
        script.always(Status(403))                          # every one that no other fault is meant for
        script.release()                                    # those that stall go on
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: dict[str, deque[Fault | None]] = {}
        self._always: dict[str, Fault] = {}
        self._released = threading.Event()
        self._stalled = threading.Semaphore(0)

    def then(self, *faults: Fault | None, path: str = "") -> None:
        """What the next requests, whose path holds `path`, meet; None: a good answer."""
        with self._lock:
            self._next.setdefault(path, deque()).extend(faults)

    def always(self, fault: Fault, path: str = "") -> None:
        """What every further such request meets."""
        with self._lock:
            self._always[path] = fault

    def clear(self) -> None:
        """All is well from now on; what stalls still does."""
        with self._lock:
            self._next.clear()
            self._always.clear()

    def release(self) -> None:
        """Let everything that stalls go on, now and from now on."""
        self._released.set()

    def wait_stalled(self, deadline_s: float = 60.0) -> None:
        """Wait until one more answer stalls. Raises TimeoutError where none does."""
        if not self._stalled.acquire(timeout=deadline_s):
            raise TimeoutError("no answer stalls")

    def next_fault(self, path: str) -> Fault | None:
        """For the server: what becomes of this request."""
        with self._lock:
            for part, faults in self._next.items():
                if faults and part in path:
                    return faults.popleft()
            return next((fault for part, fault in self._always.items() if part in path), None)

    def wait_released(self) -> None:
        """For the server: wait until the script is released."""
        self._stalled.release()
        self._released.wait()
