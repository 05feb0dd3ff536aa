"""Server processes of `benchmarks.planner_load`: started, measured through /proc, ended."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rfork.errors import RforkError

STOP_S = 10.0
FOR_EVER_S = 86_400.0
MAX_LEASE_S = 3600.0
"""TTL that keeps a fleet without heartbeats registered while others are measured."""


@dataclass(frozen=True)
class ServerProcess:
    """A process that serves HTTP on a loopback port."""

    pid: int
    port: int

    @property
    def resident_bytes(self) -> int:
        """Its current memory."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def cpu_seconds(self) -> float:
        """CPU time of all its threads, to a hundredth of a second."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def planner(batch_s: float) -> Iterator[ServerProcess]:
    """Run ``rfork planner`` with its defaults, except for the batch window and unlimited TTLs."""
    variables = {
        "RFORK_PLANNER_BATCH_WINDOW_S": batch_s,
        "RFORK_PLANNER_INSTANCE_TTL_S": FOR_EVER_S,
        "RFORK_PLANNER_LEASE_TTL_S": MAX_LEASE_S,
    }
    command = ["-m", "rfork", "planner", "--json", "--port", "0"]
    with _serving(command, {name: f"{value:g}" for name, value in variables.items()}) as server:
        yield server


@contextlib.contextmanager
def bare() -> Iterator[ServerProcess]:
    """Run the routes of `benchmarks.planner_load.baseline`."""
    with _serving(["-c", "from benchmarks.planner_load.baseline import serve; serve()"], {}) as server:
        yield server


@contextlib.contextmanager
def _serving(arguments: Sequence[str], variables: Mapping[str, str]) -> Iterator[ServerProcess]:
    """Run Python with `arguments` for the block. Raises RforkError if it does not start."""
    # The user's own planner settings are not inherited; the log goes to a file, as a service's would.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RFORK_")}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            if not line:
                log.seek(0)
                raise RforkError(f"{' '.join(arguments)} did not start: {log.read()[-2000:]}")
            port = urlsplit(json.loads(line).get("url", "")).port
            if port is None:
                raise RforkError(f"{' '.join(arguments)} did not start: {line}")
            yield ServerProcess(process.pid, port)
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
