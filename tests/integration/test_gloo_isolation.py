"""What gloo must not do to a process that gives: end it, or let strangers in."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress

import pytest

from rfork.errors import SourceError, SourceUnavailable
from rfork.transport.collective.firewalled_store import FirewalledStore
from rfork.transport.collective.rendezvous import KeyValueStore
from tests.integration.gloo_node import SIZES, SLOW, open_reader, start_seed
from tests.integration.gloo_processes import GlooProcess, listening_ports, wait_until
from tests.integration.gloo_processes import node as node
from tests.transport_contract import content, image_of, soon

OTHER_ADDRESS = "127.0.0.2"
"""Another address of the loopback interface: to a packet filter, another host."""
LOCAL_ADDRESS = "127.0.0.1"


SLOW_MARK = pytest.mark.slow
"""Of the ways out that say the same again: each starts two processes."""


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
def test_a_seed_that_is_never_closed_ends_as_it_wants(
    node: Callable[..., GlooProcess], exit_mode: str, code: int, reads_on: bool
) -> None:
    """Whose main thread is done while a group of its lives: by its own exit code, and by no signal."""
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
    assert (code, False, int(reads_on)) == (ended, "terminate called" in written, len(raised))


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=SLOW_MARK)])
def test_a_seed_that_a_signal_ends(node: Callable[..., GlooProcess], number: signal.Signals) -> None:
    """With Python's own handling of it, while a group lives: by that signal and not by SIGABRT."""
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
def test_a_reader_that_is_never_closed_ends_as_it_wants(
    node: Callable[..., GlooProcess], exit_mode: str, code: int
) -> None:
    """In mid-read."""
    seed = start_seed(rate=SLOW)
    target = node("read", seed.report().address, "fork-1", exit_mode)
    assert ["connected", "chunk"] == [target.next_event(), target.next_event()]
    ended, written = target.wait_exit()
    seed.close()
    assert (code, False) == (ended, "terminate called" in written)


def can_connect(port: int, address: str, stack: ExitStack) -> bool:
    """Whether a connection from this address is taken; it stays open, and says 1 KiB that is no gloo."""
    try:
        connection = socket.create_connection((LOCAL_ADDRESS, port), 0.3, source_address=(address, 0))
    except OSError:
        return False
    stack.enter_context(closing(connection))
    with suppress(OSError):  # it may be cut as soon as it is taken
        connection.sendall(bytes(8) + os.urandom(1016))  # as the first rank, then anything
    return True


def test_strangers_do_not_reach_a_group(node: Callable[..., GlooProcess]) -> None:
    """While it is built and while it runs: both sides live, and the reader gets everything."""
    seed = node("seed", str(SLOW))
    address = seed.next_event()
    before = {*seed.ports(), *listening_ports(os.getpid())}
    image = image_of(SIZES)
    stopped = threading.Event()
    tried: set[int] = set()

    def connect_repeatedly() -> None:
        """Be at each new port as soon as it is there."""
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
    assert (0, True, [False, False], True) == (
        code,
        content(image) == expected_bytes,
        reached_ports,
        tried >= set(ports),
    ), written


@pytest.mark.parametrize("payload", [b"", os.urandom(1024)], ids=["silent", "garbage"])
def test_many_who_come_from_the_readers_host(node: Callable[..., GlooProcess], payload: bytes) -> None:
    """A hundred that are let in, as the filter tells hosts apart, and that are no rank: both sides live."""
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
    assert (0, True) == (code, content(image) == content(image_of(SIZES, seed=1))), written


class RecordingKeyStore(KeyValueStore):
    """Keys that remember what they were told."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get_values(self, keys: Sequence[str], deadline: float, *, wait: bool) -> list[bytes | None]:
        return [self.values.get(key) for key in keys]


def listen_message(port: int) -> bytes:
    """What gloo tells of a rank of two that listens on this port."""
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


def test_who_came_before_the_port_was_shut_has_no_place(listener: socket.socket) -> None:
    """The group does not form, and nobody is told where it listens."""
    port, keys = listener.getsockname()[1], RecordingKeyStore()
    shut = FirewalledStore(keys, 0, 2, LOCAL_ADDRESS, soon())
    with (
        socket.create_connection((LOCAL_ADDRESS, port)),
        closing(shut.port),
        pytest.raises(SourceUnavailable, match="unauthenticated client"),
    ):
        shut.put("0/0", listen_message(port))
    assert {} == keys.values


def test_where_a_rank_listens_is_told_once_the_port_is_shut(listener: socket.socket) -> None:
    """To the readers' host alone."""
    port, keys = listener.getsockname()[1], RecordingKeyStore()
    shut = FirewalledStore(keys, 0, 2, LOCAL_ADDRESS, soon())
    shut.put("0/0", listen_message(port))
    with ExitStack() as stack, closing(shut.port):
        reached = [can_connect(port, address, stack) for address in (LOCAL_ADDRESS, OTHER_ADDRESS)]
    assert ([True, False], {"0/0": listen_message(port)}) == (reached, keys.values)
