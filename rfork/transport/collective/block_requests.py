"""Pending block requests of one reader. Runs on the target."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from itertools import count

from rfork.errors import RforkError, SourceTimeout
from rfork.transport.base import ControlStream, TokenSource
from rfork.transport.collective.messages import CancelBlock, RequestBlock, send_message

MAX_CONCURRENT = 2
"""Blocks that one read requests concurrently: the source prepares the next one while one is received."""


@dataclass(eq=False)
class PendingBlock:
    """A block that a read waits for."""

    number: int
    begin: int
    end: int
    deadline: float
    at: int
    requested_from: int = 0
    """Number of the group in which the block was requested last."""
    is_receiving: bool = False
    error: RforkError | None = None

    @property
    def done(self) -> bool:
        """True if the complete block has been received."""
        return self.at == self.end


class BlockRequests:
    """Splits reads into blocks, requests them from the group, and requests them again after a rejoin."""

    def __init__(self, image_bytes: int, block_bytes: int, token: TokenSource, stream: ControlStream) -> None:
        self._image_bytes, self._block_bytes = image_bytes, block_bytes
        self._token, self._stream = token, stream
        self._changed = threading.Condition()
        self._numbers = count(1)
        self._pending: dict[int, PendingBlock] = {}
        self._error: RforkError | None = None
        self._group_number = 0
        self._formed = False

    def read(self, begin: int, end: int, deadline: float) -> None:
        """See `Reader.read`. Raises ValueError for a range outside the image."""
        if not 0 <= begin <= end <= self._image_bytes:
            raise ValueError(f"[{begin}, {end}) is not within the image")
        window: list[PendingBlock] = []
        at = begin
        try:
            while at < end or window:
                while at < end and len(window) < MAX_CONCURRENT:
                    until = min(at + self._block_bytes, end)
                    window.append(self._request(at, until, deadline))
                    at = until
                self._await(window[0], deadline)
                window.pop(0)
        finally:
            for pending in window:
                self._cancel(pending)

    def _request(self, begin: int, end: int, deadline: float) -> PendingBlock:
        pending = PendingBlock(next(self._numbers), begin, end, deadline, begin)
        with self._changed:
            self._raise_error()
            if time.monotonic() >= deadline:
                raise SourceTimeout("the deadline of the read has passed")
            self._pending[pending.number] = pending
            group = self._group_to_request(pending)
        self._send_request(pending, group)
        return pending

    def _group_to_request(self, pending: PendingBlock) -> int:
        """Return the group in which to request the block now, or 0. The caller holds the lock."""
        if not self._formed or pending.requested_from == self._group_number:
            return 0
        pending.requested_from = self._group_number
        return self._group_number

    def _send_request(self, pending: PendingBlock, group: int) -> None:
        if group:
            send_message(
                self._stream,
                RequestBlock(number=pending.number, begin=pending.at, end=pending.end, token=self._token()),
            )

    def _await(self, pending: PendingBlock, deadline: float) -> None:
        with self._changed:
            while not pending.done:
                if pending.error is not None:
                    raise pending.error
                self._raise_error()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise SourceTimeout("the source did not send the complete range before the deadline")
                self._changed.wait(left)
            self._pending.pop(pending.number, None)

    def _cancel(self, pending: PendingBlock) -> None:
        """Cancel the request; no byte of the block is written after this returns."""
        with self._changed:
            self._pending.pop(pending.number, None)
            # A block in transit ends by its own deadline, which is no later than the read's.
            self._changed.wait_for(lambda: not pending.is_receiving)
            finished = pending.done or pending.error is not None or self._error is not None
        if not finished:
            try:
                send_message(self._stream, CancelBlock(number=pending.number))
            except RforkError as error:
                self._fail(error)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise type(self._error)(str(self._error))

    def _fail(self, error: RforkError) -> None:
        """Fail all reads with `error`; the first error wins."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
