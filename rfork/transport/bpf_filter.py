"""Packet filter for an engine's listening sockets, because the engine itself accepts every connection.

A client of Mooncake's handshake port can read the address map, block its only serving thread, or crash the
process with one malformed message. A client of Mooncake's TCP data port can read and write all registered
memory; of UCX's TCP port (NIXL), all memory of the process. The first client of a gloo group's port is accepted
as its reader.

So only authorized hosts may connect: a classic BPF program on the listening socket runs on every packet that
requests a connection, and accepted connections inherit it (Linux, `socket(7)`: SO_ATTACH_FILTER; needs no
privilege). Dropped packets get no reply.

The filter distinguishes hosts, not processes: every process on an authorized host may connect. Runs on both
sides, because the target's engine listens too.

Nothing simpler keeps these ports closed. Mooncake listens on every interface and has no setting for it; gloo
listens on one address, but accepts any client there, whatever secret the rendezvous contains; its TLS is not
compiled into torch's wheels ("unsupported gloo device"); rules of the system's firewall need a privilege.
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
"""One `struct sock_filter`: code, jump if true, jump if false, operand. Jumps are relative to the next
instruction.
"""

MAX_ADDRESSES = 128
"""Two programs of this many addresses fit into the socket memory limit of older kernels (20 KiB)."""
ACCEPT_TIMEOUT_S = 0.05
"""Maximum wait until the engine has accepted the connections queued before a filter change, so that they can
be closed.
"""

_SO_ATTACH_FILTER = 26
_IP_HEADER = 0xFFF00000  # SKF_NET_OFF: loads from this offset read the IP header
_LOAD_BYTE, _LOAD_WORD = 0x30, 0x20  # BPF_LD | BPF_ABS | BPF_B, and BPF_W
_SHIFT_RIGHT, _JUMP, _IF_EQUAL, _RETURN = 0x74, 0x05, 0x15, 0x06  # all with an operand
_PASS, _DROP = (_RETURN, 0, 0, 0xFFFFFFFF), (_RETURN, 0, 0, 0)
_SOURCE_4, _SOURCE_6 = 12, 8  # offset of the source address in the IPv4 and in the IPv6 header
_QUEUE_OFFSET = 24  # offset of tcpi_unacked in `struct tcp_info`: the number of connections in a listener's backlog


def build_bpf(addresses: Collection[Address]) -> tuple[Instruction, ...]:
    """Return a filter program that passes packets from these addresses and drops all others."""
    ipv4: list[Instruction] = [(_LOAD_WORD, 0, 0, _IP_HEADER + _SOURCE_4)]
    ipv6: list[Instruction] = []
    for address in addresses:
        words = struct.unpack(f"!{address.max_prefixlen // 32}I", address.packed)
        if address.version == 4:
            ipv4 += [(_IF_EQUAL, 0, 1, words[0]), _PASS]
            continue
        for index, word in enumerate(words):
            ipv6.append((_LOAD_WORD, 0, 0, _IP_HEADER + _SOURCE_6 + 4 * index))
            ipv6.append((_IF_EQUAL, 0, 7 - 2 * index, word))  # no match: jump to the next address
        ipv6.append(_PASS)
    # Branch on the version of the packet, not of the socket: a dual-stack socket receives both.
    version = ((_LOAD_BYTE, 0, 0, _IP_HEADER), (_SHIFT_RIGHT, 0, 0, 4), (_IF_EQUAL, 1, 0, 4))
    return (*version, (_JUMP, 0, 0, len(ipv4) + 1), *ipv4, _DROP, *ipv6, _DROP)


class PacketFilter:
    """Filters the listening sockets of one engine by address; initially no address may connect. Thread-safe.

    Raises TransportUnavailable if a socket does not support filters; the engine must not run then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Acquired before `_lock`: closing connections is slow, and `allow` must not wait for it.
        self._close_lock = threading.Lock()
        self._listeners: dict[int, list[socket.socket]] = {}  # by port; duplicated descriptors
        self._allowed: dict[str, Address] = {}

    def add(self, port: int, accept_s: float | None = None) -> None:
        """Filter a port that this process listens on. `accept_s`: timeout of the engine's accept() calls."""
        with self._lock:
            listeners = [
                duplicate_of(candidate.fileno())
                for candidate in _sockets()
                if _listens_on(candidate, port, listens=True)
            ]
            if not listeners:
                raise TransportUnavailable(f"the transport's library does not listen on its port {port}")
            self._listeners[port] = listeners
            self._attach()
            if accept_s is not None:
                limit = struct.pack("@ll", 0, round(accept_s * 1e6))
                for listener in listeners:
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def allow(self, name: str, address: str) -> None:
        """Allow the host with this IP address to connect, until `deny` is called with the same name.

        Raises SourceBusy if too many hosts are allowed already, or if `address` is not an IP address.
        """
        host = _host(address)
        with self._lock:
            allowed_hosts = set(self._allowed.values())
            if host not in allowed_hosts and len(allowed_hosts) >= MAX_ADDRESSES:
                raise SourceBusy(f"the packet filter allows at most {MAX_ADDRESSES} hosts")
            self._allowed[name] = host
            if host not in allowed_hosts:
                self._attach()

    def deny(self, name: str) -> None:
        """Undo `allow`. Without another name for the address, close its connections; takes up to
        `ACCEPT_TIMEOUT_S`.
        """
        with self._close_lock:
            with self._lock:
                removed = self._allowed.pop(name, None)
                if removed is None or removed in self._allowed.values():
                    return
                self._attach()
            self._close_unauthorized()

    def close_unauthorized(self) -> bool:
        """Close connections that were opened before the filter was installed; return True if there were any."""
        with self._close_lock:
            return self._close_unauthorized()

    def close(self) -> None:
        """Release the listeners, so that the engine can close them. Idempotent."""
        with self._close_lock, self._lock:
            for listener in self._all_listeners():
                listener.close()
            self._listeners.clear()

    def _all_listeners(self) -> list[socket.socket]:
        return [listener for listeners in self._listeners.values() for listener in listeners]

    def _attach(self) -> None:
        steps = build_bpf(set(self._allowed.values()))
        packed = ctypes.create_string_buffer(b"".join(struct.pack("@HBBI", *step) for step in steps))
        program = struct.pack("@HP", len(steps), ctypes.addressof(packed))  # a `struct sock_fprog`
        for listener in self._all_listeners():
            try:
                listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
            except OSError as error:
                raise TransportUnavailable(
                    f"cannot attach a packet filter to {listener.getsockname()}: {error}",
                    hint="packet filters on sockets need Linux; use RFORK_TRANSPORTS=http",
                ) from error

    def _close_unauthorized(self) -> bool:
        """Close connections of hosts that are not allowed: they connected before the filter was installed."""
        deadline = time.monotonic() + ACCEPT_TIMEOUT_S
        found = False
        while True:
            queued = any(_backlog_length(listener) for listener in self._all_listeners())
            for candidate in _sockets():
                if any(_listens_on(candidate, port, listens=False) for port in self._listeners):
                    found |= self._shutdown_if_unauthorized(candidate)
            if not queued or time.monotonic() >= deadline:
                return found or queued
            time.sleep(0.001)

    def _shutdown_if_unauthorized(self, connection: socket.socket) -> bool:
        """Shut down the connection unless its host is allowed; return True also if the host is unknown by
        now.
        """
        try:
            host = _host(connection.getpeername()[0])
            with self._lock:
                is_unauthorized = host not in self._allowed.values()
                if is_unauthorized:
                    connection.shutdown(socket.SHUT_RDWR)
                return is_unauthorized
        except OSError as error:
            if error.errno != errno.ENOTCONN:  # the peer closed it already
                raise
            return True


def listening_ports() -> frozenset[int]:
    """Return the TCP ports that this process listens on."""
    return frozenset(
        int(candidate.getsockname()[1])
        for candidate in _sockets()
        if candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    )


def _host(text: str) -> Address:
    """Parse an IP address, drop its scope, and convert an IPv4-mapped IPv6 address to IPv4."""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        raise SourceBusy(f"the packet filter needs an IP address, got {text!r}") from None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of every TCP socket of this process; each is closed before the next is returned."""
    for name in os.listdir("/proc/self/fd"):
        try:
            # Check the type first: closing a duplicate of a file releases the process's locks on that file.
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            candidate = duplicate_of(int(name))
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.ENOTSOCK):
                raise
            continue  # closed by another thread in the meantime
        with candidate:
            if candidate.family in (socket.AF_INET, socket.AF_INET6) and candidate.type == socket.SOCK_STREAM:
                yield candidate


def duplicate_of(descriptor: int) -> socket.socket:
    """Duplicate a socket. Unlike socket.dup(), it does not make the engine's accept() blocking."""
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
