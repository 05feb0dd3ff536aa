"""Source side of the collective transports: serves one image to groups of readers."""

from __future__ import annotations

import atexit
import threading
import time
from concurrent.futures import Future
from itertools import count

from rfork.errors import RforkError, SourceBusy, SourceCorrupt
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.transport.base import AccessGate, ControlStream, Endpoint
from rfork.transport.collective.backend import Backend
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
from rfork.transport.collective.source_group import GroupMember, SourceGroup

RECEIVE_TIMEOUT_S = 3600.0
"""Long, because a reader may be silent: its control stream closes with its channel, and the channel with its
lease.
"""
MAX_READERS = 4096
EXIT_TIMEOUT_S = 8.0
"""Maximum wait for groups to close at process exit; mostly needed by a group that is forming."""

log = logger(__name__)


class CollectiveExporter:
    """Serves `image` through groups of `backend`. Each block is authorized with the reader's newest token.

    `idle_timeout_s`: maximum time for one block; a group that takes longer is closed. `nice`: see
    `lower_thread_priority`.
    """

    def __init__(self, image: Image, gate: AccessGate, backend: Backend, *, idle_timeout_s: float, nice: int) -> None:
        self._image, self._gate, self._backend = image, gate, backend
        self._idle_timeout_s, self._nice = idle_timeout_s, nice
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._addresses: dict[str, str] = {}  # by channel
        self._members: set[GroupMember] = set()
        self._groups: set[SourceGroup] = set()
        self._closed = False
        atexit.register(self._close_at_exit)
        self.broadcasts = 0
        """Broadcast pieces of all closed groups."""
        self.sends = 0
        log.warning(
            "ports of this transport do not check leases: clients can read the weights or crash this process",
            transport=backend.name,
            clients=backend.open_to,
            hint="remove it from RFORK_TRANSPORTS unless all of them are trusted",
        )

    def endpoint(self) -> Endpoint:
        """Return the library's version and the maximum block size; everything else is agreed on the control
        stream.
        """
        version, block = self._backend.version(), str(self._backend.block_bytes)
        return Endpoint(self._backend.name, {"version": version, "block": block})

    def ready(self, deadline: float) -> bool:
        """See `Exporter.ready`: needs no preparation."""
        return True

    def authorize_peer(self, channel_id: str, address: str) -> None:
        """See `Exporter.authorize_peer`. Readers with the same address share groups."""
        with self._lock:
            if len(self._addresses) >= MAX_READERS:
                raise SourceBusy(f"too many open channels (limit {MAX_READERS})")
            self._addresses[channel_id] = address

    def revoke_peer(self, channel_id: str) -> None:
        """See `Exporter.revoke_peer`. Closes the reader's control stream and its group."""
        with self._lock:
            self._addresses.pop(channel_id, None)
            removed = [member for member in self._members if member.channel_id == channel_id]
        for member in removed:
            member.stream.close()
            self._remove_reader(member, "a reader's channel was closed")

    def run_control_stream(self, channel_id: str, stream: ControlStream) -> None:
        """See `Exporter.run_control_stream`."""
        with self._lock:
            address = self._addresses.get(channel_id)
            if address is None or self._closed:
                stream.close()
                return
            member = GroupMember(channel_id, address, stream)
            self._members.add(member)
        try:
            while not member.left:
                self._handle(member, receive_from_reader(stream, time.monotonic() + RECEIVE_TIMEOUT_S))
        except RforkError as error:
            log.debug("reader disconnected", transport=self._backend.name, reason=str(error))
        finally:
            stream.close()
            with self._lock:
                self._members.discard(member)
            self._remove_reader(member, "a reader of the group disconnected")

    def close(self) -> None:
        """Close all control streams and groups; return when none accesses the image any more. Idempotent."""
        self._close(None)
        atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        """Leave no thread inside a process group when the interpreter shuts down: it unwinds the stack of any
        thread that returns from C++, and that aborts the process (SIGABRT).
        """
        self._close(time.monotonic() + EXIT_TIMEOUT_S)

    def _close(self, deadline: float | None) -> None:
        with self._lock:
            self._closed = True
            members, groups = list(self._members), list(self._groups)
        for member in members:
            member.stream.close()
        for group in groups:
            group.disband("the source stopped serving")
        for group in groups:
            group.join(deadline)

    def _handle(
        self, member: GroupMember, message: JoinGroup | RequestBlock | CancelBlock | StorePut | StoreGet
    ) -> None:
        if isinstance(message, JoinGroup):
            self._remove_reader(member, "a reader left the group")
            self._assign_group(member)
            return
        group = self._group_of(member)
        if group is None:
            if isinstance(message, StorePut | StoreGet):
                member.send(GroupClosed(group=message.group, text="the group is closed"))
            return
        match message:
            case RequestBlock():
                group.request(member, message)
            case CancelBlock():
                group.cancel(member, message.number)
            case _ if message.group != group.number:
                member.send(GroupClosed(group=message.group, text="the group is closed"))
            case StorePut():
                admitted = self._backend.may_set(message.key, message.value, member.rank, group.size, member.address)
                if not admitted:
                    raise SourceCorrupt(f"the reader at {member.address} sent an invalid listen address")
                group.rendezvous.put(message.key, message.value)
            case StoreGet():
                reply = group.rendezvous.request(message.keys, wait=message.wait)
                reply.add_done_callback(lambda done: self._send_values(member, message, done))

    def _send_values(self, member: GroupMember, request: StoreGet, reply: Future[list[bytes | None]]) -> None:
        if not reply.cancelled():
            member.send(StoreValues(call=request.call, values=reply.result()))

    def _assign_group(self, member: GroupMember) -> None:
        """Add the reader to a group of its host that is still forming, or to a new group."""
        with self._lock:
            if self._closed:
                return
            if any(group.add(member) for group in self._groups if group.address == member.address):
                return
            group = SourceGroup(
                next(self._numbers),
                member.address,
                self._image,
                self._gate,
                self._backend,
                idle_timeout_s=self._idle_timeout_s,
                nice=self._nice,
                on_closed=self._on_group_closed,
            )
            group.add(member)
            try:
                group.start()
            except RuntimeError as error:  # the thread could not be started
                raise SourceBusy(f"cannot start a thread for a new group: {error}") from None
            self._groups.add(group)

    def _group_of(self, member: GroupMember) -> SourceGroup | None:
        with self._lock:
            return next((group for group in self._groups if group.contains(member)), None)

    def _remove_reader(self, member: GroupMember, reason: str) -> None:
        group = self._group_of(member)
        if group is not None:
            group.disband(reason)

    def _on_group_closed(self, group: SourceGroup) -> None:
        with self._lock:
            self._groups.discard(group)
            self.broadcasts += group.broadcasts
            self.sends += group.sends
