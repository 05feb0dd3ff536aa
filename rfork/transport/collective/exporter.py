"""The source side: one image, given to groups of readers that talk with it on their lines."""

from __future__ import annotations

import threading
import time
from itertools import count

from rfork.errors import RforkError, SourceBusy, SourceCorrupt
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.transport.base import AccessGate, ControlStream, Endpoint
from rfork.transport.collective.exit_hook import ExitHook
from rfork.transport.collective.group import Backend
from rfork.transport.collective.group_member import GroupMember
from rfork.transport.collective.group_sender import GroupSender
from rfork.transport.collective.messages import (
    CancelBlock,
    GroupClosed,
    JoinGroup,
    RequestBlock,
    StoreGet,
    StorePut,
    StoreValues,
    receive_from_reader,
)

LISTEN_S = 3600.0
"""A reader may say nothing for long: its line ends with its channel, and that with its lease."""
MAX_READERS = 4096
LEAVE_S = 8.0
"""A process that ends waits so long for its groups; one that forms now needs most of that."""

log = logger(__name__)


class CollectiveExporter:
    """Gives `image` through groups of `backend`. Every block passes the gate, with the reader's newest token.

    `source_idle_timeout_s`: so long a block may take before its group is broken up. `nice`: see `lower_thread_priority`.
    """

    def __init__(self, image: Image, gate: AccessGate, backend: Backend, *, stall_s: float, nice: int) -> None:
        self._image, self._gate, self._backend = image, gate, backend
        self._stall_s, self._nice = stall_s, nice
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._addresses: dict[str, str] = {}  # by channel
        self._members: set[GroupMember] = set()
        self._groups: set[GroupSender] = set()
        self._closed = False
        self._at_exit = ExitHook(self._leave_process)
        self.broadcasts = 0
        """Pieces that went to several readers at once, of groups that are over."""
        self.sends = 0
        log.warning(
            f"{backend.name}: its ports ask for no lease, and let in {backend.open_to}, to read and to end "
            "this process; take it out of RFORK_TRANSPORTS unless you trust all of them"
        )

    def endpoint(self) -> Endpoint:
        """The version of the library, and the most bytes of a block: the rest is agreed on the line."""
        version, block = self._backend.version(), str(self._backend.block_bytes)
        return Endpoint(self._backend.name, {"version": version, "block": block})

    def ready(self, deadline: float) -> bool:
        """See `FakeSpanExporter.ready`: nothing is done before a reader comes."""
        return True

    def authorize_peer(self, channel_id: str, address: str) -> None:
        """Readers of one address share groups; see `FakeSpanExporter.authorize_peer`."""
        with self._lock:
            if len(self._addresses) >= MAX_READERS:
                raise SourceBusy(f"{MAX_READERS} channels are open")
            self._addresses[channel_id] = address

    def revoke_peer(self, channel_id: str) -> None:
        """End its line and the group that it is in; see `FakeSpanExporter.revoke_peer`."""
        with self._lock:
            self._addresses.pop(channel_id, None)
            leaving = [member for member in self._members if member.channel_id == channel_id]
        for member in leaving:
            member.line.close()
            self._remove_reader(member, "a reader's channel was closed")

    def run_control_stream(self, channel_id: str, line: ControlStream) -> None:
        """Hear what one reader says until its line ends; see `FakeSpanExporter.converse`."""
        with self._lock:
            address = self._addresses.get(channel_id)
            if address is None or self._closed:
                line.close()
                return
            member = GroupMember(channel_id, address, line)
            self._members.add(member)
        try:
            while not member.left:
                self._handle(member, receive_from_reader(line, time.monotonic() + LISTEN_S))
        except RforkError as error:
            log.debug("a reader is gone", transport=self._backend.name, because=str(error))
        finally:
            line.close()
            with self._lock:
                self._members.discard(member)
            self._remove_reader(member, "a reader of the group is gone")

    def close(self) -> None:
        """End all lines and groups; returns once none touches the image. Safe to call twice."""
        self._end(None)
        self._at_exit.cancel()

    def _leave_process(self) -> None:
        self._end(time.monotonic() + LEAVE_S)

    def _end(self, deadline: float | None) -> None:
        with self._lock:
            self._closed = True
            members, groups = list(self._members), list(self._groups)
        for member in members:
            member.line.close()
        for group in groups:
            group.disband("the source stops giving")
        for group in groups:
            group.join(deadline)

    def _handle(
        self, member: GroupMember, message: JoinGroup | RequestBlock | CancelBlock | StorePut | StoreGet
    ) -> None:
        if isinstance(message, JoinGroup):
            self._remove_reader(member, "a reader of the group left it")
            self._assign_group(member)
            return
        group = self._group_of(member)
        if group is None:
            if isinstance(message, StorePut | StoreGet):
                member.send(GroupClosed(group=message.group, text="the group is over"))
            return
        match message:
            case RequestBlock():
                group.request(member, message)
            case CancelBlock():
                group.drop(member, message.number)
            case _ if message.group != group.number:
                member.send(GroupClosed(group=message.group, text="the group is over"))
            case StorePut():
                admitted = self._backend.admits(message.key, message.value, member.rank, group.size, member.address)
                if not admitted:
                    raise SourceCorrupt(f"the reader at {member.address} does not say where it listens")
                group.rendezvous.put(message.key, message.value)
            case StoreGet():
                call = message.call
                group.rendezvous.get_values_async(
                    message.keys,
                    lambda values: member.send(StoreValues(call=call, values=values)),
                    wait=message.wait,
                )

    def _assign_group(self, member: GroupMember) -> None:
        """Into the group of its host that still gathers, or a new one."""
        with self._lock:
            if self._closed:
                return
            if any(group.add(member) for group in self._groups if group.address == member.address):
                return
            group = GroupSender(
                next(self._numbers),
                member.address,
                self._image,
                self._gate,
                self._backend,
                stall_s=self._stall_s,
                nice=self._nice,
                ended=self._on_group_closed,
            )
            group.add(member)
            try:
                group.start()
            except RuntimeError as error:  # no thread to be had
                raise SourceBusy(f"no thread is left for a group: {error}") from None
            self._groups.add(group)

    def _group_of(self, member: GroupMember) -> GroupSender | None:
        with self._lock:
            return next((group for group in self._groups if group.contains(member)), None)

    def _remove_reader(self, member: GroupMember, why: str) -> None:
        group = self._group_of(member)
        if group is not None:
            group.disband(why)

    def _on_group_closed(self, group: GroupSender) -> None:
        with self._lock:
            self._groups.discard(group)
            self.broadcasts += group.broadcasts
            self.sends += group.sends
