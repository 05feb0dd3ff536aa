"""Target side of the collective transports: one thread receives messages, another receives the bytes."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from dataclasses import dataclass
from itertools import count

import torch

from rfork.errors import (
    LeaseRejected,
    RforkError,
    SourceBusy,
    SourceCorrupt,
    SourceTimeout,
    SourceUnavailable,
    SourceWeightsChanged,
    TargetError,
)
from rfork.image.memory import Image
from rfork.transport.base import ControlStream, TokenSource
from rfork.transport.collective.backend import Backend, CollectiveGroup
from rfork.transport.collective.block_tensors import BlockTensors
from rfork.transport.collective.key_store import RemoteKeyStore
from rfork.transport.collective.messages import (
    CancelBlock,
    FromSource,
    GroupClosed,
    GroupFormed,
    JoinGroup,
    Rejected,
    RequestBlock,
    SendingBlock,
    StoreValues,
    receive_from_source,
    rejection_error,
    send_message,
)

MAX_CONCURRENT = 2
"""Blocks that one read requests concurrently: the source prepares the next one while one is received."""
MAX_ATTEMPTS = 3
"""Consecutive groups that may fail without a byte received before the source counts as unavailable."""
RECEIVE_TIMEOUT_S = 3600.0
GRACE_S = 2.0
REJECTION_ERRORS = (LeaseRejected, SourceBusy, SourceWeightsChanged, SourceTimeout, SourceUnavailable)


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


class CollectiveReader:
    """Fills `image` from the source at the other end of the control stream; see
    `rfork.transport.base.Reader`.

    Splits reads into blocks and requests them from the group. If the group breaks (for example because another
    reader of this host died), it joins a new one and requests the missing blocks again.
    """

    def __init__(
        self,
        image: Image,
        backend: Backend,
        device: torch.device,
        token: TokenSource,
        stream: ControlStream,
        *,
        block_bytes: int,
        idle_timeout_s: float,
    ) -> None:
        self._image_bytes, self._block_bytes = image.layout.image_bytes, block_bytes
        self._token, self._stream = token, stream
        self._backend, self._device, self._idle_timeout_s = backend, device, idle_timeout_s
        self._blocks = BlockTensors(image, block_bytes, device)
        self._changed = threading.Condition()
        self._numbers = count(1)
        self._pending: dict[int, PendingBlock] = {}
        self._error: RforkError | None = None
        self._messages: deque[GroupFormed | SendingBlock | GroupClosed] = deque()
        self._group: CollectiveGroup | None = None
        self._group_number = 0
        self._formed = False
        self._keys: RemoteKeyStore | None = None
        self._attempts = 0
        self._threads = [
            threading.Thread(target=target, name=f"rfork-{backend.name}", daemon=True)
            for target in (self._receive_loop, self._transfer_loop)
        ]
        atexit.register(self.close)  # see `CollectiveExporter`

    def open(self, deadline: float) -> None:
        """Join a group; return when it has formed. Raises as `Reader.read`."""
        send_message(self._stream, JoinGroup())
        for thread in self._threads:
            thread.start()
        with self._changed:
            while not self._formed:
                self._raise_error()
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise SourceTimeout("the source formed no group before the deadline")

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

    def set_rate_limit(self, rate: int | None) -> None:
        """Does nothing: the source throttles its readers."""

    def close(self) -> None:
        """See `Reader.close`."""
        self._fail(SourceUnavailable("the reader was closed"))
        self._stream.close()
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(self._backend.form_timeout_s + GRACE_S)
        atexit.unregister(self.close)

    # -- reads: on the threads of the caller ---------------------------------------------------------------

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
        """Fail all reads with `error` and abort the group; the first error wins."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
            if self._keys is not None:
                self._keys.close(str(error))
            group = self._group
        if group is not None:
            group.abort()

    # -- messages from the source: on one thread --------------------------------------------------------

    def _receive_loop(self) -> None:
        try:
            while self._error is None:
                self._handle(receive_from_source(self._stream, time.monotonic() + RECEIVE_TIMEOUT_S))
        except SourceTimeout:
            self._fail(SourceUnavailable("the source sent no message for an hour"))
        except RforkError as error:
            self._fail(error)

    def _handle(self, message: FromSource) -> None:
        closed_group: CollectiveGroup | None = None
        with self._changed:
            match message:
                case StoreValues():
                    if self._keys is not None:
                        self._keys.on_reply(message)
                case Rejected():
                    pending = self._pending.get(message.number)
                    if pending is not None:
                        pending.error = rejection_error(message, REJECTION_ERRORS)
                case GroupClosed():
                    if message.group == self._group_number:
                        closed_group = self._group
                        if self._keys is not None:
                            self._keys.close(message.text)
                    self._messages.append(message)
                case GroupFormed():
                    self._keys = RemoteKeyStore(self._stream, message.group)
                    self._group_number = message.group
                    self._messages.append(message)
                case SendingBlock():
                    self._messages.append(message)
            self._changed.notify_all()
        if closed_group is not None:
            closed_group.abort()

    # -- the group: on another thread ------------------------------------------------------------------

    def _transfer_loop(self) -> None:
        try:
            with self._backend.transfer_context(self._device):
                while True:
                    with self._changed:
                        self._changed.wait_for(lambda: bool(self._messages) or self._error is not None)
                        self._raise_error()
                        message = self._messages.popleft()
                    self._process(message)
        except RforkError as error:
            self._fail(error)
        except Exception as error:  # an unexpected error must fail the reads; otherwise they would wait
            self._fail(TargetError(f"unexpected error in {self._backend.name}: {type(error).__name__}: {error}"))
        finally:
            self._drop_group()

    def _process(self, message: GroupFormed | SendingBlock | GroupClosed) -> None:
        try:
            match message:
                case GroupFormed():
                    self._form(message)
                case SendingBlock() if message.group == self._group_number and self._group is not None:
                    self._receive(message, self._group)
                case GroupClosed() if message.group == self._group_number and self._formed:
                    raise SourceUnavailable(f"the source closed the group: {message.text}")
        except (SourceUnavailable, SourceTimeout) as error:
            self._rejoin(error, group_is_closed=isinstance(message, GroupClosed))

    def _form(self, message: GroupFormed) -> None:
        keys = self._keys
        if keys is None or not 0 < message.rank < message.size <= 64:
            raise SourceCorrupt(f"the source assigned an invalid rank, {message.rank} of {message.size}")
        deadline = time.monotonic() + self._backend.form_timeout_s
        group = self._backend.form(keys, message.rank, message.size, "", self._device, deadline)
        with self._changed:
            self._group, self._formed = group, True
            requests = [
                (pending, self._group_to_request(pending))
                for pending in self._pending.values()
                if pending.error is None
            ]
            self._changed.notify_all()
        for pending, number in requests:
            self._send_request(pending, number)

    def _receive(self, sending: SendingBlock, group: CollectiveGroup) -> None:
        begin, end = sending.begin, sending.end
        if not begin < end <= begin + self._block_bytes:
            raise SourceCorrupt(f"the source announced [{begin}, {end}), which is not a valid block")
        with self._changed:
            pending = self._pending.get(sending.number)
            if pending is not None:
                if begin != pending.at or end > pending.end:
                    raise SourceCorrupt(f"the source announced [{begin}, {end}), which was not requested")
                pending.is_receiving = True
        deadline = time.monotonic() + self._idle_timeout_s
        try:
            if pending is None:
                block = self._blocks.scratch(end - begin)
            else:
                block, deadline = self._blocks.destination(begin, end), min(deadline, pending.deadline)
            if sending.is_broadcast:
                group.broadcast(block, deadline)
            else:
                group.receive(block, deadline)
            if pending is not None:
                self._blocks.scatter(block, begin, end)
                pending.at = end
            self._attempts = 0
        finally:
            with self._changed:
                if pending is not None:
                    pending.is_receiving = False
                self._changed.notify_all()

    def _rejoin(self, error: RforkError, *, group_is_closed: bool) -> None:
        """Join another group, unless too many groups have failed."""
        self._drop_group()
        with self._changed:
            group_closed = any(
                isinstance(message, GroupClosed) and message.group == self._group_number for message in self._messages
            )
        # A group closed by the source does not count: that happens whenever a reader of this host joins or
        # leaves.
        self._attempts += 0 if group_closed or group_is_closed else 1
        if self._attempts >= MAX_ATTEMPTS:
            raise error
        send_message(self._stream, JoinGroup())

    def _drop_group(self) -> None:
        with self._changed:
            group, self._group, self._formed = self._group, None, False
            self._changed.notify_all()
        if group is not None:
            group.close()
