"""One group on the source: forms it and sends the requested blocks on one thread.

If one rank fails, the group fails for all ranks.
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

FORM_TIMEOUT_S = 5.0
"""Timeout for forming a group; the remaining readers then join the next one."""

log = logger(__name__)


class GroupSender(GroupScheduler):
    """A group of readers on the host at `address`. Calls `on_closed` on its own thread when it has closed."""

    def __init__(
        self,
        number: int,
        address: str,
        image: Image,
        gate: AccessGate,
        backend: Backend,
        *,
        idle_timeout_s: float,
        nice: int,
        on_closed: Callable[[GroupSender], None],
    ) -> None:
        super().__init__(image.layout.image_bytes, backend.block_bytes)
        self.number = number
        self.address = address
        self.rendezvous = Rendezvous()
        self.broadcasts = 0
        """Pieces that were sent to all readers of the group in one broadcast."""
        self.sends = 0
        self._image, self._gate, self._backend = image, gate, backend
        self._idle_timeout_s, self._nice, self._on_closed = idle_timeout_s, nice, on_closed
        self._group: CollectiveGroup | None = None
        self._thread = threading.Thread(target=self._run, name=f"rfork-{backend.name}", daemon=True)

    def start(self) -> None:
        """Start to accept readers. Raises RuntimeError if the thread cannot be started."""
        self._thread.start()

    def join(self, deadline: float | None = None) -> None:
        """Wait until the group has closed and no longer accesses the image, or for the deadline. Call
        `disband` first.
        """
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def disband(self, reason: str) -> None:
        """Close the group from any thread, aborting any transfer."""
        with self._changed:
            self._close_reason = self._close_reason or reason
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
            with self._backend.transfer_context(device):
                self._form(device)
                while True:
                    self._send_to_all(self._next_block())
        except RforkError as error:
            self.disband(str(error))
        except Exception as error:  # an unexpected error must close the group; otherwise its readers would wait
            log.exception("group of readers failed")
            self.disband(f"{type(error).__name__}: {error}")
        finally:
            self._finish()

    def _form(self, device: torch.device) -> None:
        self._blocks = BlockTensors(self._image, self._backend.block_bytes, device)
        for member in self._members:
            member.send(GroupFormed(group=self.number, rank=member.rank, size=self.size))
        deadline = time.monotonic() + min(FORM_TIMEOUT_S, self._idle_timeout_s)
        group = self._backend.form(self.rendezvous, 0, self.size, self.address, device, deadline)
        with self._changed:
            self._group = group
        log.debug("group formed", transport=self._backend.name, readers=len(self._members))

    def _send_to_all(self, requests: list[BlockRequest]) -> None:
        """Send one block in pieces, as the egress budget allows. Readers that the gate rejects are dropped."""
        begin, end = requests[0].message.begin, requests[0].message.end
        at = begin
        while at < end:
            forks = self._authorize(requests, at, end)
            requests = [request for request in requests if not request.dropped]
            if not requests:
                return
            is_broadcast = len(requests) == len(self._members) > 1
            if len(requests) > 1 and not is_broadcast:
                for request in requests:  # a reader was rejected: send to the others one by one
                    self._send_block(request, at, end)
                return
            granted = self._acquire_budget(end - at, forks, len(requests))
            if not self._send_piece(requests, at, at + granted, is_broadcast=is_broadcast):
                continue
            at += granted

    def _send_block(self, request: BlockRequest, at: int, end: int) -> None:
        while at < end:
            forks = self._authorize([request], at, end)
            if request.dropped:
                return
            granted = self._acquire_budget(end - at, forks, 1)
            if self._send_piece([request], at, at + granted, is_broadcast=False):
                at += granted

    def _authorize(self, requests: list[BlockRequest], at: int, end: int) -> list[str]:
        forks: list[str] = []
        for request in requests:
            self._check_open()
            if request.dropped:
                continue
            try:
                forks.append(self._gate.authorize(request.message.token, at, end))
            except RforkError as error:
                request.member.reject(request, error)
        return forks

    def _acquire_budget(self, max_bytes: int, forks: list[str], readers: int) -> int:
        """Acquire the bytes of the next piece from the budget, once per copy that this side sends."""
        granted = self._gate.acquire_bytes(max_bytes, forks[0])
        copies = self._backend.broadcast_copies(readers) if readers > 1 else 1
        for fork_id in forks[1:copies]:
            left = granted
            while left > 0:
                left -= self._gate.acquire_bytes(left, fork_id)
        self._check_open()
        return granted

    def _send_piece(self, requests: list[BlockRequest], begin: int, end: int, *, is_broadcast: bool) -> bool:
        """Send one piece; return False if the gate rejected a reader, so that the caller must check the
        readers again.
        """
        group = self._group
        if group is None:
            raise SourceUnavailable("the group is not formed")
        with ExitStack() as guards:
            for request in requests:
                try:
                    guards.enter_context(self._gate.read_guard(request.message.token, begin, end, self._abort))
                except RforkError as error:
                    request.member.reject(request, error)
                    return False
            block = self._blocks.gather(begin, end)
            for request in requests:
                number = request.message.number
                request.member.send(
                    SendingBlock(group=self.number, number=number, begin=begin, end=end, is_broadcast=is_broadcast)
                )
            deadline = time.monotonic() + self._idle_timeout_s
            try:
                if is_broadcast:
                    group.broadcast(block, deadline)
                    self.broadcasts += 1
                else:
                    group.send(block, requests[0].member.rank, deadline)
                    self.sends += 1
            except (SourceUnavailable, SourceTimeout):
                group.abort()  # before the read guards end: the bytes may change after that
                raise
        for request in requests:
            request.at = end
        return True

    def _abort(self) -> None:
        self.disband("the weights are about to change")

    def _finish(self) -> None:
        with self._changed:
            self._close_reason = self._close_reason or "the group is closed"
            self._gathering = False
            group, self._group = self._group, None
        self.rendezvous.close()
        if group is not None:
            with suppress(RuntimeError):
                group.close()
        for member in self._members:
            member.send(GroupClosed(group=self.number, text=self._close_reason))
        log.debug("group closed", transport=self._backend.name, reason=self._close_reason)
        self._on_closed(self)
