"""Processes of `benchmarks.chaos` as seen by the process that runs the rounds."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
from pathlib import Path
from typing import Final

from benchmarks.chaos_messages import RESPONSE_ADAPTER, ChaosCommand, ChaosResponse
from benchmarks.fanout_messages import encode_line

STOP_TIMEOUT_S: Final = 20.0
"""Timeout for a killed process to end."""


class ChaosProcess:
    """A process started by the fork server; signals are sent by pidfd and reach no other process."""

    def __init__(self, name: str, pid: int, log: Path) -> None:
        self.name = name
        self.pid = pid
        self.log = log
        self._handle = os.pidfd_open(pid)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; does nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def wait(self, seconds: float) -> bool:
        """Return True if it ended within `seconds`."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._handle, selectors.EVENT_READ)
            return bool(selector.select(seconds))

    def kill(self) -> None:
        """Kill it and wait until it has ended."""
        self.signal(signal.SIGKILL)
        self.wait(STOP_TIMEOUT_S)

    def close(self) -> None:
        """Release its pidfd."""
        os.close(self._handle)


class NodeHandle:
    """A node process and the connection to it."""

    def __init__(self, process: ChaosProcess, connection: socket.socket) -> None:
        self.process = process
        self.connection = connection
        self._pending = b""

    def send(self, command: ChaosCommand) -> None:
        """Send it a command; does nothing if it has ended."""
        with contextlib.suppress(OSError):
            self.connection.sendall(encode_line(command))

    def receive_responses(self) -> list[ChaosResponse] | None:
        """Return its responses since the last call; None if it has ended."""
        try:
            data = self.connection.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self._pending = (self._pending + data).split(b"\n")
        return [RESPONSE_ADAPTER.validate_json(text) for text in lines]

    def close(self) -> None:
        """Close the connection, which ends the process."""
        self.connection.close()
        self.process.close()
