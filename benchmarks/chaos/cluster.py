"""Cluster of `benchmarks.chaos`: a network lab, one process per host, two planners and a Redis.

Processes live for many rounds, so that leaks add up; a killed process is replaced.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from typing_extensions import Self

from benchmarks.chaos.messages import RESPONSE_ADAPTER, ChaosCommand, ChaosResponse, SpawnRequest
from benchmarks.chaos.scenarios import StoreType
from benchmarks.fanout.cluster import tail
from benchmarks.fanout.messages import encode_line
from benchmarks.netlab import NetworkLab
from rfork.errors import RforkError

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


PLANNER: Final = "planner"
SEEDS: Final = ("seed0", "seed1")
TARGETS: Final = ("t0", "t1", "t2", "t3", "t4")
PORTS: Final[Mapping[StoreType, int]] = {"memory": 8700, "redis": 8701}
REDIS_PORT: Final = 6390
RATE: Final = 160e6
"""Bits per second of each link: 48 MiB take 2.5 seconds."""
DEADLINE_S: Final = 30.0
WINDOW: Final = 4
START_S: Final = 90.0
STEP_S: Final = 20.0
"""Timeout of a command that transfers no weights."""
POLL_INTERVAL_S: Final = 0.05
FORKSERVER: Final = "from benchmarks.chaos.forkserver import main; main()"
NODE: Final = {
    "RFORK_TRANSPORTS": "http",
    "RFORK_DEADLINE_S": f"{DEADLINE_S:g}",
    "RFORK_SOURCE_IDLE_TIMEOUT_S": "2",
    "RFORK_STORAGE_IDLE_TIMEOUT_S": "2",
    "RFORK_PLANNER_TIMEOUT_S": "2",
    "RFORK_DRAIN_TIMEOUT_S": "1",
    "RFORK_MAX_INFLIGHT_CHUNKS": f"{WINDOW}",
}
SERVICE: Final = {
    "RFORK_PLANNER_BIND": "0.0.0.0",
    "RFORK_PLANNER_HEARTBEAT_INTERVAL_S": "0.5",
    "RFORK_PLANNER_INSTANCE_TTL_S": "3",
    "RFORK_PLANNER_LEASE_TTL_S": "6",
    "RFORK_PLANNER_STORE_TIMEOUT_S": "1",
}


class ChaosError(RforkError):
    """The cluster could not do what a round needs."""


class ChaosCluster:
    """Context manager of the cluster: everything runs inside the block and is removed after it."""

    def __init__(self, log_level: str = "warning") -> None:
        """`log_level` is the minimum log level of its processes."""
        self._log_level = log_level
        self.lab = NetworkLab([PLANNER, *SEEDS, *TARGETS], rate=RATE)
        self.nodes: dict[str, NodeHandle] = {}
        self.planners: dict[StoreType, ChaosProcess] = {}
        self.redis: subprocess.Popen[str] | None = None
        self._open = contextlib.ExitStack()
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    # -- messages -----------------------------------------------------------------------------------

    def receive(self, seconds: float) -> list[tuple[str, ChaosResponse]]:
        """Wait up to `seconds` for responses and return the first ones. A node that ended is removed from
        `nodes`.
        """
        messages: list[tuple[str, ChaosResponse]] = []
        for key, _ in self._selector.select(max(0.0, seconds)):
            name = str(key.data)
            responses = self.nodes[name].receive_responses()
            if responses is None:
                self._drop_node(name)
            else:
                messages += [(name, response) for response in responses]
        return messages

    def request(self, names: Iterable[str], command: ChaosCommand, seconds: float = STEP_S) -> dict[str, ChaosResponse]:
        """Return the responses of these nodes; nodes that ended or do not respond in time are left out."""
        waiting, responses = {name for name in names if name in self.nodes}, dict[str, ChaosResponse]()
        for name in waiting:
            self.nodes[name].send(command)
        until = time.monotonic() + seconds
        while waiting and (left := until - time.monotonic()) > 0:
            for name, response in self.receive(left):
                if response.verb == command.verb and name in waiting:
                    responses[name] = response
            waiting = (waiting - responses.keys()) & self.nodes.keys()
        return responses

    def request_all(self, names: Sequence[str], command: ChaosCommand) -> dict[str, ChaosResponse]:
        """Like `request`, but raises ChaosError unless every node succeeds."""
        responses = self.request(names, command)
        for name in names:
            response = responses.get(name)
            if response is None or response.error:
                detail = response.error if response is not None else f"{name} does not respond: {tail(self.log(name))}"
                raise ChaosError(f"{command.verb}: {detail}")
        return responses

    # -- processes ----------------------------------------------------------------------------------

    def url(self, store: StoreType) -> str:
        """Return the URL of the planner with that store."""
        return f"http://{self.lab.address(PLANNER)}:{PORTS[store]}"

    def log(self, name: str) -> Path:
        """Return the path of a process's log."""
        return self.folder / f"{name}.log"

    def disk(self, name: str, *, inside: bool) -> Path:
        """Return the path of a host's disk, as seen by the host's processes (`inside`) or by this process."""
        path = self.folder / "disks" / name
        return path if inside else Path(f"/proc/{self._forkserver.pid}/root{path}")

    def replace(self, hosts: Sequence[str] = (PLANNER, *SEEDS, *TARGETS)) -> None:
        """Start a process on each of these hosts that has none."""
        missing = [name for name in hosts if name not in self.nodes]
        created = {name: self._spawn(self._node(name)) for name in missing}
        for _ in missing:
            name, connection = self._accept_node()
            self.nodes[name] = NodeHandle(created[name], connection)
            self._selector.register(connection, selectors.EVENT_READ, name)

    def end(self, name: str) -> None:
        """Kill a node and forget it."""
        if name in self.nodes:
            self.nodes[name].process.kill()
            self._drop_node(name)

    def start_planner(self, store: StoreType) -> None:
        """Start the planner with that store unless it is running."""
        if (before := self.planners.get(store)) is not None:
            if not before.wait(0.0):
                return
            before.close()
        own = {"RFORK_PLANNER_PORT": str(PORTS[store]), "RFORK_LOG_LEVEL": self._log_level}
        if store == "redis":
            own |= {
                "RFORK_PLANNER_STORE": f"redis://127.0.0.1:{REDIS_PORT}/0",
                "RFORK_PLANNER_LEASE_KEYS": "c" * 32,
            }
        name = f"{PLANNER}-{store}"
        self.planners[store] = self._spawn(
            SpawnRequest("planner", name, self.lab.namespace(PLANNER), str(self.log(name)), {**SERVICE, **own})
        )

    def start_redis(self) -> None:
        """Start an empty Redis unless it is running."""
        if self.redis is not None and self.redis.poll() is None:
            return
        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(REDIS_PORT)]
        self.redis = self.lab.start(PLANNER, [*command, "--save", "", "--appendonly", "no"])

    def signal_redis(self, number: signal.Signals) -> None:
        """Send Redis a signal; after SIGKILL, wait until it has ended."""
        if self.redis is not None:
            self.redis.send_signal(number)
            if number == signal.SIGKILL:
                self.redis.wait(STEP_S)

    def wait_planner(self, store: StoreType) -> None:
        """Wait until the planner with that store responds; raises ChaosError."""
        until = time.monotonic() + STEP_S
        while True:
            responses = self.request([PLANNER], ChaosCommand("query", model="none", planner=self.url(store)))
            if PLANNER in responses and not responses[PLANNER].error:
                return
            if time.monotonic() > until:
                raise ChaosError(f"the planner does not respond: {tail(self.log(f'{PLANNER}-{store}'))}")
            self.receive(POLL_INTERVAL_S)

    # -- start-up -----------------------------------------------------------------------------------

    def _start(self) -> None:
        self._open.callback(self._selector.close)
        self.folder = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="rfork-chaos-")))
        (self.folder / "disks").mkdir()
        path = str(self.folder / "socket")
        self._listener = self._open.enter_context(socket.socket(socket.AF_UNIX))
        self._listener.bind(path)
        self._listener.listen(16)
        self._open.enter_context(self.lab)
        hosts = (PLANNER, *SEEDS, *TARGETS)
        output = self._open.enter_context(self.log("forkserver").open("w"))
        self._forkserver = subprocess.Popen(
            [sys.executable, "-c", FORKSERVER, path, str(self.folder / "disks"), *hosts],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self._open.callback(self._end)
        _, self._spawn_socket = self._accept_node()
        self._open.callback(self._spawn_socket.close)
        self.start_redis()
        self.replace()
        for store in PORTS:
            self.start_planner(store)
            self.wait_planner(store)

    def _end(self) -> None:
        for name in list(self.nodes):
            self._drop_node(name)
        for planner in self.planners.values():
            planner.close()
        self._forkserver.kill()  # and with it all its children
        self._forkserver.wait()

    def _node(self, name: str) -> SpawnRequest:
        own = {
            "RFORK_BIND": self.lab.address(name),
            "RFORK_NODE_NAME": name,
            "RFORK_LOG_LEVEL": self._log_level,
        }
        return SpawnRequest("node", name, self.lab.namespace(name), str(self.log(name)), {**NODE, **own})

    def _spawn(self, spawn_request: SpawnRequest) -> ChaosProcess:
        self._spawn_socket.sendall(encode_line(spawn_request))
        reply = self._spawn_socket.recv(64)
        if not reply.strip().isdigit():
            raise ChaosError(f"the fork server has ended: {tail(self.log('forkserver'))}")
        return ChaosProcess(spawn_request.name, int(reply), Path(spawn_request.log))

    def _accept_node(self) -> tuple[str, socket.socket]:
        """Return the next process that connects and sends its name."""
        self._listener.settimeout(1.0)
        until = time.monotonic() + START_S
        while True:
            try:
                connection, _ = self._listener.accept()
                break
            except TimeoutError:
                if self._forkserver.poll() is not None or time.monotonic() > until:
                    raise ChaosError(f"a process did not start: {tail(self.log('forkserver'))}") from None
        connection.settimeout(STEP_S)
        name = b""
        while not name.endswith(b"\n"):
            name += connection.recv(1)
        return name.decode().strip(), connection

    def _drop_node(self, name: str) -> None:
        node = self.nodes.pop(name)
        self._selector.unregister(node.connection)
        node.close()
