"""gloo must not end a serving process, nor admit unauthenticated clients."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress

import pytest

from rfork.errors import SourceError, SourceUnavailable
from rfork.transport.collective.gloo import FirewalledStore
from rfork.transport.collective.key_store import KeyValueStore
from tests.integration.gloo_node import SIZES, SLOW, open_reader, start_seed
from tests.integration.gloo_processes import GlooProcess, listening_ports, wait_until
from tests.integration.gloo_processes import node as node
from tests.transport_contract import content, image_of, soon

OTHER_ADDRESS = "127.0.0.2"
"""Another address of the loopback interface: for a packet filter, another host."""
LOCAL_ADDRESS = "127.0.0.1"


SLOW_MARK = pytest.mark.slow
"""Mark of exit modes that repeat another one's result: each starts two processes."""


@pytest.mark.parametrize(
    ("exit_mode", "code"),
    [
        ("return", 0),
        *(pytest.param("return", 0, marks=SLOW_MARK) for _ in range(2)),
        pytest.param("exit", 3, marks=SLOW_MARK),
        pytest.param("raise", 1, marks=SLOW_MARK),
    ],
    ids=["1", "2", "3", "exit", "raise"],
)
@pytest.mark.parametrize("reads_on", [True, False], ids=["in mid-send", "between blocks"])
def test_a_seed_that_is_never_closed_ends_normally(
    node: Callable[..., GlooProcess], exit_mode: str, code: int, reads_on: bool
) -> None:
    """Its main thread finishes while a group is alive: the process ends with its own exit code and by no
    signal.
    """
    seed = node("seed", str(SLOW), exit_mode)
    image = image_of(SIZES)
    peer, _, reader = open_reader(seed.next_event(), image, "fork-1")
    reader.read(*image.layout.chunks[0], soon())
    raised: list[Exception] = []

    def read() -> None:
        try:
            reader.read(0, image.layout.image_bytes, soon())
        except SourceError as error:
            raised.append(error)

    reading = threading.Thread(target=read)
    if reads_on:
        reading.start()
        first = image.layout.chunks[1]
        assert wait_until(lambda: any(content(image, first[0], first[0] + 100)))
    ended, written = seed.wait_exit()
    if reads_on:
        reading.join()
    reader.close()
    peer.close()
    assert code == ended
    assert "terminate called" not in written
    assert int(reads_on) == len(raised)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=SLOW_MARK)])
def test_a_seed_that_a_signal_ends(node: Callable[..., GlooProcess], number: signal.Signals) -> None:
    """With Python's default handling while a group is alive: by that signal and not by SIGABRT."""
    seed = node("seed", "0", "return")
    image = image_of(SIZES)
    peer, _, reader = open_reader(seed.next_event(), image, "fork-1")
    reader.read(0, image.layout.image_bytes, soon())
    seed.signal(number)
    ended = seed.process.wait(60)
    reader.close()
    peer.close()
    assert -number == ended


@pytest.mark.parametrize(
    ("exit_mode", "code"),
    [
        ("return", 0),
        *(pytest.param("return", 0, marks=SLOW_MARK) for _ in range(2)),
        pytest.param("exit", 3, marks=SLOW_MARK),
    ],
    ids=["1", "2", "3", "exit"],
)
def test_a_reader_that_is_never_closed_ends_normally(
    node: Callable[..., GlooProcess], exit_mode: str, code: int
) -> None:
    """It ends during a read."""
    seed = start_seed(rate=SLOW)
    target = node("read", seed.report().address, "fork-1", exit_mode)
    assert "connected" == target.next_event()
    assert "chunk" == target.next_event()
    ended, written = target.wait_exit()
    seed.close()
    assert code == ended
    assert "terminate called" not in written


def can_connect(port: int, address: str, stack: ExitStack) -> bool:
    """Return True if a connection from this address is accepted; it stays open and sends 1 KiB that is not
    gloo.
    """
    try:
        connection = socket.create_connection((LOCAL_ADDRESS, port), 0.3, source_address=(address, 0))
    except OSError:
        return False
    stack.enter_context(closing(connection))
    with suppress(OSError):  # it may be cut right after it is accepted
        connection.sendall(bytes(8) + os.urandom(1016))  # as the first rank, then anything
    return True


def test_unauthenticated_clients_do_not_reach_a_group(node: Callable[..., GlooProcess]) -> None:
    """While it is formed and while it runs: both sides survive, and the reader gets everything."""
    seed = node("seed", str(SLOW))
    address = seed.next_event()
    before = {*seed.ports(), *listening_ports(os.getpid())}
    image = image_of(SIZES)
    stopped = threading.Event()
    tried: set[int] = set()

    def connect_repeatedly() -> None:
        """Connect to each new port as soon as it exists."""
        with ExitStack() as stack:
            while not stopped.is_set():
                for port in {*seed.ports(), *listening_ports(os.getpid())} - before:
                    tried.add(port)
                    can_connect(port, OTHER_ADDRESS, stack)

    connecting_thread = threading.Thread(target=connect_repeatedly)
    connecting_thread.start()
    peer, _, reader = open_reader(address, image, "fork-1")
    reader.read(*image.layout.chunks[0], soon())
    ports = sorted({*seed.ports(), *listening_ports(os.getpid())} - before)
    with ExitStack() as stack:
        reached_ports = [can_connect(port, OTHER_ADDRESS, stack) for port in ports]
        reader.read(0, image.layout.image_bytes, soon())
    stopped.set()
    connecting_thread.join()
    reader.close()
    peer.close()
    code, written = seed.wait_exit()
    expected_bytes = content(image_of(SIZES, seed=1))
    assert 0 == code, written
    assert content(image) == expected_bytes, written
    assert len(ports) >= 2, written  # other tests of this process may close and open ports meanwhile
    assert not any(reached_ports), written
    assert tried >= set(ports), written


@pytest.mark.parametrize("payload", [b"", os.urandom(1024)], ids=["silent", "garbage"])
@pytest.mark.slow  # logic: tests/integration/test_gloo.py
def test_many_connections_from_the_readers_host(node: Callable[..., GlooProcess], payload: bytes) -> None:
    """A hundred connections that pass the filter, which distinguishes hosts, but are no rank: both sides
    survive.
    """
    seed = node("seed", str(SLOW))
    address = seed.next_event()
    before = seed.ports()
    image = image_of(SIZES)
    peer, _, reader = open_reader(address, image, "fork-1")
    reader.read(*image.layout.chunks[0], soon())
    (port,) = seed.ports() - before
    with ExitStack() as stack:
        for _ in range(100):
            connection = stack.enter_context(closing(socket.create_connection((LOCAL_ADDRESS, port), 5)))
            connection.sendall(payload)
        reader.read(0, image.layout.image_bytes, soon())
    reader.close()
    peer.close()
    code, written = seed.wait_exit()
    assert 0 == code, written
    assert content(image) == content(image_of(SIZES, seed=1)), written


class RecordingKeyStore(KeyValueStore):
    """Key store that records the values set."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    @property
    def closed(self) -> bool:
        return False

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get_values(self, keys: Sequence[str], deadline: float, *, wait: bool) -> list[bytes | None]:
        return [self.values.get(key) for key in keys]


def listen_message(port: int) -> bytes:
    """Return the message of a gloo rank of two that listens on this port."""
    address = socket.AF_INET.to_bytes(2, "little") + port.to_bytes(2, "big") + socket.inet_aton(LOCAL_ADDRESS)
    name = b"host"
    return b"".join(
        (
            len(name).to_bytes(8, "little"),
            name,
            (136).to_bytes(8, "little"),
            address.ljust(136, b"\0"),
            bytes(16),
        )
    )


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Listens as gloo would."""
    with socket.create_server((LOCAL_ADDRESS, 0)) as made:
        yield made


def test_a_connection_before_the_port_was_closed_is_rejected(listener: socket.socket) -> None:
    """The group does not form, and the address is published to no rank."""
    port, keys = listener.getsockname()[1], RecordingKeyStore()
    shut = FirewalledStore(keys, 0, 2, LOCAL_ADDRESS, soon())
    with (
        socket.create_connection((LOCAL_ADDRESS, port)),
        closing(shut.port),
        pytest.raises(SourceUnavailable, match="unauthenticated client"),
    ):
        shut.put("0/0", listen_message(port))
    assert {} == keys.values


def test_an_address_is_published_once_the_port_is_closed(listener: socket.socket) -> None:
    """Only to the readers' host."""
    port, keys = listener.getsockname()[1], RecordingKeyStore()
    shut = FirewalledStore(keys, 0, 2, LOCAL_ADDRESS, soon())
    shut.put("0/0", listen_message(port))
    with ExitStack() as stack, closing(shut.port):
        reached = [can_connect(port, address, stack) for address in (LOCAL_ADDRESS, OTHER_ADDRESS)]
    assert [True, False] == reached
    assert {"0/0": listen_message(port)} == keys.values
