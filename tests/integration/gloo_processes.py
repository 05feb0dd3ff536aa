"""Processes that communicate over gloo: `GlooProcess`, and the resources of this process to check."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.fork_server import PythonProcess
from tests.processes import send
from tests.transport_contract import soon

THREAD_PREFIXES = ("rfork-gloo", "rfork-control")
LISTEN = "0A"
"""The state of a listening socket in /proc/net/tcp."""


def running_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in THREAD_PREFIXES]


def wait_until(condition: Callable[[], bool]) -> bool:
    """Return True if the condition becomes true within half a minute."""
    deadline, changed = soon(), threading.Event()
    while time.monotonic() < deadline:
        if condition():
            return True
        changed.wait(0.01)
    return False


def listening_ports(process_id: int) -> set[int]:
    """Return the TCP ports that a process listens on over IPv4."""
    open_files: set[str] = set()
    for link in Path(f"/proc/{process_id}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed in the meantime
            open_files.add(os.readlink(link))
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {
        int(line[1].rpartition(":")[2], 16)
        for line in lines
        if line[3] == LISTEN and f"socket:[{line[9]}]" in open_files
    }


class GlooProcess:
    """A process of `tests.integration.gloo_node`; its events are lines."""

    def __init__(self, *arguments: str) -> None:
        self.process = PythonProcess(
            [sys.executable, "-X", "faulthandler", "-m", "tests.integration.gloo_node", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def next_event(self) -> str:
        """Return the next event; empty once the process has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def signal(self, number: signal.Signals) -> None:
        send(self.process, number)

    def wait_exit(self) -> tuple[int, str]:
        """Close its standard input and wait for its end.

        Return its exit code (negative: the signal) and its standard error.
        """
        _, written = self.process.communicate(timeout=60)
        return self.process.returncode, written

    def ports(self) -> set[int]:
        """Ports that it listens on now."""
        return listening_ports(self.process.pid)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def node() -> Iterator[Callable[..., GlooProcess]]:
    """Starts nodes and kills them after the test."""
    started: list[GlooProcess] = []

    def start(*arguments: str) -> GlooProcess:
        started.append(GlooProcess(*arguments))
        return started[-1]

    yield start
    for each in started:
        each.close()
