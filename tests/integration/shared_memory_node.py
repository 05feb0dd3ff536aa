"""A shared_memory source in its own process, and `SharedMemoryNode`, which controls it.

Each command is one line on standard input, and its response one line on standard output. The process exits
when its standard input is closed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

from typing_extensions import Self

from rfork.image.chunks import MIB
from rfork.settings import InstanceSettings
from rfork.transport.base import Endpoint
from rfork.transport.shared_memory import SharedMemoryTransport
from tests.fork_server import PythonProcess
from tests.processes import send
from tests.transport_contract import FakeGate, image_of

SIZES = (3 * MIB + 17, 5, *(1000 + index for index in range(50)), 2 * MIB, 4096)
OLD, NEW = 1, 1000
"""Random seeds of the initial weights, and of those after an update."""


class SharedMemoryNode:
    """The test's handle of the process. Close it after use."""

    def __init__(self, **options: str) -> None:
        self._process = PythonProcess(
            [sys.executable, "-m", "tests.integration.shared_memory_node"],
            env={**os.environ, **options},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.endpoint = Endpoint("shared_memory", json.loads(self._line()))

    def request(self, command: str) -> str:
        """Execute a command in the process and return its response."""
        if self._process.stdin is None:
            raise RuntimeError("the process has no standard input")
        print(command, file=self._process.stdin, flush=True)
        return self._line()

    def signal(self, number: int) -> None:
        """Send a signal."""
        send(self._process, number)

    def wait_until_blocked(self) -> None:
        """Block until a reader is blocked, after `block_reader`."""
        if self._line() != "blocked":
            raise RuntimeError("unexpected response")

    def _line(self) -> str:
        if self._process.stdout is None or not (line := self._process.stdout.readline()):
            raise RuntimeError(f"the process ended with {self._process.wait()}")
        return line.strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()


def print_line(text: str) -> None:
    """Print one line to standard output; may be called from any thread."""
    os.write(1, f"{text}\n".encode())


def main() -> None:
    """Execute commands until standard input is closed."""
    image, gate = image_of(SIZES, seed=OLD), FakeGate()
    exporter = SharedMemoryTransport(InstanceSettings()).export(image, gate)
    print_line(json.dumps(dict(exporter.endpoint().parameters)))

    def block_reader(nbytes: int) -> None:
        print_line("blocked")
        threading.Event().wait()

    for line in sys.stdin:
        match line.strip():
            case "update":
                gate.generation += 1
                for region, newer in zip(image.regions, image_of(SIZES, seed=NEW).regions, strict=True):
                    region.copy_(newer)
            case "block":
                gate.before_slice = block_reader
            case _:
                raise ValueError(line)
        print_line("done")
    exporter.close()


if __name__ == "__main__":
    main()
