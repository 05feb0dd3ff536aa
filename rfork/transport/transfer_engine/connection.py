"""What all reads from one source share on the target: engine, rate, staging memory, and how it ends."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rfork.errors import SourceError, SourceGone
from rfork.transport.bucket import SLICE_S, Bucket
from rfork.transport.transfer_engine.engine import Engine
from rfork.transport.transfer_engine.plan import SIZES, STAGING_BYTES, Request, head

SHORTEST_WAIT_S = 0.0002
"""Between two looks at reads that are under way."""

STAGING_BUFFERS = 4
"""A staged read is under way while another is copied out; four buffers serve two callers at once."""

LEAST_HELD_BYTES = 256 << 10
"""Bytes of one read under a rate, at least: a read costs 40 to 80 µs whatever its size."""
LEAST_HELD_IN_FLIGHT, HELD_IN_FLIGHT_S = 4 << 20, 0.002
"""Bytes in flight under a rate, all reads together: so many, or those of so long where that is more. What is
in flight comes however low the next rate is, so a source that asks for less gets it soon."""


class Connection:
    """An engine that reads from one source, shared by all calls of a reader. Runs on the target; thread-safe.

    The engine cannot break a single read off. When reads do not end after deadline and grace, the
    whole engine is taken down, which stops them for certain; the connection is then spent, and further
    use of it raises the error that spent it.
    """

    def __init__(self, engine: Engine, session: str) -> None:
        self.engine = engine
        self.session = session
        self.sizes = SIZES[engine.protocol]
        self._bucket = Bucket()
        self._flying = 0
        self._changed = threading.Condition()
        self.broken = threading.Event()
        self._error: SourceError | None = None
        self._inside = 0
        self._down = False
        self._staging_made = 0
        self._staging: deque[torch.Tensor] = deque()

    def hold_to(self, rate: int | None) -> None:
        """Take at most `rate` bytes a second: no code of the source runs that could hold this reader back.

        Reads that are under way run to their end at the speed of the link.
        """
        self._bucket.hold_to(rate)

    def spend(self, request: Request) -> tuple[Request, Request | None, float]:
        """What of a request may be started now, what is left of it, and the seconds to wait before either.

        What was started is given back with `landed`.
        """
        rate = self._bucket.rate
        first, left, held = request, None, 0.0
        with self._changed:
            if rate is not None:
                most = max(LEAST_HELD_IN_FLIGHT, int(rate * HELD_IN_FLIGHT_S))
                first, left = head(request, min(most, max(LEAST_HELD_BYTES, int(rate * SLICE_S))))
                full = self._flying > 0 and self._flying + first.length > most
                held = SHORTEST_WAIT_S if full else self._bucket.spend(first.length)
            if held <= 0:
                self._flying += first.length
        return first, left, held

    def landed(self, nbytes: int) -> None:
        """So many bytes of what was started are not in flight any more."""
        with self._changed:
            self._flying -= nbytes

    def close(self) -> None:
        """Take the engine down; reads under way raise SourceGone. Safe to call twice."""
        self.give_up(SourceGone(f"the reader of {self.session} was closed"))
        with self._changed:
            if self._inside == 0:
                self._take_down()
            self._changed.wait_for(lambda: self._down)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Hold the engine up; on leaving a broken reader, wait until its engine is down."""
        with self._changed:
            self.raise_if_spent()
            self._inside += 1
        try:
            yield
        except SourceError:
            raise
        except BaseException:
            # An interrupt or a bug: reads may be under way that nobody looks at any more.
            self.give_up(SourceGone(f"the reader of {self.session} was interrupted"))
            raise
        finally:
            with self._changed:
                self._inside -= 1
                if self.broken.is_set() and self._inside == 0:
                    self._take_down()
                # Only then can no more bytes land.
                self._changed.wait_for(lambda: self._down or not self.broken.is_set())

    def raise_if_spent(self) -> None:
        """Raise once more what spent the reader, if anything did."""
        if self._error is not None:
            raise type(self._error)(str(self._error))

    def _take_down(self) -> None:
        if not self._down:
            self.engine.close()
            self._staging.clear()
            self._down = True
            self._changed.notify_all()

    def give_up(self, error: SourceError) -> None:
        """Spend the reader: every read under way leaves at its next look."""
        with self._changed:
            if self._error is None:
                self._error = error
            self.broken.set()
            self._changed.notify_all()

    def take_staging(self, *, wait_until: float | None) -> torch.Tensor | None:
        """A staging buffer; None when there is none (by `wait_until`, if given) or the reader is spent."""
        with self._changed:
            if not self._staging and self._staging_made < STAGING_BUFFERS:
                buffer = torch.empty(STAGING_BYTES, dtype=torch.uint8)
                if self.engine.protocol == "rdma":
                    self.engine.register([(buffer.data_ptr(), STAGING_BYTES)])
                self._staging_made += 1
                return buffer
            if wait_until is not None:
                limit = max(wait_until - time.monotonic(), 0)
                self._changed.wait_for(lambda: self._staging or self._error is not None, limit)
            return self._staging.popleft() if self._staging else None

    def give_staging(self, buffer: torch.Tensor) -> None:
        """Give a buffer back that no read fills any more."""
        with self._changed:
            self._staging.append(buffer)
            self._changed.notify()
