"""What names this host and the parts of it that processes have to share to meet."""

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
    """What the running kernel calls itself, the same in all containers of a host; "" where it has no name."""
    try:
        return _BOOT.read_text("ascii").strip()
    except (OSError, ValueError):
        return ""


def namespace(namespace_type: str) -> str:
    """Names a namespace of this process ("net", "pid", …) within its host; "" where that cannot be told."""
    try:
        return os.readlink(f"/proc/self/ns/{namespace_type}")
    except OSError:
        return ""


def network_namespace() -> str:
    """The network namespace: sockets without a file are seen from within one only."""
    return namespace("net")


def pid_uid_namespace() -> str:
    """Names what gives processes and users their numbers; those of two sides compare where it is the same."""
    return " ".join(names) if all(names := (namespace("pid"), namespace("user"))) else ""


def process_identity() -> str:
    """This process as the other end of its sockets sees it: its number and its user's."""
    return f"{os.getpid()} {os.geteuid()}"


def peer_identity(connected: socket.socket) -> str:
    """The same of the process that listens at the other end. Raises OSError."""
    process, user, _ = _CREDENTIALS.unpack(
        connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return f"{process} {user}"


def directory_identity(folder: Path) -> str:
    """Names a folder within its host, wherever it is mounted; "" for one that is not there."""
    try:
        status = os.stat(folder)
    except OSError:
        return ""
    return f"{status.st_dev}:{status.st_ino}"


@contextlib.contextmanager
def socket_path(file: Path) -> Iterator[str]:
    """A short path of a file to bind or connect a socket to: the kernel takes 107 bytes. Raises OSError."""
    folder = os.open(file.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{file.name}"
    finally:
        os.close(folder)


def same_host_availability() -> Availability:
    """Whether processes of this host can pass descriptors to one another: Linux, by Unix sockets."""
    if not sys.platform.startswith("linux"):
        return Availability(False, "needs Linux")
    if not hasattr(socket, "AF_UNIX") or not boot_id():
        return Availability(False, "needs /proc and Unix sockets")
    return Availability(True, "Unix sockets to processes of this host")
