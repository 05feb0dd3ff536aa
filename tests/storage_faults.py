"""Faults of a storage server, and scripts that schedule them, for `tests.storage_server` and
`tests.fault_proxy`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StallFault:
    """Send `after` bytes of the body (None: not even a head), then nothing until the script is released."""

    after: int | None = 0


@dataclass(frozen=True, slots=True)
class ResetFault:
    """Reset the connection (RST) after `after` bytes of the body; None: before the head."""

    after: int | None = 0


@dataclass(frozen=True, slots=True)
class TruncateFault:
    """Close the connection after `after` bytes of a body with a larger Content-Length; None: before the head."""

    after: int | None = 0


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """Respond with a status, header fields and a text, optionally chunked."""

    status: int
    fields: Mapping[str, str] = field(default_factory=dict)
    text: bytes = b""
    chunked: bool = False


@dataclass(frozen=True, slots=True)
class HeaderFields:
    """Respond normally with changed header fields (None: omitted). `StorageServer` only."""

    fields: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class FullObject:
    """Respond with 200 and the complete object regardless of the requested range. `StorageServer` only."""


@dataclass(frozen=True, slots=True)
class ReplaceObject:
    """Send `after` bytes of the object, then replace it by `data` and close the connection.

    `StorageServer` only.
    """

    data: bytes
    after: int = 0


Fault = StallFault | ResetFault | TruncateFault | ErrorStatus | HeaderFields | FullObject | ReplaceObject


class FaultScript:
    """Schedule of faults in the order of requests. Thread-safe.

    ::

        script.then(ResetFault(after=1000), None, ErrorStatus(503))   # the first and third of the next three requests
        script.then(FullObject(), path="a.bin")                       # the next request whose path contains "a.bin"
        script.always(ErrorStatus(403))                               # every request without another fault
        script.release()                                              # stalled responses continue
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: dict[str, deque[Fault | None]] = {}
        self._always: dict[str, Fault] = {}
        self._released = threading.Event()
        self._stalled = threading.Semaphore(0)

    def then(self, *faults: Fault | None, path: str = "") -> None:
        """Schedule faults for the next requests whose path contains `path`; None: a normal response."""
        with self._lock:
            self._next.setdefault(path, deque()).extend(faults)

    def always(self, fault: Fault, path: str = "") -> None:
        """Apply a fault to every further request."""
        with self._lock:
            self._always[path] = fault

    def clear(self) -> None:
        """Remove all faults; stalled responses stay stalled."""
        with self._lock:
            self._next.clear()
            self._always.clear()

    def release(self) -> None:
        """Let all stalled responses continue, including future ones."""
        self._released.set()

    def wait_stalled(self, deadline_s: float = 60.0) -> None:
        """Wait until one more response stalls. Raises TimeoutError."""
        if not self._stalled.acquire(timeout=deadline_s):
            raise TimeoutError("no response stalls")

    def next_fault(self, path: str) -> Fault | None:
        """Return the fault of a request; called by the server."""
        with self._lock:
            for part, faults in self._next.items():
                if faults and part in path:
                    return faults.popleft()
            return next((fault for part, fault in self._always.items() if part in path), None)

    def wait_released(self) -> None:
        """Wait until the script is released; called by the server."""
        self._stalled.release()
        self._released.wait()
