"""Port allocation for servers that tests start."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import Final

BELOW_EPHEMERAL: Final = range(20000, 32000)
"""Ports below the ephemeral range, which the system assigns to other sockets: a server binds its port seconds
later.
"""
_port_locks: Final = os.open(
    Path(tempfile.gettempdir()) / f"rfork-test-ports-{os.getuid()}", os.O_RDWR | os.O_CREAT, 0o600
)
"""Contains a locked byte for each port that a test process has allocated, until that process ends."""

_random = random.SystemRandom()
_chosen: set[int] = set()


def free_port() -> int:
    """Return a free TCP port of the loopback interface, reserved for this process."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return `count` different free ports."""
    with contextlib.ExitStack() as open_sockets:
        ports = list[int]()
        while len(ports) < count:
            port, probe = _random.choice(BELOW_EPHEMERAL), open_sockets.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                if _reserve(port):
                    ports.append(port)
        return ports


def _reserve(port: int) -> bool:
    """Reserve a port. Raises OSError if a test of another process has reserved it."""
    if port in _chosen:  # a process may lock its own bytes again
        return False
    fcntl.lockf(_port_locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    _chosen.add(port)
    return True
