"""Ports for servers that tests start: the one place that chooses them."""

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
"""Not those that the system gives to whoever asks for any: a server binds its port seconds later."""
_port_locks: Final = os.open(
    Path(tempfile.gettempdir()) / f"rfork-test-ports-{os.getuid()}", os.O_RDWR | os.O_CREAT, 0o600
)
"""Has a locked byte for each port that a process of tests has chosen, until that process ends."""

_random = random.SystemRandom()
_chosen: set[int] = set()


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on, nor will soon."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """As `free_port`, all different."""
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
    """Have no other test choose it. Raises OSError where a test of another process has chosen it."""
    if port in _chosen:  # a process may lock twice what it holds
        return False
    fcntl.lockf(_port_locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    _chosen.add(port)
    return True
