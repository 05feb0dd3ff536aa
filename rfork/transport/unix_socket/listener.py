"""Sockets that a source listens on, without a file or in a folder. Runs on the source."""

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
    """Listen on a name without a file. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(address)
        _refuse_fds(listener)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _refuse_fds(listener: socket.socket) -> None:
    """On this socket and those that it accepts; whoever sends one is told EPERM."""
    with contextlib.suppress(OSError):  # before Linux 6.16
        listener.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)


def listen_in(file: Path) -> socket.socket:
    """Listen on a file; it gets its name once it can be connected to: one that cannot is of the dead.

    Raises SettingsError when the folder cannot be used.
    """
    new = file.with_suffix(".new")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        _remove_stale(file.parent)
        with socket_path(new) as path:
            listener.bind(path)
        os.chmod(new, 0o600)
        _refuse_fds(listener)
        listener.listen(BACKLOG)
        os.rename(new, file)
    except OSError as error:
        listener.close()
        new.unlink(missing_ok=True)
        why = f"cannot make a socket in {file.parent}: {error.strerror}"
        raise SettingsError(f"RFORK_UNIX_SOCKET_DIR: {why}") from None
    return listener


def _remove_stale(folder: Path) -> None:
    """Remove the sockets of processes that died before they could."""
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
