"""The target side: two threads, of which one hears the source, and one takes what it sends."""

from __future__ import annotations

import threading
import time
from collections import deque

import torch

from rfork.errors import (
    LeaseRefused,
    RforkError,
    SourceBusy,
    SourceChanged,
    SourceCorrupt,
    SourceGone,
    SourceStalled,
)
from rfork.image.memory import Image
from rfork.transport.base import Line, TokenSource
from rfork.transport.collective.at_exit import AtExit
from rfork.transport.collective.blocks import Blocks
from rfork.transport.collective.far_keys import FarKeys
from rfork.transport.collective.group import Backend, Group
from rfork.transport.collective.messages import (
    Formed,
    FromSource,
    Have,
    Join,
    Over,
    Refused,
    Sending,
    error_of,
    hear_source,
    say,
)
from rfork.transport.collective.wants import Wants

MOST_TRIES = 3
"""Groups that may break one after another, without a byte from any, before the source counts as gone."""
LISTEN_S = 3600.0
FORM_S = 5.0
GRACE_S = 2.0
REFUSALS = (LeaseRefused, SourceBusy, SourceChanged, SourceStalled, SourceGone)


class CollectiveReader(Wants):
    """Fills `image` from the source at the other end of `line`; see `rfork.transport.base.Reader`.

    A group that breaks (a reader of this host died, say) is joined anew, and reads go on where they were.
    """

    def __init__(
        self,
        image: Image,
        backend: Backend,
        device: torch.device,
        token: TokenSource,
        line: Line,
        *,
        block_bytes: int,
        stall_s: float,
    ) -> None:
        super().__init__(image.layout.image_bytes, block_bytes, token, line)
        self._backend, self._device, self._stall_s = backend, device, stall_s
        self._blocks = Blocks(image, block_bytes, device)
        self._said: deque[Formed | Sending | Over] = deque()
        self._group: Group | None = None
        self._keys: FarKeys | None = None
        self._tries = 0
        self._at_exit = AtExit(self.close)
        self._threads = [
            threading.Thread(target=target, name=f"rfork-{backend.name}", daemon=True)
            for target in (self._hear, self._take)
        ]

    def open(self, deadline: float) -> None:
        """Join a group; returns once there is one. Raises as `Reader.read`."""
        say(self._line, Join())
        for thread in self._threads:
            thread.start()
        with self._changed:
            while not self._formed:
                self._raise_error()
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise SourceStalled("the source formed no group before the deadline")

    def hold_to(self, rate: int | None) -> None:
        """Nothing to do: the source holds its readers back."""

    def close(self) -> None:
        """See `Reader.close`."""
        self._fail(SourceGone("the reader was closed"))
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

    def _hear(self) -> None:
        try:
            while self._error is None:
                self._heed(hear_source(self._line, time.monotonic() + LISTEN_S))
        except SourceStalled:
            self._fail(SourceGone("the source said nothing for an hour"))
        except RforkError as error:
            self._fail(error)

    def _heed(self, message: FromSource) -> None:
        cut: Group | None = None
        with self._changed:
            match message:
                case Have():
                    if self._keys is not None:
                        self._keys.heard(message)
                case Refused():
                    wanted = self._wanted.get(message.number)
                    if wanted is not None:
                        wanted.error = error_of(message, REFUSALS)
                case Over():
                    if message.group == self._group_number:
                        cut = self._group
                        if self._keys is not None:
                            self._keys.close(message.text)
                    self._said.append(message)
                case Formed():
                    self._keys = FarKeys(self._line, message.group, self._changed)
                    self._group_number = message.group
                    self._said.append(message)
                case Sending():
                    self._said.append(message)
            self._changed.notify_all()
        if cut is not None:
            cut.abort()

    # -- the group: on another thread ------------------------------------------------------------------

    def _take(self) -> None:
        try:
            with self._backend.working(self._device):
                while True:
                    with self._changed:
                        self._changed.wait_for(lambda: bool(self._said) or self._error is not None)
                        self._raise_error()
                        message = self._said.popleft()
                    self._follow(message)
        except RforkError as error:
            self._fail(error)
        except Exception as error:  # a bug must end the reads, not leave them waiting
            self._fail(SourceGone(f"{type(error).__name__}: {error}"))
        finally:
            self._drop_group()

    def _follow(self, message: Formed | Sending | Over) -> None:
        try:
            match message:
                case Formed():
                    self._form(message)
                case Sending() if message.group == self._group_number and self._group is not None:
                    self._receive(message, self._group)
                case Over() if message.group == self._group_number and self._formed:
                    raise SourceGone(f"the group is over: {message.text}")
        except (SourceGone, SourceStalled) as error:
            self._join_anew(error, over=isinstance(message, Over))

    def _form(self, formed: Formed) -> None:
        keys = self._keys
        if keys is None or not 0 < formed.rank < formed.size <= 64:
            raise SourceCorrupt(f"the source names rank {formed.rank} of {formed.size}")
        deadline = time.monotonic() + min(FORM_S, self._stall_s)
        group = self._backend.form(keys, formed.rank, formed.size, "", self._device, deadline)
        with self._changed:
            self._group, self._formed = group, True
            asking = [(wanted, self._ask(wanted)) for wanted in self._wanted.values() if wanted.error is None]
            self._changed.notify_all()
        for wanted, number in asking:
            self._say_want(wanted, number)

    def _receive(self, sending: Sending, group: Group) -> None:
        begin, end = sending.begin, sending.end
        if not begin < end <= begin + self._block_bytes:
            raise SourceCorrupt(f"the source sends [{begin}, {end}), which is no block")
        with self._changed:
            wanted = self._wanted.get(sending.number)
            if wanted is not None:
                if begin != wanted.at or end > wanted.end:
                    raise SourceCorrupt(f"the source sends [{begin}, {end}), which was not asked for")
                wanted.taking = True
        deadline = time.monotonic() + self._stall_s
        try:
            if wanted is None:
                block = self._blocks.scratch(end - begin)
            else:
                block, deadline = self._blocks.place(begin, end), min(deadline, wanted.deadline)
            if sending.together:
                group.broadcast(block, deadline)
            else:
                group.receive(block, deadline)
            if wanted is not None:
                self._blocks.put(block, begin, end)
                wanted.at = end
            self._tries = 0
        finally:
            with self._changed:
                if wanted is not None:
                    wanted.taking = False
                self._changed.notify_all()

    def _join_anew(self, error: RforkError, *, over: bool) -> None:
        """The group broke: into another one, unless that happened too often."""
        self._drop_group()
        with self._changed:
            told = any(isinstance(each, Over) and each.group == self._group_number for each in self._said)
        # A source that says so itself may do so whenever a reader of this host comes or goes.
        self._tries += 0 if told or over else 1
        if self._tries >= MOST_TRIES:
            raise error
        say(self._line, Join())

    def _drop_group(self) -> None:
        with self._changed:
            group, self._group, self._formed = self._group, None, False
            self._changed.notify_all()
        if group is not None:
            group.close()
