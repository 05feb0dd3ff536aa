"""The target side: two threads, of which one hears the source, and one takes what it sends."""

from __future__ import annotations

import threading
import time
from collections import deque

import torch

from rfork.errors import (
    LeaseRejected,
    RforkError,
    SourceBusy,
    SourceCorrupt,
    SourceTimeout,
    SourceUnavailable,
    SourceWeightsChanged,
)
from rfork.image.memory import Image
from rfork.transport.base import ControlStream, TokenSource
from rfork.transport.collective.block_requests import BlockRequests
from rfork.transport.collective.block_tensors import BlockTensors
from rfork.transport.collective.exit_hook import ExitHook
from rfork.transport.collective.group import Backend, CollectiveGroup
from rfork.transport.collective.messages import (
    FromSource,
    GroupClosed,
    GroupFormed,
    JoinGroup,
    Rejected,
    SendingBlock,
    StoreValues,
    error_of,
    receive_from_source,
    send_message,
)
from rfork.transport.collective.remote_store import RemoteKeyStore

MAX_ATTEMPTS = 3
"""Groups that may break one after another, without a byte from any, before the source counts as gone."""
LISTEN_S = 3600.0
FORM_S = 5.0
GRACE_S = 2.0
REJECTION_ERRORS = (LeaseRejected, SourceBusy, SourceWeightsChanged, SourceTimeout, SourceUnavailable)


class CollectiveReader(BlockRequests):
    """Fills `image` from the source at the other end of `line`; see `rfork.transport.base.Reader`.

    A group that breaks (a reader of this host died, say) is joined anew, and reads go on where they were.
    """

    def __init__(
        self,
        image: Image,
        backend: Backend,
        device: torch.device,
        token: TokenSource,
        line: ControlStream,
        *,
        block_bytes: int,
        stall_s: float,
    ) -> None:
        super().__init__(image.layout.image_bytes, block_bytes, token, line)
        self._backend, self._device, self._stall_s = backend, device, stall_s
        self._blocks = BlockTensors(image, block_bytes, device)
        self._messages: deque[GroupFormed | SendingBlock | GroupClosed] = deque()
        self._group: CollectiveGroup | None = None
        self._keys: RemoteKeyStore | None = None
        self._attempts = 0
        self._at_exit = ExitHook(self.close)
        self._threads = [
            threading.Thread(target=target, name=f"rfork-{backend.name}", daemon=True)
            for target in (self._receive_loop, self._transfer_loop)
        ]

    def open(self, deadline: float) -> None:
        """Join a group; returns once there is one. Raises as `Reader.read`."""
        send_message(self._line, JoinGroup())
        for thread in self._threads:
            thread.start()
        with self._changed:
            while not self._formed:
                self._raise_error()
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise SourceTimeout("the source formed no group before the deadline")

    def set_rate_limit(self, rate: int | None) -> None:
        """Nothing to do: the source holds its readers back."""

    def close(self) -> None:
        """See `Reader.close`."""
        self._fail(SourceUnavailable("the reader was closed"))
        self._line.close()
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(FORM_S + GRACE_S)
        self._at_exit.cancel()

    def _fail(self, error: RforkError) -> None:
        """Nothing more comes from this source, and why; the first reason stands."""
        with self._changed:
            super()._fail(error)
            if self._keys is not None:
                self._keys.close(str(error))
            group = self._group
        if group is not None:
            group.abort()

    # -- what the source says: on one thread -----------------------------------------------------------

    def _receive_loop(self) -> None:
        try:
            while self._error is None:
                self._handle(receive_from_source(self._line, time.monotonic() + LISTEN_S))
        except SourceTimeout:
            self._fail(SourceUnavailable("the source said nothing for an hour"))
        except RforkError as error:
            self._fail(error)

    def _handle(self, message: FromSource) -> None:
        cut: CollectiveGroup | None = None
        with self._changed:
            match message:
                case StoreValues():
                    if self._keys is not None:
                        self._keys.on_reply(message)
                case Rejected():
                    wanted = self._wanted.get(message.number)
                    if wanted is not None:
                        wanted.error = error_of(message, REJECTION_ERRORS)
                case GroupClosed():
                    if message.group == self._group_number:
                        cut = self._group
                        if self._keys is not None:
                            self._keys.close(message.text)
                    self._messages.append(message)
                case GroupFormed():
                    self._keys = RemoteKeyStore(self._line, message.group, self._changed)
                    self._group_number = message.group
                    self._messages.append(message)
                case SendingBlock():
                    self._messages.append(message)
            self._changed.notify_all()
        if cut is not None:
            cut.abort()

    # -- the group: on another thread ------------------------------------------------------------------

    def _transfer_loop(self) -> None:
        try:
            with self._backend.working(self._device):
                while True:
                    with self._changed:
                        self._changed.wait_for(lambda: bool(self._messages) or self._error is not None)
                        self._raise_error()
                        message = self._messages.popleft()
                    self._follow(message)
        except RforkError as error:
            self._fail(error)
        except Exception as error:  # a bug must end the reads, not leave them waiting
            self._fail(SourceUnavailable(f"{type(error).__name__}: {error}"))
        finally:
            self._drop_group()

    def _follow(self, message: GroupFormed | SendingBlock | GroupClosed) -> None:
        try:
            match message:
                case GroupFormed():
                    self._form(message)
                case SendingBlock() if message.group == self._group_number and self._group is not None:
                    self._receive(message, self._group)
                case GroupClosed() if message.group == self._group_number and self._formed:
                    raise SourceUnavailable(f"the group is over: {message.text}")
        except (SourceUnavailable, SourceTimeout) as error:
            self._rejoin(error, group_is_closed=isinstance(message, GroupClosed))

    def _form(self, formed: GroupFormed) -> None:
        keys = self._keys
        if keys is None or not 0 < formed.rank < formed.size <= 64:
            raise SourceCorrupt(f"the source names rank {formed.rank} of {formed.size}")
        deadline = time.monotonic() + min(FORM_S, self._stall_s)
        group = self._backend.form(keys, formed.rank, formed.size, "", self._device, deadline)
        with self._changed:
            self._group, self._formed = group, True
            pending = [
                (wanted, self._group_to_request(wanted)) for wanted in self._wanted.values() if wanted.error is None
            ]
            self._changed.notify_all()
        for wanted, number in pending:
            self._send_request(wanted, number)

    def _receive(self, sending: SendingBlock, group: CollectiveGroup) -> None:
        begin, end = sending.begin, sending.end
        if not begin < end <= begin + self._block_bytes:
            raise SourceCorrupt(f"the source sends [{begin}, {end}), which is no block")
        with self._changed:
            wanted = self._wanted.get(sending.number)
            if wanted is not None:
                if begin != wanted.at or end > wanted.end:
                    raise SourceCorrupt(f"the source sends [{begin}, {end}), which was not asked for")
                wanted.is_receiving = True
        deadline = time.monotonic() + self._stall_s
        try:
            if wanted is None:
                block = self._blocks.scratch(end - begin)
            else:
                block, deadline = self._blocks.destination(begin, end), min(deadline, wanted.deadline)
            if sending.together:
                group.broadcast(block, deadline)
            else:
                group.receive(block, deadline)
            if wanted is not None:
                self._blocks.scatter(block, begin, end)
                wanted.at = end
            self._attempts = 0
        finally:
            with self._changed:
                if wanted is not None:
                    wanted.is_receiving = False
                self._changed.notify_all()

    def _rejoin(self, error: RforkError, *, group_is_closed: bool) -> None:
        """The group broke: into another one, unless that happened too often."""
        self._drop_group()
        with self._changed:
            group_closed = any(
                isinstance(each, GroupClosed) and each.group == self._group_number for each in self._messages
            )
        # A source that says so itself may do so whenever a reader of this host comes or goes.
        self._attempts += 0 if group_closed or group_is_closed else 1
        if self._attempts >= MAX_ATTEMPTS:
            raise error
        send_message(self._line, JoinGroup())

    def _drop_group(self) -> None:
        with self._changed:
            group, self._group, self._formed = self._group, None, False
            self._changed.notify_all()
        if group is not None:
            group.close()
