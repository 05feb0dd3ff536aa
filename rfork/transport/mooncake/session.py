"""What all reads from one source share on the target: engine, rate, staging memory, and how it ends."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rfork.errors import SourceError, SourceUnavailable
from rfork.transport.mooncake.engine import MooncakeEngine
from rfork.transport.mooncake.read_plan import SIZES, STAGING_BYTES, RemoteRead, split_head
from rfork.transport.token_bucket import SLICE_S, TokenBucket

MIN_WAIT_S = 0.0002
"""Between two looks at reads that are under way."""

STAGING_BUFFERS = 4
"""A staged read is under way while another is copied out; four buffers serve two callers at once."""

MIN_THROTTLED_BYTES = 256 << 10
"""Bytes of one read under a rate, at least: a read costs 40 to 80 µs whatever its size."""
MIN_THROTTLED_IN_FLIGHT_BYTES, THROTTLED_IN_FLIGHT_S = 4 << 20, 0.002
"""Bytes in flight under a rate, all reads together: so many, or those of so long where that is more. What is
in flight comes however low the next rate is, so a source that asks for less gets it soon."""


class TransferSession:
    """An engine that reads from one source, shared by all calls of a reader. Runs on the target; thread-safe.

    The engine cannot break a single read off. When reads do not end after deadline and grace, the
    whole engine is taken down, which stops them for certain; the connection is then spent, and further
    use of it raises the error that spent it.
    """

    def __init__(self, engine: MooncakeEngine, session: str) -> None:
        self.engine = engine
        self.session = session
        self.sizes = SIZES[engine.protocol]
        self._bucket = TokenBucket()
        self._flying = 0
        self._changed = threading.Condition()
        self.broken = threading.Event()
        self._error: SourceError | None = None
        self._inside = 0
        self._down = False
        self._staging_made = 0
        self._staging: deque[torch.Tensor] = deque()

    def set_rate_limit(self, rate: int | None) -> None:
        """Take at most `rate` bytes a second: no code of the source runs that could hold this reader back.

        Reads that are under way run to their end at the speed of the link.
        """
        self._bucket.set_rate(rate)

    def consume(self, request: RemoteRead) -> tuple[RemoteRead, RemoteRead | None, float]:
        """What of a request may be started now, what is left of it, and the seconds to wait before either.

        What was started is given back with `record_completion`.
        """
        rate = self._bucket.rate
        first, left, wait_s = request, None, 0.0
        with self._changed:
            if rate is not None:
                max_bytes = max(MIN_THROTTLED_IN_FLIGHT_BYTES, int(rate * THROTTLED_IN_FLIGHT_S))
                first, left = split_head(request, min(max_bytes, max(MIN_THROTTLED_BYTES, int(rate * SLICE_S))))
                full = self._flying > 0 and self._flying + first.length > max_bytes
                wait_s = MIN_WAIT_S if full else self._bucket.consume(first.length)
            if wait_s <= 0:
                self._flying += first.length
        return first, left, wait_s

    def record_completion(self, nbytes: int) -> None:
        """So many bytes of what was started are not in flight any more."""
        with self._changed:
            self._flying -= nbytes

    def close(self) -> None:
        """Take the engine down; reads under way raise SourceUnavailable. Safe to call twice."""
        self.fail(SourceUnavailable(f"the reader of {self.session} was closed"))
        with self._changed:
            if self._inside == 0:
                self._tear_down()
            self._changed.wait_for(lambda: self._down)

    @contextmanager
    def acquire(self) -> Iterator[None]:
        """Hold the engine up; on leaving a broken reader, wait until its engine is down."""
        with self._changed:
            self.check_open()
            self._inside += 1
        try:
            yield
        except SourceError:
            raise
        except BaseException:
            # An interrupt or a bug: reads may be under way that nobody looks at any more.
            self.fail(SourceUnavailable(f"the reader of {self.session} was interrupted"))
            raise
        finally:
            with self._changed:
                self._inside -= 1
                if self.broken.is_set() and self._inside == 0:
                    self._tear_down()
                # Only then can no more bytes land.
                self._changed.wait_for(lambda: self._down or not self.broken.is_set())

    def check_open(self) -> None:
        """Raise once more what spent the reader, if anything did."""
        if self._error is not None:
            raise type(self._error)(str(self._error))

    def _tear_down(self) -> None:
        if not self._down:
            self.engine.close()
            self._staging.clear()
            self._down = True
            self._changed.notify_all()

    def fail(self, error: SourceError) -> None:
        """Spend the reader: every read under way leaves at its next look."""
        with self._changed:
            if self._error is None:
                self._error = error
            self.broken.set()
            self._changed.notify_all()

    def acquire_staging(self, *, wait_until: float | None) -> torch.Tensor | None:
        """A staging buffer; None when there is none (by `wait_for_shutdown`, if given) or the reader is spent."""
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

    def release_staging(self, buffer: torch.Tensor) -> None:
        """Give a buffer back that no read fills any more."""
        with self._changed:
            self._staging.append(buffer)
            self._changed.notify()
