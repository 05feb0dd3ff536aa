"""The target side: image ranges read from the source's memory into the target's own."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rfork.errors import SourceError, SourceGone, SourceStalled
from rfork.image.memory import Image
from rfork.transport.bucket import SLICE_S, Bucket
from rfork.transport.transfer_engine.engine import Engine, TransferState, probe
from rfork.transport.transfer_engine.plan import (
    SIZES,
    STAGING_BYTES,
    AddressMap,
    Request,
    common_pieces,
    head,
    requests,
)

MOST_READS_IN_FLIGHT = 64
STAGING_BUFFERS = 4
"""A staged read is under way while another is copied out; four buffers serve two callers at once."""

GRACE_S = 3.0
"""A read past its deadline gets this long to end: the engine fails one that makes no progress after 2 s."""

SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.0002, 0.004

LEAST_HELD_BYTES = 256 << 10
"""Bytes of one read under a rate, at least: a read costs 40 to 80 µs whatever its size."""
LEAST_HELD_IN_FLIGHT, HELD_IN_FLIGHT_S = 4 << 20, 0.002
"""Bytes in flight under a rate, all reads together: so many, or those of so long where that is more. What is
in flight comes however low the next rate is, so a source that asks for less gets it soon."""
HOLD_S = 0.05
"""Longest wait for the rate's next bytes: it may have been raised meanwhile."""


class TransferEngineReader:
    """One source's image over an engine of its own. Runs on the target; thread-safe.

    The engine cannot break a single read off. When reads do not end after deadline and grace, the
    whole engine is taken down, which stops them for certain; the reader is then spent, and further
    reads raise the error that spent it.
    """

    def __init__(
        self, engine: Engine, session: str, remote: AddressMap, image: Image, *, gather: bool
    ) -> None:
        self._engine = engine
        self._session = session
        self._remote = remote
        self._image = image
        self._gather = gather and image.device.type == "cpu"
        self.sizes = SIZES[engine.protocol]
        self._bucket = Bucket()
        self._flying = 0
        self._changed = threading.Condition()
        self._broken = threading.Event()
        self._error: SourceError | None = None
        self._inside = 0
        self._down = False
        self._staging_made = 0
        self._staging: deque[torch.Tensor] = deque()

    def read(self, begin: int, end: int, deadline: float) -> None:
        """Copy image range `[begin, end)` into the target image; see `Reader.read`.

        Raises SourceGone when the source hung up or refused, and SourceStalled when it went silent
        or the deadline passed; the latter at most `GRACE_S` and a probe (2 s) after it.
        """
        pieces = common_pieces(self._remote.segments(begin, end), self._image.segments(begin, end))
        with self._use():
            _Run(self, requests(pieces, gather=self._gather, most=self.sizes.request), deadline).finish()

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
        self._break(SourceGone(f"the reader of {self._session} was closed"))
        with self._changed:
            if self._inside == 0:
                self._take_down()
            self._changed.wait_for(lambda: self._down)

    @contextmanager
    def _use(self) -> Iterator[None]:
        """Hold the engine up; on leaving a broken reader, wait until its engine is down."""
        with self._changed:
            self._raise_if_spent()
            self._inside += 1
        try:
            yield
        except SourceError:
            raise
        except BaseException:
            # An interrupt or a bug: reads may be under way that nobody looks at any more.
            self._break(SourceGone(f"the reader of {self._session} was interrupted"))
            raise
        finally:
            with self._changed:
                self._inside -= 1
                if self._broken.is_set() and self._inside == 0:
                    self._take_down()
                # Only then can no more bytes land.
                self._changed.wait_for(lambda: self._down or not self._broken.is_set())

    def _raise_if_spent(self) -> None:
        if self._error is not None:
            raise type(self._error)(str(self._error))

    def _take_down(self) -> None:
        if not self._down:
            self._engine.close()
            self._staging.clear()
            self._down = True
            self._changed.notify_all()

    def _break(self, error: SourceError) -> None:
        """Spend the reader: every read under way leaves at its next look."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._broken.set()
            self._changed.notify_all()

    def take_staging(self, *, wait_until: float | None) -> torch.Tensor | None:
        """A staging buffer; None when there is none (by `wait_until`, if given) or the reader is spent."""
        with self._changed:
            if not self._staging and self._staging_made < STAGING_BUFFERS:
                buffer = torch.empty(STAGING_BYTES, dtype=torch.uint8)
                if self._engine.protocol == "rdma":
                    self._engine.register([(buffer.data_ptr(), STAGING_BYTES)])
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


class _Run:
    """The reads of one call: started while there is room, looked at until all have ended."""

    def __init__(self, reader: TransferEngineReader, planned: list[Request], deadline: float) -> None:
        self._reader = reader
        self._engine = reader._engine
        self._waiting = deque(planned)
        self._deadline = deadline
        self._flying: dict[int, tuple[Request, torch.Tensor | None]] = {}
        self._bytes = 0
        self._failed = False

    def finish(self) -> None:
        """Do all of them. Raises SourceGone or SourceStalled once none is under way any more."""
        wait = SHORTEST_WAIT_S
        while self._waiting or self._flying:
            late = time.monotonic() >= self._deadline
            if self._failed or late:
                break
            held = self._start()
            if self._look():
                wait = SHORTEST_WAIT_S
            elif self._reader._broken.wait(wait if self._flying else max(wait, min(held, HOLD_S))):
                self._reader._raise_if_spent()
            else:
                wait = min(wait * 1.5, LONGEST_WAIT_S)
        if self._waiting or self._flying or self._failed:
            self._drain()
            raise self._reason()

    def _start(self) -> float:
        """Start what there is room for; the seconds until the rate lets the next one start."""
        while self._waiting and self._has_room():
            staging = None
            if self._waiting[0].pieces:
                staging = self._reader.take_staging(wait_until=None if self._flying else self._deadline)
                if staging is None:
                    return 0.0
            request, left, held = self._reader.spend(self._waiting[0])
            if held > 0:
                self._give_back(staging)
                return held
            self._waiting.popleft()
            if left is not None:
                self._waiting.appendleft(left)
            # What is left of a staged request may be a single piece, which goes straight to its place.
            local = staging.data_ptr() if request.pieces and staging is not None else request.local
            if not request.pieces:
                self._give_back(staging)
                staging = None
            try:
                number = self._engine.start_read(self._reader._session, local, request.remote, request.length)
            except SourceGone:
                self._failed = True
                self._reader.landed(request.length)
                self._give_back(staging)
                return 0.0
            self._flying[number] = (request, staging)
            self._bytes += request.length
        return 0.0

    def _give_back(self, staging: torch.Tensor | None) -> None:
        if staging is not None:
            self._reader.give_staging(staging)

    def _has_room(self) -> bool:
        return len(self._flying) < MOST_READS_IN_FLIGHT and self._bytes < self._reader.sizes.in_flight

    def _look(self) -> bool:
        """Take in what has ended; whether anything has."""
        ended = [
            (number, state)
            for number in self._flying
            if (state := self._engine.state(number)) is not TransferState.RUNNING
        ]
        for number, state in ended:
            request, staging = self._flying.pop(number)
            self._bytes -= request.length
            self._reader.landed(request.length)
            if state is TransferState.FAILED:
                self._failed = True
            elif staging is not None:
                _scatter(request, staging.data_ptr())
            self._give_back(staging)
        return bool(ended)

    def _drain(self) -> None:
        """Wait until nothing is under way; take the engine down if that does not come by itself."""
        limit = time.monotonic() + GRACE_S
        while self._flying and time.monotonic() < limit:
            if not self._look() and self._reader._broken.wait(LONGEST_WAIT_S):
                self._reader._raise_if_spent()
        if self._flying:
            self._reader._break(SourceStalled(f"{self._reader._session} did not finish its reads in time"))

    def _reason(self) -> SourceError:
        """What to blame: the engine only says that a read failed, so the source is asked again."""
        session = self._reader._session
        try:
            probe(session, time.monotonic() + 2.0)
        except SourceError as error:
            return error
        if self._failed:
            return SourceGone(f"{session} refused a read or broke it off")
        return SourceStalled(f"{session} was not done by the deadline")


def _scatter(request: Request, staging: int) -> None:
    for piece in request.pieces:
        ctypes.memmove(piece.local, staging + piece.remote - request.remote, piece.length)
