"""Cluster of `benchmarks.fanout`: a network lab with a planner on one host and a node process on each other.

The processes live through all cases, because importing torch sixteen times costs more than a fork; each case
has its own model name, fresh memory and its own seeds.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Final

from typing_extensions import Self

from benchmarks.fanout import messages
from benchmarks.fanout.messages import FanoutCommand, FanoutResponse
from benchmarks.netlab import NetworkLab
from rfork.errors import RforkError

PLANNER: Final = "planner"
PORT: Final = 8700
NODE: Final = "from benchmarks.fanout.node import main; main()"
START_S: Final = 120.0
STEP_S: Final = 60.0
"""Timeout of a command that transfers no weights."""
POLL_INTERVAL_S: Final = 1.0
"""Interval at which a started process is checked."""
TAIL: Final = 2000


class FanoutError(RforkError):
    """A case could not be completed."""


class NodeConnection:
    """Connection to a node process. Calls of `send` and `receive` alternate."""

    def __init__(self, name: str, connection: socket.socket, lines: IO[bytes], log: Path) -> None:
        self.name = name
        self._connection = connection
        self._lines = lines
        self._log = log

    def send(self, command: FanoutCommand) -> None:
        """Send a command; raises FanoutError if the node has ended."""
        try:
            self._connection.sendall(messages.encode_line(command))
        except OSError as error:
            raise FanoutError(f"{self.name} has ended ({error}): {tail(self._log)}") from None

    def receive(self, seconds: float = STEP_S) -> FanoutResponse:
        """Return the node's response; raises FanoutError if it failed, ended or timed out."""
        self._connection.settimeout(seconds)
        try:
            text = self._lines.readline()
        except OSError as error:
            raise FanoutError(f"{self.name} does not respond ({error}): {tail(self._log)}") from None
        if not text:
            raise FanoutError(f"{self.name} ended: {tail(self._log)}")
        response = messages.parse_response(text)
        if response.error:
            raise FanoutError(response.error)
        return response

    def request(self, command: FanoutCommand, seconds: float = STEP_S) -> FanoutResponse:
        """`send` and `receive`."""
        self.send(command)
        return self.receive(seconds)

    def close(self) -> None:
        """Close the connection, which ends the process."""
        self._lines.close()
        self._connection.close()


@dataclass(frozen=True)
class CpuTimes:
    """CPU seconds so far: of the machine, its idle part, and of the cluster's processes."""

    total: float
    idle: float
    benchmark_ticks: float

    @classmethod
    def now(cls, processes: Sequence[int]) -> CpuTimes:
        """Read the times from /proc; `processes` are the cluster's."""
        tick = os.sysconf("SC_CLK_TCK")
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        benchmark_ticks = 0
        for pid in processes:
            with contextlib.suppress(FileNotFoundError):
                process_ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                benchmark_ticks += int(process_ticks[11]) + int(process_ticks[12])
        return cls(sum(fields) / tick, (fields[3] + fields[4]) / tick, benchmark_ticks / tick)

    def busy_since(self, before: CpuTimes) -> tuple[float, float]:
        """Return the shares of the CPU time that were used in total and by the cluster; 0 to 1 each."""
        passed = max(self.total - before.total, 1e-9)
        return 1 - (self.idle - before.idle) / passed, (self.benchmark_ticks - before.benchmark_ticks) / passed


class FanoutCluster:
    """Context manager of the cluster: its processes run inside the block and are always ended.

    A benchmark with other processes on its hosts starts them in `before_nodes`.
    """

    def __init__(self, nodes: Sequence[str], *, size: int, rate: float, delay_s: float) -> None:
        """`size`: bytes of the image; `rate`: bits per second in each direction of every link."""
        self.size = size
        self.rate = rate
        self.lab = NetworkLab([PLANNER, *nodes], rate=rate, delay_s=delay_s)
        self._names = tuple(nodes)
        self._nodes: dict[str, NodeConnection] = {}
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._variables: dict[str, str] = {}
        self._folder = Path()
        self._listener: socket.socket | None = None
        self.open = contextlib.ExitStack()
        """Resources that close with the cluster."""

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.open.close()
            raise
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open.close()

    def __getitem__(self, name: str) -> NodeConnection:
        return self._nodes[name]

    @property
    def min_transfer_s(self) -> float:
        """Seconds that a link needs for the image without headers."""
        return self.size * 8 / self.rate

    def request_all(self, hosts: Sequence[str], command: FanoutCommand) -> dict[str, FanoutResponse]:
        """Send a command to nodes that execute it concurrently, and return their responses by host."""
        for host in hosts:
            self[host].send(command)
        return {host: self[host].receive() for host in hosts}

    def processors(self) -> CpuTimes:
        """Return the CPU time used so far."""
        return CpuTimes.now([process.pid for process in self._processes.values()])

    def before_nodes(self, folder: Path) -> Mapping[str, str]:
        """Start additional processes and return variables for the nodes; `folder` exists until the end."""
        return {}

    def kill(self, name: str) -> None:
        """Kill a node."""
        self.lab.stop(self._processes[name])
        self._nodes.pop(name).close()

    def restart(self, name: str) -> None:
        """Start a node that was killed."""
        self._run_node(name)
        self._accept_nodes()

    def _start(self) -> None:
        self._folder = Path(self.open.enter_context(tempfile.TemporaryDirectory(prefix="rfork-fanout-")))
        self._listener = self.open.enter_context(socket.socket(socket.AF_UNIX))
        self._listener.bind(self._socket_path)
        self._listener.listen(len(self._names))
        self.open.enter_context(self.lab)
        planner = {"RFORK_PLANNER_BIND": self.lab.address(PLANNER), "RFORK_PLANNER_PORT": str(PORT)}
        self._run(PLANNER, ["-m", "rfork", "planner"], planner)
        self._variables |= self.before_nodes(self._folder)
        for name in self._names:
            self._run_node(name)
        for _ in self._names:
            self._accept_nodes()

    @property
    def _socket_path(self) -> str:
        return str(self._folder / "socket")

    def _run_node(self, name: str) -> None:
        url = f"http://{self.lab.address(PLANNER)}:{PORT}"
        variables = {"RFORK_PLANNER": url, "RFORK_BIND": self.lab.address(name), "RFORK_NODE_NAME": name}
        self._run(name, ["-c", NODE, self._socket_path, name, str(self.size)], {**self._variables, **variables})

    def _run(self, host: str, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
        # Options of the data plane (RFORK_MAX_INFLIGHT_CHUNKS, …) are inherited, because they are what is to
        # be measured.
        chosen = {"RFORK_TRANSPORTS": "http", "RFORK_LOG_LEVEL": "warning", **os.environ, **variables}
        output = self.open.enter_context((self._folder / f"{host}.log").open("a"))
        self._processes[host] = self.lab.start(host, [sys.executable, *arguments], chosen, output)

    def _accept_nodes(self) -> None:
        if self._listener is None:
            raise FanoutError("the cluster is not running yet")
        deadline = time.monotonic() + START_S
        self._listener.settimeout(POLL_INTERVAL_S)
        while True:
            try:
                connection, _ = self._listener.accept()
                break
            except TimeoutError:
                missing = [name for name in self._names if name not in self._nodes]
                ended = any(self._processes[name].poll() is not None for name in missing)
                if ended or time.monotonic() > deadline:
                    log_tail = tail(self._folder / f"{missing[0]}.log")
                    raise FanoutError(f"{', '.join(missing)} did not start: {log_tail}") from None
        connection.settimeout(START_S)
        lines = connection.makefile("rb")
        name = lines.readline().decode().strip()
        node = self._nodes[name] = NodeConnection(name, connection, lines, self._folder / f"{name}.log")
        self.open.callback(node.close)


def tail(log: Path) -> str:
    """Return the end of a process's log."""
    return log.read_text(errors="replace")[-TAIL:] or "its log is empty"
