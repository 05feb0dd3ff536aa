"""Lab of several hosts on one machine: a network namespace each, joined by a bridge, with shaped links.

::

    with NetworkLab(["planner", "seed", "a"], rate=200e6) as lab:
        lab.start("seed", [sys.executable, "-m", "rfork", "seed", …])
        lab.cut("seed")

A link is full duplex: the host's own end shapes what it sends, the bridge's end what it receives. Everything,
the bridge included, is in the lab's own namespaces; the machine's network is not touched. Needs root
(CAP_NET_ADMIN, CAP_SYS_ADMIN), `ip` and `tc`; `unavailable_reason` returns what is missing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Final

from typing_extensions import Self

PREFIX: Final = "rfl"
NETWORK: Final = "10.77"
BRIDGE: Final = "bridge0"
BURST: Final = 128 << 10
"""Burst size of a link in bytes: two segments of the kernel's maximum size."""
QUEUE_S: Final = 0.05
"""Delay of a packet in a full queue."""
SEGMENTS: Final = 65535
"""Maximum segments that a link passes as one packet: the kernel's default."""
STOP_S: Final = 5.0

_labs = itertools.count()


class LabError(Exception):
    """The lab's network could not be created or changed; the message is the output of `ip` or `tc`."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a host sent and received, headers and retransmissions included."""

    sent: int
    received: int


def unavailable_reason() -> str:
    """Return in one line why this machine cannot create a lab; empty if it can."""
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"network labs need `{command}` (Debian and Ubuntu: apt-get install iproute2)"
    name = f"{PREFIX}{os.getpid()}-probe"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if probe.returncode:
        error_line = (probe.stderr.strip().splitlines() or ["no reason reported"])[-1]
        return f"network labs need permission to create network namespaces (root, CAP_SYS_ADMIN): {error_line}"
    shaped = subprocess.run(
        ["tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "tbf", "rate", "1mbit", "burst", "10kb",
         "latency", "50ms"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    _run("ip", "netns", "del", name)
    return f"network labs need traffic shaping: {shaped.stderr.strip()}" if shaped.returncode else ""


class NetworkLab:
    """Context manager for named hosts with one link each. It always cleans up."""

    def __init__(self, hosts: Sequence[str], *, rate: float | None = None, delay_s: float = 0.0) -> None:
        """`rate` in bits per second in each direction of every link; None: unlimited."""
        self._name = f"{PREFIX}{os.getpid()}-{next(_labs)}"
        self._hosts = {host: number for number, host in enumerate(hosts, start=1)}
        if len(self._hosts) != len(hosts) or len(hosts) > 250:
            raise ValueError("a lab has at most 250 hosts with unique names")
        self._rate = rate
        self._delay_s = delay_s
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        remove_stale_labs()
        try:
            _run("ip", "netns", "add", self._bridge)
            _run("ip", "-n", self._bridge, "link", "add", "name", BRIDGE, "type", "bridge")
            _run("ip", "-n", self._bridge, "link", "set", BRIDGE, "up")
            for host in self._hosts:
                self._connect(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill the lab's remaining processes and remove its network. Safe to call twice."""
        try:
            for process in self._processes:
                self.stop(process)
            self._processes.clear()
        finally:
            _remove(self._name)

    def address(self, host: str) -> str:
        """Return the host's IPv4 address."""
        return f"{NETWORK}.0.{self._hosts[host]}"

    def start(
        self,
        host: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        output: IO[str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a process on a host, in its own process group; `output` None: discarded."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(host), *command],
            env=dict(os.environ if environment is None else environment),
            stdin=subprocess.DEVNULL,
            stdout=output or subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def stop(self, process: subprocess.Popen[str]) -> None:
        """Kill a process of the lab and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_S)

    def namespace(self, host: str) -> str:
        """Return the host's network namespace in the form that `ip netns exec` expects."""
        return f"{self._name}-{self._hosts[host]}"

    def shape(self, host: str, *, rate: float | None, loss: float = 0.0, delay_s: float | None = None) -> None:
        """Change a host's link in both directions: bits per second, share of lost packets (0 to 1), delay.

        A delay needs netem, which not every kernel has (LabError); rate and loss do not.
        """
        delay_s = self._delay_s if delay_s is None else delay_s
        for namespace, device in self._veth_names(host):
            subprocess.run(
                ["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"],
                capture_output=True,
                check=False,
            )
            parent: tuple[str, ...] = ("root", "handle", "1:")
            if rate is not None:
                _run(
                    "tc", "-n", namespace, "qdisc", "add", "dev", device, *parent, "tbf",
                    "rate", f"{rate:.0f}bit", "burst", str(BURST), "latency", f"{QUEUE_S * 1000:g}ms",
                )  # fmt: skip
                parent = ("parent", "1:1", "handle", "10:")
            if delay_s:
                _run(
                    "tc", "-n", namespace, "qdisc", "add", "dev", device, *parent, "netem",
                    "limit", "10000", "delay", f"{delay_s * 1e6:.0f}us",
                )  # fmt: skip
            _drop_packets(namespace, device, loss)

    def cut(self, host: str) -> None:
        """Drop everything that the host sends and receives: no reset, no error."""
        self._set_port_state(host, "down")

    def heal(self, host: str) -> None:
        """Undo `cut`."""
        self._set_port_state(host, "up")

    def traffic(self, host: str) -> Traffic:
        """Return the bytes that the host sent and received since the lab was created."""
        statistics = _run("ip", "-n", self.namespace(host), "-s", "-j", "link", "show", "dev", "eth0")
        counters = json.loads(statistics)[0]["stats64"]
        return Traffic(int(counters["tx"]["bytes"]), int(counters["rx"]["bytes"]))

    @property
    def _bridge(self) -> str:
        return f"{self._name}-br"

    def _veth_names(self, host: str) -> tuple[tuple[str, str], tuple[str, str]]:
        """Return namespace and device of the link's two ends, the host's own first."""
        return (self.namespace(host), "eth0"), (self._bridge, f"p{self._hosts[host]}")

    def _connect(self, host: str) -> None:
        (namespace, device), (_, port) = self._veth_names(host)
        _run("ip", "netns", "add", namespace)
        _run(
            "ip", "-n", self._bridge, "link", "add", port, "type", "veth",
            "peer", "name", device, "netns", namespace,
        )  # fmt: skip
        _run("ip", "-n", self._bridge, "link", "set", port, "master", BRIDGE, "up")
        _run("ip", "-n", namespace, "address", "add", f"{self.address(host)}/16", "dev", device)
        _run("ip", "-n", namespace, "link", "set", "lo", "up")
        _run("ip", "-n", namespace, "link", "set", device, "up")
        self.shape(host, rate=self._rate)

    def _set_port_state(self, host: str, state: str) -> None:
        # The bridge's end: the host's own link stays up, as when a switch dies without notice.
        _, (bridge, port) = self._veth_names(host)
        _run("ip", "-n", bridge, "link", "set", port, *(("master", BRIDGE) if state == "up" else ("nomaster",)))


def _drop_packets(namespace: str, device: str, loss: float) -> None:
    """Drop this share of the packets that arrive at the device."""
    subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", device, "clsact"], capture_output=True, check=False)
    # The kernel forwards coalesced segments; losing those would be burst loss.
    _run("ip", "-n", namespace, "link", "set", device, "gso_max_segs", "1" if loss else str(SEGMENTS))
    if loss:
        # Load a random word; below the threshold the verdict is 2, "drop", else -1, "continue".
        load, compare = f"32 0 0 {(1 << 32) - 0x1000 + 56}", f"53 0 1 {min(round(loss * 2**32), 2**32 - 1)}"
        program = f"4,{load},{compare},6 0 0 {(1 << 32) - 1},6 0 0 2"
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "clsact")
        _run(
            "tc", "-n", namespace, "filter", "add", "dev", device, "ingress",
            "bpf", "direct-action", "bytecode", program,
        )  # fmt: skip


def remove_stale_labs() -> None:
    """Remove labs of processes that have ended, with their remaining processes."""
    for name in {line.partition(" ")[0].rpartition("-")[0] for line in _namespaces() if line.startswith(PREFIX)}:
        pid = name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            _remove(name)


def _remove(lab: str) -> None:
    for line in _namespaces():
        namespace = line.partition(" ")[0]
        if namespace.rpartition("-")[0] == lab:
            # A namespace without a name exists as long as a process runs in it.
            inside = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
            for pid in inside.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    return listed.stdout.splitlines()


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
