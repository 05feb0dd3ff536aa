"""One group on the source: forms it, and gives its readers what they want on one thread.

A rank that fails breaks the group, for all of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import torch

from rfork.errors import RforkError, SourceTimeout, SourceUnavailable
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.thread_priority import lower_thread_priority
from rfork.transport.base import AccessGate
from rfork.transport.collective.block_tensors import BlockTensors
from rfork.transport.collective.group import Backend, CollectiveGroup
from rfork.transport.collective.group_member import BlockRequest
from rfork.transport.collective.group_scheduler import GroupScheduler
from rfork.transport.collective.messages import GroupClosed, GroupFormed, SendingBlock
from rfork.transport.collective.rendezvous import Rendezvous

FORM_S = 5.0
"""A group that has not formed by then breaks: whoever still lives joins the next one."""

log = logger(__name__)


class GroupSender(GroupScheduler):
    """A group of readers on the host at `address`. `ended` is called, on its thread, when it is over."""

    def __init__(
        self,
        number: int,
        address: str,
        image: Image,
        gate: AccessGate,
        backend: Backend,
        *,
        stall_s: float,
        nice: int,
        ended: Callable[[GroupSender], None],
    ) -> None:
        super().__init__(image.layout.image_bytes, backend.block_bytes)
        self.number = number
        self.address = address
        self.rendezvous = Rendezvous()
        self.broadcasts = 0
        """Pieces that went to all readers of the group at once."""
        self.sends = 0
        self._image, self._gate, self._backend = image, gate, backend
        self._stall_s, self._nice, self._ended = stall_s, nice, ended
        self._group: CollectiveGroup | None = None
        self._thread = threading.Thread(target=self._run, name=f"rfork-{backend.name}", daemon=True)

    def start(self) -> None:
        """Begin to gather readers. Raises RuntimeError when there is no thread to be had."""
        self._thread.start()

    def join(self, deadline: float | None = None) -> None:
        """Wait until it is over and touches the image no more, or for the deadline; after `disband`."""
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def disband(self, why: str) -> None:
        """End it, from any thread, whatever moves now."""
        with self._changed:
            self._close_reason = self._close_reason or why
            group = self._group
            self._changed.notify_all()
        self.rendezvous.close()
        if group is not None:
            group.abort()

    def _run(self) -> None:
        lower_thread_priority(self._nice)
        try:
            self._wait_for_members()
            device = self._backend.device(self._image)
            with self._backend.working(device):
                self._form(device)
                while True:
                    self._serve_loop(self._next_block())
        except RforkError as error:
            self.disband(str(error))
        except Exception as error:  # a bug must end this group, not leave its readers waiting
            log.exception("a group of readers broke")
            self.disband(f"{type(error).__name__}: {error}")
        finally:
            self._end()

    def _form(self, device: torch.device) -> None:
        self._blocks = BlockTensors(self._image, self._backend.block_bytes, device)
        for member in self._members:
            member.send(GroupFormed(group=self.number, rank=member.rank, size=self.size))
        deadline = time.monotonic() + min(FORM_S, self._stall_s)
        group = self._backend.form(self.rendezvous, 0, self.size, self.address, device, deadline)
        with self._changed:
            self._group = group
        log.debug("group formed", transport=self._backend.name, readers=len(self._members))

    def _serve_loop(self, wanted: list[BlockRequest]) -> None:
        """Give a block, piece by piece as the budget allows; whom the gate refuses gets no more of it."""
        begin, end = wanted[0].want.begin, wanted[0].want.end
        at = begin
        while at < end:
            forks = self._admitted(wanted, at, end)
            wanted = [each for each in wanted if not each.dropped]
            if not wanted:
                return
            together = len(wanted) == len(self._members) > 1
            if len(wanted) > 1 and not together:
                for each in wanted:  # no longer all of them: one by one, from here
                    self._send_block(each, at, end)
                return
            granted = self._granted(end - at, forks, len(wanted))
            if not self._move(wanted, at, at + granted, together=together):
                continue
            at += granted

    def _send_block(self, wanted: BlockRequest, at: int, end: int) -> None:
        while at < end:
            forks = self._admitted([wanted], at, end)
            if wanted.dropped:
                return
            granted = self._granted(end - at, forks, 1)
            if self._move([wanted], at, at + granted, together=False):
                at += granted

    def _admitted(self, wanted: list[BlockRequest], at: int, end: int) -> list[str]:
        forks: list[str] = []
        for each in wanted:
            self._check_open()
            if each.dropped:
                continue
            try:
                forks.append(self._gate.authorize(each.want.token, at, end))
            except RforkError as error:
                each.member.reject(each, error)
        return forks

    def _granted(self, max_bytes: int, forks: list[str], readers: int) -> int:
        """How much may go now: asked for once for each time that this side sends it."""
        granted = self._gate.acquire_bytes(max_bytes, forks[0])
        copies = self._backend.sent_by_source(readers) if readers > 1 else 1
        for fork_id in forks[1:copies]:
            left = granted
            while left > 0:
                left -= self._gate.acquire_bytes(left, fork_id)
        self._check_open()
        return granted

    def _move(self, wanted: list[BlockRequest], begin: int, end: int, *, together: bool) -> bool:
        """Send one piece; False when the gate refused it to a reader, and it has to be looked at anew."""
        group = self._group
        if group is None:
            raise SourceUnavailable("the group is not formed")
        with ExitStack() as readings:
            for each in wanted:
                try:
                    readings.enter_context(self._gate.read_guard(each.want.token, begin, end, self._abort))
                except RforkError as error:
                    each.member.reject(each, error)
                    return False
            block = self._blocks.gather(begin, end)
            for each in wanted:
                number = each.want.number
                each.member.send(
                    SendingBlock(group=self.number, number=number, begin=begin, end=end, together=together)
                )
            deadline = time.monotonic() + self._stall_s
            try:
                if together:
                    group.broadcast(block, deadline)
                    self.broadcasts += 1
                else:
                    group.send(block, wanted[0].member.rank, deadline)
                    self.sends += 1
            except (SourceUnavailable, SourceTimeout):
                group.abort()  # before the block ends: the bytes may change then
                raise
        for each in wanted:
            each.at = end
        return True

    def _abort(self) -> None:
        self.disband("the weights are about to change")

    def _end(self) -> None:
        with self._changed:
            self._close_reason = self._close_reason or "the group is over"
            self._gathering = False
            group, self._group = self._group, None
        self.rendezvous.close()
        if group is not None:
            with suppress(RuntimeError):
                group.close()
        for member in self._members:
            member.send(GroupClosed(group=self.number, text=self._close_reason))
        log.debug("group over", transport=self._backend.name, because=self._close_reason)
        self._ended(self)
