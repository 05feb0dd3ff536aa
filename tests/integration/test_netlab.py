"""Shaped network hosts on one machine: their links, and that nothing remains afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import netlab
from benchmarks.netlab import NetworkLab

pytestmark = pytest.mark.skipif(
    bool(netlab.unavailable_reason()), reason=netlab.unavailable_reason() or "labs are available"
)

RATE = 20e6
SIZE = 2_000_000
TIMEOUT_S = 60.0
SERVER = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as listener:
    while True:
        with listener.accept()[0] as connection:
            connection.sendall(bytes(int(sys.argv[2])))
"""
CLIENT = """
import socket, sys, time
connection = None
while connection is None:
    began = time.monotonic()  # before: bytes come as soon as the connection is there
    try:
        connection = socket.create_connection((sys.argv[1], 7000), float(sys.argv[2]))
    except ConnectionRefusedError:  # the server is still starting
        time.sleep(0.05)
    except TimeoutError:
        sys.exit("silence")
got = 0
while part := connection.recv(1 << 16):
    got += len(part)
print(got, time.monotonic() - began)
"""
SENDER = """
import socket, sys
open(sys.argv[2]).read()  # until the receiver is there
with socket.socket(type=socket.SOCK_DGRAM) as datagrams:
    for _ in range(200):  # as many as fit into the receiver's buffer
        datagrams.sendto(b"x", (sys.argv[1], 7001))
open(sys.argv[3], "w").close()
"""
RECEIVER = """
import socket, sys
with socket.socket(type=socket.SOCK_DGRAM) as datagrams:
    datagrams.bind((sys.argv[1], 7001))
    open(sys.argv[2], "w").close()
    open(sys.argv[3]).read()  # until all were sent
    datagrams.settimeout(1)
    got = 0
    try:
        while datagrams.recv(16):
            got += 1
    except TimeoutError:
        print(got)
"""


@pytest.fixture
def lab() -> Iterator[NetworkLab]:
    """Two hosts; `a` runs a server that sends `SIZE` bytes to each client."""
    with NetworkLab(["a", "b"], rate=RATE) as lab:
        lab.start("a", [sys.executable, "-c", SERVER, lab.address("a"), str(SIZE)])
        yield lab


def run_client(lab: NetworkLab, folder: Path, *, timeout_s: float = TIMEOUT_S) -> str:
    """Return the result of a client on `b` that connects to `a`."""
    output_file = folder / "output"
    with output_file.open("w") as output:
        client = lab.start("b", [sys.executable, "-c", CLIENT, lab.address("a"), str(timeout_s)], output=output)
        client.wait(TIMEOUT_S)
    return output_file.read_text().strip()


def test_a_link_does_not_exceed_its_rate(lab: NetworkLab, tmp_path: Path) -> None:
    """All bytes arrive, no faster than the rate allows plus the burst of the bucket."""
    got, seconds = run_client(lab, tmp_path).split()
    min_s = (SIZE - 2 * netlab.BURST) * 8 / RATE
    assert SIZE == int(got)
    assert float(seconds) >= min_s


def test_traffic_counts_sent_and_received_bytes(lab: NetworkLab, tmp_path: Path) -> None:
    """The payload plus at most a tenth, at both ends."""
    run_client(lab, tmp_path)
    sent, received = lab.traffic("a").sent, lab.traffic("b").received
    assert SIZE <= sent < 1.1 * SIZE
    assert SIZE <= received < 1.1 * SIZE


def test_a_cut_host_is_silent_until_its_link_is_restored(lab: NetworkLab, tmp_path: Path) -> None:
    """While the link is cut, connections are not refused but time out; afterwards the client is served."""
    run_client(lab, tmp_path)
    lab.cut("a")
    while_cut = run_client(lab, tmp_path, timeout_s=0.5)
    lab.heal("a")
    assert "silence" == while_cut
    assert str(SIZE) == run_client(lab, tmp_path).split()[0]


def test_a_link_can_be_reshaped(lab: NetworkLab, tmp_path: Path) -> None:
    """A host's rate can change while its processes run."""
    lab.shape("a", rate=RATE / 2)
    got, seconds = run_client(lab, tmp_path).split()
    min_s = (SIZE - 2 * netlab.BURST) * 8 / (RATE / 2)
    assert SIZE == int(got)
    assert float(seconds) >= min_s


@pytest.mark.parametrize(("loss", "min_packets", "max_packets"), [(0.0, 200, 200), (0.3, 100, 180)])
@pytest.mark.slow
def test_a_link_loses_the_configured_share_of_packets(
    lab: NetworkLab, tmp_path: Path, loss: float, min_packets: int, max_packets: int
) -> None:
    """Of 200 datagrams about the expected number arrives."""
    run_client(lab, tmp_path)  # the hosts know each other's hardware address from here on
    lab.shape("b", rate=RATE, loss=loss)
    output_file, bound, sent = (tmp_path / name for name in ("output", "bound", "sent"))
    os.mkfifo(bound)
    os.mkfifo(sent)
    with output_file.open("w") as output:
        arguments = [lab.address("b"), str(bound), str(sent)]
        receiver = lab.start("b", [sys.executable, "-c", RECEIVER, *arguments], output=output)
        lab.start("a", [sys.executable, "-c", SENDER, *arguments])
        receiver.wait(TIMEOUT_S)
    got = int(output_file.read_text())
    assert True is (min_packets <= got <= max_packets), f"{got} of 200 arrived"


def test_all_bytes_arrive_despite_packet_loss(lab: NetworkLab, tmp_path: Path) -> None:
    """TCP retransmits lost packets."""
    lab.shape("a", rate=RATE, loss=0.02)
    assert str(SIZE) == run_client(lab, tmp_path).split()[0]


def test_nothing_remains_after_the_block_raises() -> None:
    """Namespaces and processes are removed, including children of a lab's process."""
    lab = NetworkLab(["a"])

    def broken() -> None:
        with lab:
            lab.start("a", ["sh", "-c", "sleep 600 & wait"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert [] == running([lab.namespace("a")])


def test_the_lab_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    """A lab whose owner was SIGKILLed is removed by the next one, with its processes."""
    code = (
        "import os, signal; from benchmarks.netlab import NetworkLab; lab = NetworkLab(['a']).__enter__();"
        "print(lab.namespace('a'), lab.start('a', ['sleep', '600']).pid, flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    namespace, pid = killed.stdout.split()
    netlab.remove_stale_labs()
    assert [] == running([namespace])
    assert has_ended(int(pid))


def test_host_names_are_unique() -> None:
    """Two hosts with the same name are refused before anything is created."""
    with pytest.raises(ValueError, match="unique names"):
        NetworkLab(["a", "a"])


def running(namespaces: list[str]) -> list[str]:
    """Return the namespaces that exist."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    names = {line.partition(" ")[0] for line in listed.stdout.splitlines()}
    return [namespace for namespace in namespaces if namespace in names]


def has_ended(pid: int) -> bool:
    """Return True if a process has ended, including one that was not waited for."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        os.sched_yield()
    return False
