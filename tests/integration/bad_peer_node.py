"""A seed or a reader in a separate process, for tests of bad peers; `BadPeerNode` is the test's side.

Commands and responses are lines of JSON on a Unix socket, which works across network namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import IO, cast

import torch

from rfork.errors import RforkError
from rfork.image.capture import image_from_tensors
from rfork.image.memory import Image, compute_manifest
from rfork.peer.base import Progress
from rfork.peer.client import PeerClient
from rfork.planner_client.lease import LeaseClaims, decode_key, derive_key, sign
from rfork.settings import InstanceSettings, TlsSettings, load
from rfork.source.seed import Connections, InstanceIdentity, Seed
from rfork.transport.base import Reader
from rfork.transport.selection import select_transports
from tests.processes import START_S

FactValue = str | int | list[int]
Facts = dict[str, FactValue]

ROOT = Path(__file__).resolve().parents[2]
SEED_ID = "seed-1"
KEY = derive_key(b"s" * 32, SEED_ID)
TIMEOUT_S = 60.0
LISTEN = "0A"
"""The state of a listening socket in /proc/net/tcp."""


@dataclass(frozen=True)
class ForgedLease:
    """Content of a token; the defaults are those of a valid one, signed with `key`."""

    layout_id: str
    fork_id: str = "fork-1"
    lifetime_s: float = 600.0
    source_id: str = SEED_ID
    generation: int = 0
    key: str = KEY
    weights_id: str | None = None

    @property
    def token(self) -> str:
        """Return the token, signed as the planner signs it."""
        until = time.time() + self.lifetime_s
        claims = LeaseClaims(self.fork_id, self.source_id, self.layout_id, self.weights_id, self.generation, until)
        return sign(claims, decode_key(self.key))


def pattern(size: int) -> torch.Tensor:
    """Return the seed's bytes."""
    return ((torch.arange(251) * 7) % 251).to(torch.uint8).repeat(size // 251 + 1)[:size].clone()


class BadPeerNode:
    """The test's side of a node: sends requests and reads the process's resources."""

    def __init__(self, process: Popen[str], listener: socket.socket, log: Path) -> None:
        self.process = process
        self._log = log
        listener.settimeout(START_S)
        with listener:
            self._connection, _ = listener.accept()
        self._connection.settimeout(TIMEOUT_S)
        self._lines = self._connection.makefile("rw")

    def request(self, command: str, **arguments: FactValue) -> Facts:
        """Send a command; return the response. An rfork error is {"error": its class}."""
        try:
            self._lines.write(json.dumps([command, arguments]) + "\n")
            self._lines.flush()
            line = self._lines.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ChildProcessError(f"the node ended during {command}: {self._log.read_text()}")
        return cast(Facts, json.loads(line))

    def ports(self) -> set[int]:
        """TCP ports that the node listens on, as listed by the kernel."""
        folder = Path(f"/proc/{self.process.pid}")
        inodes = set()
        for name in os.listdir(folder / "fd"):
            with contextlib.suppress(FileNotFoundError):
                inodes.add(os.readlink(folder / "fd" / name))
        rows = [
            row.split() for family in ("tcp", "tcp6") for row in (folder / "net" / family).read_text().splitlines()[1:]
        ]
        return {
            int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTEN and f"socket:[{row[9]}]" in inodes
        }

    def threads(self) -> int:
        """Number of threads of the node."""
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def descriptors(self) -> int:
        """Number of files and sockets that the node has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def resident_bytes(self) -> int:
        """Resident memory of the node, in bytes."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        """Kill the node."""
        self._connection.close()
        with contextlib.suppress(BrokenPipeError):
            self._lines.close()
        self.process.kill()
        self.process.wait(TIMEOUT_S)


StartProcess = Callable[[list[str], dict[str, str], IO[str]], Popen[str]]


def start_node(start: StartProcess, folder: Path, name: str, role: str, **environment: str) -> BadPeerNode:
    """Start a node with this role in a process created by `start`; its socket and log are in `folder`."""
    path = str(folder / name)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    process_environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    with (folder / f"{name}.log").open("w") as log:
        process = start([sys.executable, __file__, role, path], process_environment, log)
    return BadPeerNode(process, listener, folder / f"{name}.log")


class SeedRole:
    """A seed that accepts tokens signed with `KEY`. Its settings are in the environment.

    The image is one tensor of `BAD_PEER_BYTES` bytes and `BAD_PEER_TENSORS` small ones.
    """

    def __init__(self, settings: InstanceSettings) -> None:
        many = torch.zeros(int(os.environ.get("BAD_PEER_TENSORS", "0")))
        image = image_from_tensors(
            {
                "weights": pattern(int(os.environ["BAD_PEER_BYTES"])),
                **{f"layers.{index}.weight": many[index] for index in range(len(many))},
            }
        )
        self._image = image
        self._seed = Seed(
            image,
            InstanceIdentity("model", instance_id=SEED_ID),
            settings,
            Connections(select_transports(settings)),
            manifest=compute_manifest(image),
        ).start()
        self._seed.set_lease_keys([KEY])

    def facts(self) -> Facts:
        """Return its address, its layout, and the memory addresses of its image."""
        segments = self._image.segments(0, self._image.layout.image_bytes)
        return {
            "address": self._seed.report().address,
            "layout_id": self._image.layout.layout_id,
            "memory": [segments[0].address, segments[0].length],
        }

    def readers(self) -> Facts:
        """Return the number of forks with a reader slot."""
        return {"readers": len(self._seed.report().readers)}

    def fence(self) -> Facts:
        """Start a new generation of the weights."""
        self._seed.fence()
        return {"generation": self._seed.generation}


@dataclass
class ReaderRole:
    """The steps of a fork."""

    settings: InstanceSettings
    open_resources: ExitStack = field(default_factory=ExitStack)
    weights: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    image: Image | None = None
    reader: Reader | None = None
    progress: Iterator[Progress] | None = None

    def open(self, address: str, layout_id: str, token: str, size: int, transport: str) -> Facts:
        """Acquire a slot, watch the progress, and connect; return the ports that the source reported."""
        self.weights = torch.zeros(size, dtype=torch.uint8)
        self.image = image_from_tensors({"weights": self.weights})
        peer = PeerClient(address, lambda: token, TlsSettings())
        self.open_resources.callback(peer.close)
        channel_id, endpoint = peer.open(layout_id, (transport,), soon())
        self.progress = peer.watch(channel_id, TIMEOUT_S)
        next(self.progress)
        chosen = next(one for one in select_transports(self.settings) if one.name == transport)
        self.reader = chosen.connect(endpoint, self.image, lambda: token, soon())
        self.open_resources.callback(self.reader.close)
        return {"channel": "open"}

    def read(self) -> Facts:
        """Read the complete image; report if it is right."""
        if self.image is None or self.reader is None:
            return {"error": "not open"}
        self.reader.read(0, self.image.layout.image_bytes, soon())
        right = torch.equal(self.weights, pattern(self.weights.numel()))
        return {"right": int(right)}

    def wait_end(self) -> Facts:
        """Watch until the source ends the stream."""
        for _ in self.progress or ():
            pass
        return {"ended": 1}

    def close(self) -> Facts:
        """Release the slot."""
        self.open_resources.close()
        return {}

    def reach(self, host: str, ports: list[int]) -> Facts:
        """Return the ports that accept a connection within a second."""
        return {"ports": [port for port in ports if accepts_connections(host, port)]}


def accepts_connections(host: str, port: int, timeout_s: float = 1.0) -> bool:
    """Return True if the port accepts a connection within this time."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def soon() -> float:
    return time.monotonic() + TIMEOUT_S


@contextmanager
def command_channel(path: str) -> Iterator[tuple[Iterator[str], Callable[[Facts], None]]]:
    """Yield the commands that arrive, and a function that responds."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        with connection.makefile("rw") as lines:

            def respond(facts: Facts) -> None:
                lines.write(json.dumps(facts) + "\n")
                lines.flush()

            yield iter(lines.readline, ""), respond


def main(role: str, path: str) -> None:
    """Execute the test's commands until it disconnects."""
    settings = load(InstanceSettings)
    made: SeedRole | ReaderRole = SeedRole(settings) if role == "seed" else ReaderRole(settings)
    with command_channel(path) as (commands, respond):
        for line in commands:
            command, arguments = json.loads(line)
            try:
                facts = getattr(made, command)(**arguments)
            except (RforkError, StopIteration) as error:
                facts = {"error": type(error).__name__, "message": str(error)}
            respond(facts)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
