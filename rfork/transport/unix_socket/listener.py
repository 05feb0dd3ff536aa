"""Creates a source's listening sockets, abstract or in a directory. Runs on the source."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path
from typing import Final

from rfork.errors import SettingsError
from rfork.transport.unix_socket.host_identity import socket_path

BACKLOG: Final = 1024
PREFIX: Final = "rfork-"
SUFFIX: Final = ".socket"
_SO_PASSRIGHTS: Final = 83


def listen(address: str) -> socket.socket:
    """Listen on an abstract name. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(address)
        _reject_fds(listener)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _reject_fds(listener: socket.socket) -> None:
    """Reject descriptors on this socket and on accepted ones; the sender gets EPERM."""
    with contextlib.suppress(OSError):  # not supported before Linux 6.16
        listener.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)


def listen_in(file: Path) -> socket.socket:
    """Listen on a file. It gets its final name once connections are accepted, so an unreachable file is
    stale.

    Raises SettingsError if the directory cannot be used.
    """
    temporary = file.with_suffix(".new")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        _remove_stale(file.parent)
        with socket_path(temporary) as path:
            listener.bind(path)
        os.chmod(temporary, 0o600)
        _reject_fds(listener)
        listener.listen(BACKLOG)
        os.rename(temporary, file)
    except OSError as error:
        listener.close()
        temporary.unlink(missing_ok=True)
        message = f"cannot create a socket in {file.parent}: {error.strerror}"
        raise SettingsError(f"RFORK_UNIX_SOCKET_DIR: {message}") from None
    return listener


def _remove_stale(folder: Path) -> None:
    """Remove sockets of dead processes."""
    for file in folder.glob(f"{PREFIX}*{SUFFIX}"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            if not stat.S_ISSOCK(file.lstat().st_mode):
                continue
            probe.setblocking(False)
            try:
                with socket_path(file) as path:
                    probe.connect(path)
            except ConnectionRefusedError:
                file.unlink(missing_ok=True)
