"""What gloo must not do to a process that gives: end it, or let strangers in."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress

import pytest

from rfork.errors import SourceError, SourceGone
from rfork.transport.collective.rendezvous import Keys
from rfork.transport.collective.shut import ShutKeys
from tests.integration.gloo_node import SIZES, SLOW, a_reader, a_seed
from tests.integration.gloo_processes import Node, listens, until
from tests.integration.gloo_processes import node as node
from tests.transport_contract import content, image_of, soon

STRANGER = "127.0.0.2"
"""Another address of the loopback interface: to a packet filter, another host."""
HERE = "127.0.0.1"


SLOW_TO_SEE = pytest.mark.slow
"""Of the ways out that say the same again: each starts two processes."""


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("return", 0),
        *(pytest.param("return", 0, marks=SLOW_TO_SEE) for _ in range(2)),
        pytest.param("exit", 3, marks=SLOW_TO_SEE),
        pytest.param("raise", 1, marks=SLOW_TO_SEE),
    ],
    ids=["1", "2", "3", "exit", "raise"],
)
@pytest.mark.parametrize("reads_on", [True, False], ids=["in mid-send", "between blocks"])
def test_a_seed_that_is_never_closed_ends_as_it_wants(
    node: Callable[..., Node], how: str, code: int, reads_on: bool
) -> None:
    """Whose main thread is done while a group of its lives: by its own exit code, and by no signal."""
    seed = node("seed", str(SLOW), how)
    image = image_of(SIZES)
    peer, _, reader = a_reader(seed.heard(), image, "fork-1")
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
        assert until(lambda: any(content(image, first[0], first[0] + 100)))
    ended, written = seed.left()
    if reads_on:
        reading.join()
    reader.close()
    peer.close()
    assert (code, False, int(reads_on)) == (ended, "terminate called" in written, len(raised))


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=SLOW_TO_SEE)])
def test_a_seed_that_a_signal_ends(node: Callable[..., Node], number: signal.Signals) -> None:
    """With Python's own handling of it, while a group lives: by that signal and not by SIGABRT."""
    seed = node("seed", "0", "return")
    image = image_of(SIZES)
    peer, _, reader = a_reader(seed.heard(), image, "fork-1")
    reader.read(0, image.layout.image_bytes, soon())
    seed.signal(number)
    ended = seed.process.wait(60)
    reader.close()
    peer.close()
    assert -number == ended


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("return", 0),
        *(pytest.param("return", 0, marks=SLOW_TO_SEE) for _ in range(2)),
        pytest.param("exit", 3, marks=SLOW_TO_SEE),
    ],
    ids=["1", "2", "3", "exit"],
)
def test_a_reader_that_is_never_closed_ends_as_it_wants(
    node: Callable[..., Node], how: str, code: int
) -> None:
    """In mid-read."""
    seed = a_seed(rate=SLOW)
    target = node("read", seed.report().address, "fork-1", how)
    assert ["connected", "chunk"] == [target.heard(), target.heard()]
    ended, written = target.left()
    seed.close()
    assert (code, False) == (ended, "terminate called" in written)


def reaches(port: int, address: str, stack: ExitStack) -> bool:
    """Whether a connection from this address is taken; it stays open, and says 1 KiB that is no gloo."""
    try:
        connection = socket.create_connection((HERE, port), 0.3, source_address=(address, 0))
    except OSError:
        return False
    stack.enter_context(closing(connection))
    with suppress(OSError):  # it may be cut as soon as it is taken
        connection.sendall(bytes(8) + os.urandom(1016))  # as the first rank, then anything
    return True


def test_strangers_do_not_reach_a_group(node: Callable[..., Node]) -> None:
    """While it is built and while it runs: both sides live, and the reader gets everything."""
    seed = node("seed", str(SLOW))
    address = seed.heard()
    before = {*seed.ports(), *listens(os.getpid())}
    image = image_of(SIZES)
    over = threading.Event()
    tried: set[int] = set()

    def harass() -> None:
        """Be at each new port as soon as it is there."""
        with ExitStack() as stack:
            while not over.is_set():
                for port in {*seed.ports(), *listens(os.getpid())} - before:
                    tried.add(port)
                    reaches(port, STRANGER, stack)

    harassing = threading.Thread(target=harass)
    harassing.start()
    peer, _, reader = a_reader(address, image, "fork-1")
    reader.read(*image.layout.chunks[0], soon())
    ports = sorted({*seed.ports(), *listens(os.getpid())} - before)
    with ExitStack() as stack:
        strangers = [reaches(port, STRANGER, stack) for port in ports]
        reader.read(0, image.layout.image_bytes, soon())
    over.set()
    harassing.join()
    reader.close()
    peer.close()
    code, written = seed.left()
    whole = content(image_of(SIZES, seed=1))
    assert (0, True, [False, False], True) == (
        code,
        content(image) == whole,
        strangers,
        tried >= set(ports),
    ), written


@pytest.mark.parametrize("says", [b"", os.urandom(1024)], ids=["silent", "garbage"])
def test_many_who_come_from_the_readers_host(node: Callable[..., Node], says: bytes) -> None:
    """A hundred that are let in, as the filter tells hosts apart, and that are no rank: both sides live."""
    seed = node("seed", str(SLOW))
    address = seed.heard()
    before = seed.ports()
    image = image_of(SIZES)
    peer, _, reader = a_reader(address, image, "fork-1")
    reader.read(*image.layout.chunks[0], soon())
    (port,) = seed.ports() - before
    with ExitStack() as stack:
        for _ in range(100):
            connection = stack.enter_context(closing(socket.create_connection((HERE, port), 5)))
            connection.sendall(says)
        reader.read(0, image.layout.image_bytes, soon())
    reader.close()
    peer.close()
    code, written = seed.left()
    assert (0, True) == (code, content(image) == content(image_of(SIZES, seed=1))), written


class Told(Keys):
    """Keys that remember what they were told."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def ask(self, keys: Sequence[str], deadline: float, *, wait: bool) -> list[bytes | None]:
        return [self.values.get(key) for key in keys]


def says_where(port: int) -> bytes:
    """What gloo tells of a rank of two that listens on this port."""
    address = socket.AF_INET.to_bytes(2, "little") + port.to_bytes(2, "big") + socket.inet_aton(HERE)
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
    with socket.create_server((HERE, 0)) as made:
        yield made


def test_who_came_before_the_port_was_shut_has_no_place(listener: socket.socket) -> None:
    """The group does not form, and nobody is told where it listens."""
    port, keys = listener.getsockname()[1], Told()
    shut = ShutKeys(keys, 0, 2, HERE, soon())
    with (
        socket.create_connection((HERE, port)),
        closing(shut.port),
        pytest.raises(SourceGone, match="stranger"),
    ):
        shut.put("0/0", says_where(port))
    assert {} == keys.values


def test_where_a_rank_listens_is_told_once_the_port_is_shut(listener: socket.socket) -> None:
    """To the readers' host alone."""
    port, keys = listener.getsockname()[1], Told()
    shut = ShutKeys(keys, 0, 2, HERE, soon())
    shut.put("0/0", says_where(port))
    with ExitStack() as stack, closing(shut.port):
        reached = [reaches(port, address, stack) for address in (HERE, STRANGER)]
    assert ([True, False], {"0/0": says_where(port)}) == (reached, keys.values)
