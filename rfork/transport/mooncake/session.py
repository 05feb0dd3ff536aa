"""State shared by all reads from one source: engine, rate limit, staging buffers, failure. Runs on the
target.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rfork.errors import SourceError, SourceUnavailable
from rfork.net.token_bucket import SLICE_S, TokenBucket
from rfork.transport.mooncake.engine import MooncakeEngine
from rfork.transport.mooncake.read_plan import SIZES, STAGING_BYTES, RemoteRead, split_head

MIN_WAIT_S = 0.0002
"""Interval between polls of reads in flight."""

STAGING_BUFFERS = 4
"""One staged read is in flight while another is copied out; four buffers serve two concurrent callers."""

MIN_THROTTLED_BYTES = 256 << 10
"""Minimum bytes of one read under a rate limit: a read costs 40 to 80 µs regardless of its size."""
MIN_THROTTLED_IN_FLIGHT_BYTES, THROTTLED_IN_FLIGHT_S = 4 << 20, 0.002
"""Limits of the bytes in flight under a rate limit, over all reads: a size or a duration, whichever is
larger. Bytes in flight cannot be stopped, so a small limit lets a lower rate take effect soon.
"""


class TransferSession:
    """An engine that reads from one source, shared by all calls of a reader. Runs on the target; thread-safe.

    The engine cannot cancel a single read. If reads do not end after deadline and grace period, the engine is
    closed, which stops them reliably. The session is then broken, and further use raises the same error.
    """

    def __init__(self, engine: MooncakeEngine, session: str) -> None:
        self.engine = engine
        self.session = session
        self.sizes = SIZES[engine.protocol]
        self._bucket = TokenBucket()
        self._bytes_in_flight = 0
        self._changed = threading.Condition()
        self.broken = threading.Event()
        self._error: SourceError | None = None
        self._active_calls = 0
        self._is_closed = False
        self._staging_count = 0
        self._staging: deque[torch.Tensor] = deque()

    def set_rate_limit(self, rate: int | None) -> None:
        """Limit reads to `rate` bytes per second. The reader enforces it, because no code of the source runs.

        Reads in flight finish at full speed.
        """
        self._bucket.set_rate(rate)

    def consume(self, request: RemoteRead) -> tuple[RemoteRead, RemoteRead | None, float]:
        """Return the part of a request that may start now, the rest, and the seconds to wait before either.

        Call `record_completion` for a part that was started.
        """
        rate = self._bucket.rate
        head, rest, wait_s = request, None, 0.0
        with self._changed:
            if rate is not None:
                max_bytes = max(MIN_THROTTLED_IN_FLIGHT_BYTES, int(rate * THROTTLED_IN_FLIGHT_S))
                head, rest = split_head(request, min(max_bytes, max(MIN_THROTTLED_BYTES, int(rate * SLICE_S))))
                is_full = self._bytes_in_flight > 0 and self._bytes_in_flight + head.length > max_bytes
                wait_s = MIN_WAIT_S if is_full else self._bucket.consume(head.length)
            if wait_s <= 0:
                self._bytes_in_flight += head.length
        return head, rest, wait_s

    def record_completion(self, nbytes: int) -> None:
        """Subtract the bytes of a finished read from the bytes in flight."""
        with self._changed:
            self._bytes_in_flight -= nbytes

    def close(self) -> None:
        """Close the engine; reads in progress raise SourceUnavailable. Idempotent."""
        self.fail(SourceUnavailable(f"the reader of {self.session} was closed"))
        with self._changed:
            if self._active_calls == 0:
                self._close_engine()
            self._changed.wait_for(lambda: self._is_closed)

    @contextmanager
    def acquire(self) -> Iterator[None]:
        """Keep the engine open within the context; when leaving a broken session, wait until its engine is
        closed.
        """
        with self._changed:
            self.check_open()
            self._active_calls += 1
        try:
            yield
        except SourceError:
            raise
        except BaseException:
            # An interrupt or a bug: reads may be in flight that no call polls any more.
            self.fail(SourceUnavailable(f"the reader of {self.session} was interrupted"))
            raise
        finally:
            with self._changed:
                self._active_calls -= 1
                if self.broken.is_set() and self._active_calls == 0:
                    self._close_engine()
                # Only after that no more bytes can arrive.
                self._changed.wait_for(lambda: self._is_closed or not self.broken.is_set())

    def check_open(self) -> None:
        """Raise the error that broke the session, if any."""
        if self._error is not None:
            raise type(self._error)(str(self._error))

    def _close_engine(self) -> None:
        if not self._is_closed:
            self.engine.close()
            self._staging.clear()
            self._is_closed = True
            self._changed.notify_all()

    def fail(self, error: SourceError) -> None:
        """Break the session: every read in progress stops at its next poll."""
        with self._changed:
            if self._error is None:
                self._error = error
            self.broken.set()
            self._changed.notify_all()

    def acquire_staging(self, *, wait_until: float | None) -> torch.Tensor | None:
        """Return a staging buffer; None if none is free (by `wait_until`, if given) or the session is broken."""
        with self._changed:
            if not self._staging and self._staging_count < STAGING_BUFFERS:
                buffer = torch.empty(STAGING_BYTES, dtype=torch.uint8)
                if self.engine.protocol == "rdma":
                    self.engine.register([(buffer.data_ptr(), STAGING_BYTES)])
                self._staging_count += 1
                return buffer
            if wait_until is not None:
                timeout_s = max(wait_until - time.monotonic(), 0)
                self._changed.wait_for(lambda: self._staging or self._error is not None, timeout_s)
            return self._staging.popleft() if self._staging else None

    def release_staging(self, buffer: torch.Tensor) -> None:
        """Return a buffer that no read uses any more."""
        with self._changed:
            self._staging.append(buffer)
            self._changed.notify()
