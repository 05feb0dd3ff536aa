"""Ports for servers that tests start: the one place that chooses them."""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Final

BELOW_EPHEMERAL: Final = range(20000, 32000)
"""Not those that the system gives to whoever asks for any: a server binds its port seconds later."""

_chance = random.SystemRandom()


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on, nor will soon."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """As `free_port`, all different."""
    with contextlib.ExitStack() as held:
        ports = list[int]()
        while len(ports) < count:
            port, probe = _chance.choice(BELOW_EPHEMERAL), held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                ports.append(port)
        return ports
