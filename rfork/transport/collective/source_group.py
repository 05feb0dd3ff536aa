"""One group on the source: its readers, the queue of their requests, and the thread that sends the blocks.

Requests are served in order of arrival. If all readers of the group request the same block at about the same
time, it is broadcast; otherwise it is sent to each reader separately. If one rank fails, the group fails for
all ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import torch

from rfork.errors import RforkError, SourceBusy, SourceTimeout, SourceUnavailable
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.thread_priority import lower_thread_priority
from rfork.transport.base import AccessGate, ControlStream
from rfork.transport.collective.backend import Backend, CollectiveGroup
from rfork.transport.collective.block_tensors import BlockTensors
from rfork.transport.collective.key_store import Rendezvous
from rfork.transport.collective.messages import (
    FromSource,
    GroupClosed,
    GroupFormed,
    Rejected,
    RequestBlock,
    SendingBlock,
    send_message,
)

MAX_REQUESTS = 256
"""Limit per reader: two for each reading thread."""
FORM_WINDOW_S = 0.05
"""Readers of one host that join within this time form one group."""
BROADCAST_WINDOW_S = 0.02
"""Maximum time that a block waits for the other readers to request it too, if the last block was broadcast."""
MAX_MEMBERS = 8

log = logger(__name__)


@dataclass(eq=False)
class BlockRequest:
    """A block that a reader requested."""

    member: GroupMember
    message: RequestBlock
    since: float = field(default_factory=time.monotonic)
    dropped: bool = False


@dataclass(eq=False)
class GroupMember:
    """A connected reader; `rank` is its rank in its current group."""

    channel_id: str
    address: str
    stream: ControlStream
    rank: int = 0
    left: bool = False

    def send(self, message: FromSource) -> None:
        """Send a message. A closed stream is not an error here: the group detects it elsewhere."""
        try:
            send_message(self.stream, message)
        except RforkError:
            self.left = True

    def reject(self, request: BlockRequest, error: RforkError) -> None:
        """Reject a request with an error."""
        request.dropped = True
        self.send(Rejected(number=request.message.number, error=error.kind, text=str(error)))


class SourceGroup:
    """A group of readers on the host at `address`. Thread-safe; one thread forms the group and sends its blocks.

    `idle_timeout_s`: maximum time for one block. `nice`: see `lower_thread_priority`. `on_closed` is called on
    the group's thread when it has closed.
    """

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
        on_closed: Callable[[SourceGroup], None],
    ) -> None:
        self.number = number
        self.address = address
        self.rendezvous = Rendezvous()
        self.broadcasts = 0
        """Pieces that were sent to all readers of the group in one broadcast."""
        self.sends = 0
        self._image, self._gate, self._backend = image, gate, backend
        self._idle_timeout_s, self._nice, self._on_closed = idle_timeout_s, nice, on_closed
        self._changed = threading.Condition()
        self._members: list[GroupMember] = []
        self._queue: list[BlockRequest] = []
        self._gathering = True
        self._close_reason = ""
        self._waits_for_more = True
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

    def add(self, member: GroupMember) -> bool:
        """Add a reader while the group is forming; return False if it cannot be added."""
        with self._changed:
            if not self._gathering or self._close_reason or len(self._members) >= MAX_MEMBERS:
                return False
            self._members.append(member)
            member.rank = len(self._members)
            self._changed.notify_all()  # a full group stops waiting
            return True

    @property
    def size(self) -> int:
        """Number of ranks, including the source."""
        return len(self._members) + 1

    def contains(self, member: GroupMember) -> bool:
        """Return True if the reader is in this group and the group is not closed."""
        with self._changed:
            return member in self._members and not self._close_reason

    def request(self, member: GroupMember, message: RequestBlock) -> None:
        """Queue a reader's request, or reject it if it is invalid."""
        request = BlockRequest(member, message)
        with self._changed:
            waiting = sum(request.member is member for request in self._queue)
            max_end = min(self._image.layout.image_bytes, message.begin + self._backend.block_bytes)
            is_valid = message.begin < message.end <= max_end
            if is_valid and waiting < MAX_REQUESTS:
                self._queue.append(request)
                self._changed.notify_all()
                return
        member.reject(
            request,
            SourceBusy(f"[{message.begin}, {message.end}) is not a valid block, or too many blocks are requested"),
        )

    def cancel(self, member: GroupMember, number: int) -> None:
        """Cancel a reader's request."""
        with self._changed:
            for request in self._queue:
                if request.member is member and request.message.number == number:
                    request.dropped = True

    def _run(self) -> None:
        lower_thread_priority(self._nice)
        try:
            self._wait_for_members()
            device = self._backend.device(self._image)
            with self._backend.transfer_context(device):
                self._form(device)
                while True:
                    requests = self._next_block()
                    self._send(requests, requests[0].message.begin, requests[0].message.end)
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
        deadline = time.monotonic() + self._backend.form_timeout_s
        group = self._backend.form(self.rendezvous, 0, self.size, self.address, device, deadline)
        with self._changed:
            self._group = group
        log.debug("group formed", transport=self._backend.name, readers=len(self._members))

    def _send(self, requests: list[BlockRequest], at: int, end: int) -> None:
        """Send a block in pieces, as the egress budget allows. Readers that the gate rejects are dropped."""
        while at < end:
            forks = self._authorize(requests, at, end)
            requests = [request for request in requests if not request.dropped]
            if not requests:
                return
            is_broadcast = len(requests) == len(self._members) > 1
            if len(requests) > 1 and not is_broadcast:
                for request in requests:  # a reader was rejected: send to the others one by one
                    self._send([request], at, end)
                return
            granted = self._acquire_budget(end - at, forks, len(requests))
            if self._send_piece(requests, at, at + granted, is_broadcast=is_broadcast):
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

    def _wait_for_members(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._close_reason or len(self._members) >= MAX_MEMBERS, FORM_WINDOW_S)
            self._gathering = False

    def _next_block(self) -> list[BlockRequest]:
        """Return the next block to send: one reader's request, or the same block for all readers."""
        with self._changed:
            while True:
                self._queue = [request for request in self._queue if not request.dropped]
                self._check_open()
                if not self._queue:
                    self._changed.wait()
                    continue
                first = self._queue[0]
                block = (first.message.begin, first.message.end)
                same = {
                    request.member: request
                    for request in reversed(self._queue)
                    if (request.message.begin, request.message.end) == block
                }
                together = len(same) == len(self._members)
                remaining_s = first.since + BROADCAST_WINDOW_S - time.monotonic()
                if not together and self._waits_for_more and remaining_s > 0:
                    self._changed.wait(remaining_s)
                    continue
                self._waits_for_more = together
                selected = list(same.values()) if together else [first]
                self._queue = [request for request in self._queue if request not in selected]
                return selected

    def _check_open(self) -> None:
        if self._close_reason:
            raise SourceUnavailable(self._close_reason)
