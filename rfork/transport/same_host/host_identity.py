"""Identity of this host, and of the namespaces and directories that two processes must share to connect."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rfork.transport.base import Availability

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_CREDENTIALS: Final = struct.Struct("iII")


def boot_id() -> str:
    """Return the kernel's boot id, equal in all containers of a host; "" if unknown."""
    try:
        return _BOOT.read_text("ascii").strip()
    except (OSError, ValueError):
        return ""


def namespace(namespace_type: str) -> str:
    """Return the identity of a namespace of this process ("net", "pid", …) within its host; "" if unknown."""
    try:
        return os.readlink(f"/proc/self/ns/{namespace_type}")
    except OSError:
        return ""


def network_namespace() -> str:
    """Return the network namespace; abstract sockets are visible only within it."""
    return namespace("net")


def pid_uid_namespace() -> str:
    """Return the PID and user namespaces; process and user ids are comparable only within them."""
    return " ".join(names) if all(names := (namespace("pid"), namespace("user"))) else ""


def process_identity() -> str:
    """Return process id and user id, as the other end of a socket sees them."""
    return f"{os.getpid()} {os.geteuid()}"


def peer_identity(connected: socket.socket) -> str:
    """Return the identity of the process listening at the other end; see `process_identity`. Raises OSError."""
    process, user, _ = _CREDENTIALS.unpack(
        connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return f"{process} {user}"


def directory_identity(folder: Path) -> str:
    """Return the identity of a directory within its host, wherever it is mounted; "" if it is missing."""
    try:
        status = os.stat(folder)
    except OSError:
        return ""
    return f"{status.st_dev}:{status.st_ino}"


@contextlib.contextmanager
def socket_path(file: Path) -> Iterator[str]:
    """Return a short path for binding or connecting a socket: the kernel's limit is 107 bytes. Raises
    OSError.
    """
    folder = os.open(file.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{file.name}"
    finally:
        os.close(folder)


def same_host_availability() -> Availability:
    """Report if processes of this host can pass descriptors: Linux with Unix sockets."""
    if not sys.platform.startswith("linux"):
        return Availability(False, "needs Linux")
    if not hasattr(socket, "AF_UNIX") or not boot_id():
        return Availability(False, "needs /proc and Unix sockets")
    return Availability(True, "Unix sockets to processes of this host")
