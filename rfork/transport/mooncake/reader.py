"""Target side: reads image ranges from the source's memory into the target's image.

`TransferEngineReader` owns what all reads from one source share: engine, rate limit, staging buffers, failure.
`ReadBatch` executes the reads of one call within its limits.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from rfork.cuda.device import flush_rdma_writes
from rfork.errors import SourceError, SourceTimeout, SourceUnavailable
from rfork.image.memory import Image
from rfork.image.staging import CPU
from rfork.net.token_bucket import SLICE_S, TokenBucket
from rfork.transport.mooncake.engine import MooncakeEngine, TransferState, ping_handshake_port
from rfork.transport.mooncake.read_plan import (
    SIZES,
    STAGING_BYTES,
    AddressMap,
    RemoteRead,
    common_pieces,
    plan_reads,
    split_head,
)

MIN_WAIT_S = 0.0002
"""Interval between polls of reads in flight."""

STAGING_BUFFERS = 16
"""One staged read is in flight while others are copied out: four buffers for each of four concurrent callers."""

MIN_THROTTLED_BYTES = 256 << 10
"""Minimum bytes of one read under a rate limit: a read costs 40 to 80 µs regardless of its size."""
MIN_THROTTLED_IN_FLIGHT_BYTES, THROTTLED_IN_FLIGHT_S = 4 << 20, 0.002
"""Limits of the bytes in flight under a rate limit, over all reads: a size or a duration, whichever is
larger. Bytes in flight cannot be stopped, so a small limit lets a lower rate take effect soon.
"""

MAX_INFLIGHT = 64
GRACE_S = 3.0
"""Time that unfinished reads get after the deadline: the engine fails a read without progress after 2 s."""
MAX_WAIT_S = 0.004
THROTTLE_POLL_S = 0.05
"""Maximum wait for the rate limit, because the limit may be raised in the meantime."""


class TransferEngineReader:
    """Reads one source's image over a separate engine. Runs on the target; thread-safe.

    The engine cannot cancel a single read. If reads do not end after deadline and grace period, the engine is
    closed, which stops them reliably. The reader is then broken, and further reads raise the same error.

    `flushed_gpus`: GPUs of the image whose writes by network cards must be flushed after each read.
    """

    def __init__(
        self,
        engine: MooncakeEngine,
        session: str,
        remote: AddressMap,
        image: Image,
        *,
        gather: bool,
        flushed_gpus: Sequence[torch.device] = (),
    ) -> None:
        self._flushed_gpus = flushed_gpus
        self._remote = remote
        self._image = image
        self._gather = gather and image.devices <= {CPU}
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

    def read(self, begin: int, end: int, deadline: float) -> None:
        """Copy image range `[begin, end)` into the target image; see `Reader.read`.

        Raises SourceUnavailable if the source disconnected or rejected a read, and SourceTimeout if it did
        not respond or the deadline passed; at most `GRACE_S` plus a ping (2 s) after the deadline. Raises TargetError
        if a GPU of this side fails.
        """
        pieces = common_pieces(self._remote.segments(begin, end), self._image.segments(begin, end))
        with self._acquire():
            ReadBatch(self, plan_reads(pieces, gather=self._gather, max_bytes=self.sizes.request), deadline).finish()
        for gpu in self._flushed_gpus:
            flush_rdma_writes(gpu)

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
    def _acquire(self) -> Iterator[None]:
        """Keep the engine open within the context; when leaving a broken reader, wait until its engine is
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
        """Raise the error that broke the reader, if any."""
        if self._error is not None:
            raise type(self._error)(str(self._error))

    def _close_engine(self) -> None:
        if not self._is_closed:
            self.engine.close()
            self._staging.clear()
            self._is_closed = True
            self._changed.notify_all()

    def fail(self, error: SourceError) -> None:
        """Break the reader: every read in progress stops at its next poll."""
        with self._changed:
            if self._error is None:
                self._error = error
            self.broken.set()
            self._changed.notify_all()

    def acquire_staging(self, *, wait_until: float | None) -> torch.Tensor | None:
        """Return a staging buffer; None if none is free (by `wait_until`, if given) or the reader is broken."""
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


class ReadBatch:
    """The reads of one call: started as capacity allows, and polled until all have finished."""

    def __init__(self, reader: TransferEngineReader, reads: list[RemoteRead], deadline: float) -> None:
        self._reader = reader
        self._engine = reader.engine
        self._session = reader.session
        self._waiting = deque(reads)
        self._deadline = deadline
        self._in_flight: dict[int, tuple[RemoteRead, torch.Tensor | None]] = {}
        self._bytes = 0
        self._failed = False

    def finish(self) -> None:
        """Execute all reads. Raises SourceUnavailable or SourceTimeout once none is in flight any more."""
        wait = MIN_WAIT_S
        while self._waiting or self._in_flight:
            timed_out = time.monotonic() >= self._deadline
            if self._failed or timed_out:
                break
            wait_s = self._start()
            if self._poll():
                wait = MIN_WAIT_S
            elif self._reader.broken.wait(wait if self._in_flight else max(wait, min(wait_s, THROTTLE_POLL_S))):
                self._reader.check_open()
            else:
                wait = min(wait * 1.5, MAX_WAIT_S)
        if self._waiting or self._in_flight or self._failed:
            self._drain()
            raise self._failure()

    def _start(self) -> float:
        """Start as many reads as capacity allows; return the seconds until the rate limit allows the next
        one.
        """
        while self._waiting and self._can_submit():
            staging = None
            if self._waiting[0].pieces:
                staging = self._reader.acquire_staging(wait_until=None if self._in_flight else self._deadline)
                if staging is None:
                    return 0.0
            request, rest, wait_s = self._reader.consume(self._waiting[0])
            if wait_s > 0:
                self._release_staging(staging)
                return wait_s
            self._waiting.popleft()
            if rest is not None:
                self._waiting.appendleft(rest)
            # The rest of a split staged request may be a single piece, which is read directly to its
            # destination.
            local = staging.data_ptr() if request.pieces and staging is not None else request.local
            if not request.pieces:
                self._release_staging(staging)
                staging = None
            try:
                number = self._engine.start_read(self._reader.session, local, request.remote, request.length)
            except SourceUnavailable:
                self._failed = True
                self._reader.record_completion(request.length)
                self._release_staging(staging)
                return 0.0
            self._in_flight[number] = (request, staging)
            self._bytes += request.length
        return 0.0

    def _release_staging(self, staging: torch.Tensor | None) -> None:
        if staging is not None:
            self._reader.release_staging(staging)

    def _can_submit(self) -> bool:
        return len(self._in_flight) < MAX_INFLIGHT and self._bytes < self._reader.sizes.in_flight

    def _poll(self) -> bool:
        """Process finished reads; return True if there were any."""
        finished = [
            (number, state)
            for number in self._in_flight
            if (state := self._engine.state(number)) is not TransferState.RUNNING
        ]
        for number, state in finished:
            request, staging = self._in_flight.pop(number)
            self._bytes -= request.length
            self._reader.record_completion(request.length)
            if state is TransferState.FAILED:
                self._failed = True
            elif staging is not None:
                _scatter(request, staging.data_ptr())
            self._release_staging(staging)
        return bool(finished)

    def _drain(self) -> None:
        """Wait until no read is in flight; close the engine if that takes too long."""
        expires_at = time.monotonic() + GRACE_S
        while self._in_flight and time.monotonic() < expires_at:
            if not self._poll() and self._reader.broken.wait(MAX_WAIT_S):
                self._reader.check_open()
        if self._in_flight:
            self._reader.fail(SourceTimeout(f"{self._session} did not finish its reads in time"))

    def _failure(self) -> SourceError:
        """Return the error to raise. The engine reports no cause, so ping the source."""
        try:
            ping_handshake_port(self._session, time.monotonic() + 2.0)
        except SourceError as error:
            return error
        if self._failed:
            return SourceUnavailable(f"{self._session} rejected or aborted a read")
        return SourceTimeout(f"{self._session} did not finish before the deadline")


def _scatter(request: RemoteRead, staging: int) -> None:
    for piece in request.pieces:
        ctypes.memmove(piece.local, staging + piece.remote - request.remote, piece.length)
