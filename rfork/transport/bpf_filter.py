"""Who reaches an engine's ports: a packet filter on its listeners, as the engine itself lets everybody in.

Whoever connects to Mooncake's handshake port can read the address map, hold up the one thread that
answers, or end the process with one malformed message; whoever connects to its TCP data port reads
and writes all registered memory; whoever is first at the port of a gloo group is taken for its reader.
So nobody connects but hosts that were let in: a classic BPF program on the listening socket is run on
every packet that asks for a connection, and connections inherit it (Linux, `socket(7)`:
SO_ATTACH_FILTER; needs no privilege). What it drops is never answered.

It tells hosts apart, not processes: while one is let in, all that runs there is. Runs on both sides,
as the target's engine listens too.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Collection, Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address

from rfork.errors import SourceBusy, TransportUnavailable

Address = IPv4Address | IPv6Address
Instruction = tuple[int, int, int, int]
"""One `struct sock_filter`: code, jump if true, jump if false, operand. Jumps count from the next one."""

MAX_ADDRESSES = 128
"""Two programs of so many fit into what older kernels grant a socket (20 KiB)."""
ACCEPT_TIMEOUT_S = 0.05
"""Longest wait for the engine to accept what was queued before the filter changed, so that it can be cut."""

_SO_ATTACH_FILTER = 26
_IP_HEADER = 0xFFF00000  # SKF_NET_OFF: loads from here on look into the IP header
_LOAD_BYTE, _LOAD_WORD = 0x30, 0x20  # BPF_LD | BPF_ABS | BPF_B, and BPF_W
_SHIFT_RIGHT, _GO, _IF_EQUAL, _RETURN = 0x74, 0x05, 0x15, 0x06  # all with an operand
_PASS, _DROP = (_RETURN, 0, 0, 0xFFFFFFFF), (_RETURN, 0, 0, 0)
_SOURCE_4, _SOURCE_6 = 12, 8  # where the two IP headers hold the source address
_QUEUE_OFFSET = 24  # tcpi_unacked in `struct tcp_info`: how many connections a listener has queued


def build_bpf(addresses: Collection[Address]) -> tuple[Instruction, ...]:
    """The filter that passes the packets of these addresses, and drops all others."""
    fourth: list[Instruction] = [(_LOAD_WORD, 0, 0, _IP_HEADER + _SOURCE_4)]
    sixth: list[Instruction] = []
    for address in addresses:
        words = struct.unpack(f"!{address.max_prefixlen // 32}I", address.packed)
        if address.version == 4:
            fourth += [(_IF_EQUAL, 0, 1, words[0]), _PASS]
            continue
        for index, word in enumerate(words):
            sixth.append((_LOAD_WORD, 0, 0, _IP_HEADER + _SOURCE_6 + 4 * index))
            sixth.append((_IF_EQUAL, 0, 7 - 2 * index, word))  # or on to the next address
        sixth.append(_PASS)
    # The packet's version decides, not the socket's: one that listens for both families gets both.
    version = ((_LOAD_BYTE, 0, 0, _IP_HEADER), (_SHIFT_RIGHT, 0, 0, 4), (_IF_EQUAL, 1, 0, 4))
    return (*version, (_GO, 0, 0, len(fourth) + 1), *fourth, _DROP, *sixth, _DROP)


class PacketFilter:
    """The listeners of one engine, and the addresses that reach them: none at first. Thread-safe.

    Raises TransportUnavailable where a socket takes no filter: there the engine must not run.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cutting = threading.Lock()  # taken before the other: to cut takes a while, to let in must not
        self._listeners: dict[int, list[socket.socket]] = {}  # by port; duplicates
        self._inside: dict[str, Address] = {}

    def add(self, port: int, accept_s: float | None = None) -> None:
        """Stand before a port that this process listens on; its accept() shall wake every `accept_s`."""
        with self._lock:
            listeners = [
                duplicate_of(candidate.fileno())
                for candidate in _sockets()
                if _listens_on(candidate, port, listens=True)
            ]
            if not listeners:
                raise TransportUnavailable(f"the engine does not listen on its port {port}")
            self._listeners[port] = listeners
            self._attach()
            if accept_s is not None:
                limit = struct.pack("@ll", 0, round(accept_s * 1e6))
                for listener in listeners:
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def allow(self, name: str, address: str) -> None:
        """Let the host of an IP address in, until `deny` is told the same name.

        Raises SourceBusy when too many are in already, and for what is no IP address.
        """
        host = _host(address)
        with self._lock:
            before = set(self._inside.values())
            if host not in before and len(before) >= MAX_ADDRESSES:
                raise SourceBusy(f"the packet filter lets in {MAX_ADDRESSES} hosts at once, no more")
            self._inside[name] = host
            if host not in before:
                self._attach()

    def deny(self, name: str) -> None:
        """Undo `allow`: with the last name of an address its connections end, which may take `ACCEPT_TIMEOUT_S`."""
        with self._cutting:
            with self._lock:
                removed = self._inside.pop(name, None)
                if removed is None or removed in self._inside.values():
                    return
                self._attach()
            self._cut()

    def cut(self) -> bool:
        """End the connections of whoever came before the filter did; whether somebody had."""
        with self._cutting:
            return self._cut()

    def close(self) -> None:
        """Let go of the listeners, so that the engine can close them. Safe to call twice."""
        with self._cutting, self._lock:
            for listener in self._all():
                listener.close()
            self._listeners.clear()

    def _all(self) -> list[socket.socket]:
        return [listener for listeners in self._listeners.values() for listener in listeners]

    def _attach(self) -> None:
        steps = build_bpf(set(self._inside.values()))
        packed = ctypes.create_string_buffer(b"".join(struct.pack("@HBBI", *step) for step in steps))
        described = struct.pack("@HP", len(steps), ctypes.addressof(packed))  # a `struct sock_fprog`
        for listener in self._all():
            try:
                listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)
            except OSError as error:
                raise TransportUnavailable(
                    f"the packet filter cannot keep strangers from {listener.getsockname()}: {error}",
                    hint="it needs Linux, where sockets take a packet filter; use RFORK_TRANSPORTS=http",
                ) from error

    def _cut(self) -> bool:
        """End the connections of who is not let in: they came before the filter did."""
        until = time.monotonic() + ACCEPT_TIMEOUT_S
        pause, found = threading.Event(), False
        while True:
            queued = any(_backlog_length(listener) for listener in self._all())
            for candidate in _sockets():
                if any(_listens_on(candidate, port, listens=False) for port in self._listeners):
                    found |= self._end(candidate)
            if not queued or time.monotonic() >= until:
                return found or queued
            pause.wait(0.001)

    def _end(self, connection: socket.socket) -> bool:
        """Whether it was a stranger's, or one that can no longer be told."""
        try:
            host = _host(connection.getpeername()[0])
            with self._lock:
                is_unauthorized = host not in self._inside.values()
                if is_unauthorized:
                    connection.shutdown(socket.SHUT_RDWR)
                return is_unauthorized
        except OSError as error:
            if error.errno != errno.ENOTCONN:  # it ended by itself
                raise
            return True


def _host(text: str) -> Address:
    """An IP address without its scope; IPv4 as such, however a socket of both families writes it."""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        raise SourceBusy(f"the packet filter lets hosts in by IP address, and {text!r} is none") from None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _sockets() -> Iterator[socket.socket]:
    """The TCP sockets of this process, whoever made them; each a duplicate that is closed at the next."""
    for name in os.listdir("/proc/self/fd"):
        try:
            # First: to close a duplicate of a file would give up the process's locks on that file.
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            candidate = duplicate_of(int(name))
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.ENOTSOCK):
                raise
            continue  # closed by another thread meanwhile
        with candidate:
            if candidate.family in (socket.AF_INET, socket.AF_INET6) and candidate.type == socket.SOCK_STREAM:
                yield candidate


def duplicate_of(descriptor: int) -> socket.socket:
    """Not socket.dup(), which would make the engine's accept() a blocking one."""
    duplicate = os.dup(descriptor)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


def _listens_on(candidate: socket.socket, port: int, *, listens: bool) -> bool:
    accepts = bool(candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return accepts == listens and candidate.getsockname()[1] == port


def _backlog_length(listener: socket.socket) -> int:
    information = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _QUEUE_OFFSET + 4)
    return int.from_bytes(information[_QUEUE_OFFSET:], sys.byteorder)
