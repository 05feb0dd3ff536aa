"""Threads that read ranges of blobs, and how they end. Runs wherever weights are read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from rfork.errors import StorageError
from rfork.storage.blob import Blob
from rfork.storage.io.prefetch import POLL_INTERVAL_S

Item = TypeVar("Item")

GRACE_S = 1.0
"""Seconds that reads in progress have to end after an error or an interrupt, before their blobs are closed."""


def _nothing() -> None:
    """Release nothing."""


class ReaderThreads(Generic[Item]):
    """Daemon threads that share one iterator of items to read. Used for one `run`.

    After a StorageError, other reads that continue for long (they retry or hang) are ended by closing their blobs,
    which ends all but reads from a disk that hangs: those are waited for until an interrupt. An interrupt is always
    raised within seconds: a read that hangs then keeps its memory, and the blobs are closed.
    """

    def __init__(self, items: Iterator[Item], blobs: Iterable[Blob]) -> None:
        """`blobs` are those that the items read."""
        self._items = items
        self._blobs = tuple(blobs)
        self._planning = threading.Lock()
        self._changed = threading.Condition()
        self._running = self._ended = 0
        self._released = False
        self._release: Callable[[], None] = _nothing
        self._errors: list[BaseException] = []
        self.stopping = False
        """True once no item may be started any more."""
        self.abandoned = False
        """True once `run` has returned or raised: results of reads that are still in progress must be discarded."""

    def next(self) -> Item | None:
        """Return the next item; None at the end, and once reading stops. Called by the threads."""
        with self._planning:
            return None if self.stopping else next(self._items, None)

    def run(self, threads: int, work: Callable[[], None], release: Callable[[], None] | None = None) -> None:
        """Call `work` on each thread, which processes items until `next` returns None.

        Returns when all threads have ended. `release` is called once, when none of them runs any more: after an
        interrupt that may be after this method has raised. Raises the first error of `work`.
        """
        self._release = release or _nothing
        try:
            for _ in range(threads):
                # Daemon threads: a disk that hangs must not prevent an interrupted process from exiting.
                threading.Thread(target=self._serve, args=(work,), name="rfork-read", daemon=True).start()
            self._wait(lambda: self.stopping or self._ended == threads)
            self._stop(None)
        except BaseException:  # raised by a signal handler: wait for nothing that may hang
            self._stop(GRACE_S)
            raise
        finally:
            with self._changed:
                self.abandoned = True
            self._release_if_idle()
        errors, self._errors = self._errors, []
        try:
            if errors:
                raise errors[0]
        finally:
            # The frames of an error that refer to it would keep the memory that was read into until the garbage
            # collector ran.
            del errors

    def _stop(self, timeout_s: float | None) -> None:
        """Start no more reads, and wait for those in progress, at most `timeout_s` seconds (None: forever)."""
        with self._changed:
            self.stopping = True
        # Threads are not joined, because an interrupt may come while one is being started. A thread like that
        # exits immediately.
        if self._wait(self._is_idle, GRACE_S):
            return
        if timeout_s is not None or any(isinstance(error, StorageError) for error in self._errors):
            for blob in self._blobs:
                blob.close()
        self._wait(self._is_idle, timeout_s)

    def _is_idle(self) -> bool:
        return self._running == 0

    def _wait(self, done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until `done`, at most `timeout_s` seconds; return whether it is."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not done():
                # A signal that arrives just before an unbounded wait would not be handled.
                left = POLL_INTERVAL_S if until is None else until - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, POLL_INTERVAL_S))
        return True

    def _release_if_idle(self) -> None:
        with self._changed:
            if self._running or self._released:
                return
            self._released = True
            release, self._release = self._release, _nothing  # its owner refers to this object
        release()

    def _serve(self, work: Callable[[], None]) -> None:
        with self._changed:
            if self.stopping:
                return
            self._running += 1
        try:
            work()
        except BaseException as error:  # re-raised by `run`
            with self._changed:
                self._errors.append(error)
                self.stopping = True
        with self._changed:
            self._running -= 1
            self._ended += 1
            self._changed.notify_all()
            abandoned = self.abandoned
        if abandoned:
            self._release_if_idle()
