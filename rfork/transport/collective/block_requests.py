"""What the reads of one reader wait for, on the target."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from itertools import count

from rfork.errors import RforkError, SourceTimeout
from rfork.transport.base import ControlStream, TokenSource
from rfork.transport.collective.messages import CancelBlock, RequestBlock, send_message

MAX_CONCURRENT = 2
"""Blocks that one read wants at once: while one comes, the source gets the next one ready."""


@dataclass(eq=False)
class PendingBlock:
    """A block that a read waits for."""

    number: int
    begin: int
    end: int
    deadline: float
    at: int
    requested_from: int = 0
    """The group that was asked for it."""
    is_receiving: bool = False
    error: RforkError | None = None

    @property
    def done(self) -> bool:
        """Whether all of it is here."""
        return self.at == self.end


class BlockRequests:
    """Reads, and the blocks that each waits for: asked for in a group, and again in the next one."""

    def __init__(self, image_bytes: int, block_bytes: int, token: TokenSource, line: ControlStream) -> None:
        self._image_bytes, self._block_bytes = image_bytes, block_bytes
        self._token, self._line = token, line
        self._changed = threading.Condition()
        self._numbers = count(1)
        self._wanted: dict[int, PendingBlock] = {}
        self._error: RforkError | None = None
        self._group_number = 0
        self._formed = False

    def read(self, begin: int, end: int, deadline: float) -> None:
        """See `Reader.read`. A range outside the image is a ValueError."""
        if not 0 <= begin <= end <= self._image_bytes:
            raise ValueError(f"[{begin}, {end}) is not within the image")
        mine: list[PendingBlock] = []
        at = begin
        try:
            while at < end or mine:
                while at < end and len(mine) < MAX_CONCURRENT:
                    until = min(at + self._block_bytes, end)
                    mine.append(self._request(at, until, deadline))
                    at = until
                self._await(mine[0], deadline)
                mine.pop(0)
        finally:
            for wanted in mine:
                self._cancel(wanted)

    def _request(self, begin: int, end: int, deadline: float) -> PendingBlock:
        wanted = PendingBlock(next(self._numbers), begin, end, deadline, begin)
        with self._changed:
            self._raise_error()
            if time.monotonic() >= deadline:
                raise SourceTimeout("the deadline of the read has passed")
            self._wanted[wanted.number] = wanted
            group = self._group_to_request(wanted)
        self._send_request(wanted, group)
        return wanted

    def _group_to_request(self, wanted: PendingBlock) -> int:
        """The group to ask for it now, or 0; the lock is held."""
        if not self._formed or wanted.requested_from == self._group_number:
            return 0
        wanted.requested_from = self._group_number
        return self._group_number

    def _send_request(self, wanted: PendingBlock, group: int) -> None:
        if group:
            send_message(
                self._line,
                RequestBlock(number=wanted.number, begin=wanted.at, end=wanted.end, token=self._token()),
            )

    def _await(self, wanted: PendingBlock, deadline: float) -> None:
        with self._changed:
            while not wanted.done:
                if wanted.error is not None:
                    raise wanted.error
                self._raise_error()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise SourceTimeout("the source did not send the whole range before the deadline")
                self._changed.wait(left)
            self._wanted.pop(wanted.number, None)

    def _cancel(self, wanted: PendingBlock) -> None:
        """After this no byte of it lands any more."""
        with self._changed:
            self._wanted.pop(wanted.number, None)
            # Whatever moves ends by its own deadline, which is none later than this read's.
            self._changed.wait_for(lambda: not wanted.is_receiving)
            ended = wanted.done or wanted.error is not None or self._error is not None
        if not ended:
            try:
                send_message(self._line, CancelBlock(number=wanted.number))
            except RforkError as error:
                self._fail(error)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise type(self._error)(str(self._error))

    def _fail(self, error: RforkError) -> None:
        """Nothing more comes from this source, and why; the first reason stands."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
