"""Unix sockets between processes of one host: who is let in, who is put out, and what strangers can do."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rfork.errors import NotOneHost, RforkError, SettingsError, SourceCorrupt, SourceGone, SourceStalled
from rfork.transport.same_host.connection import MOST_DESCRIPTORS, Connection, close_all
from rfork.transport.same_host.dialling import Connections
from rfork.transport.same_host.messages import LARGEST_MESSAGE
from rfork.transport.same_host.server import LOBBY, MOST_OF_A_FORK, LocalServer
from tests.transport_contract import soon


class Echo:
    """A server that sends back what it gets, with its descriptors; `seats` whoever names a fork."""

    def __init__(self, folder: Path | None = None) -> None:
        self.ended: list[str] = []
        self.server = LocalServer("echo", folder, self._serve, nice=0)

    def _serve(self, connection: Connection) -> None:
        try:
            while True:
                message, descriptors = connection.receive(soon())
                fork = message.get("fork")
                seated = isinstance(fork, str) and self.server.seat(connection, fork)
                connection.send({**message, "seated": seated}, descriptors, deadline=soon())
                close_all(descriptors)
        except RforkError as error:
            self.ended.append(error.kind)
            raise

    def connections(self) -> Connections:
        return Connections(self.server.parameters, 30)


@pytest.fixture(params=["without a file", "in a folder"])
def echo(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Echo]:
    """A server of either kind."""
    made = Echo(tmp_path if request.param == "in a folder" else None)
    yield made
    made.server.close()


def exchange(connections: Connections, fork: str = "") -> bool:
    """One message there and back; whether the connection has a place now."""
    with connections.borrowed(soon()) as connection:
        connection.send({"fork": fork} if fork else {}, deadline=soon())
        return bool(connection.receive(soon())[0]["seated"])


@contextlib.contextmanager
def raw() -> Iterator[tuple[socket.socket, Connection]]:
    """A socket of one's own, and the connection at its other end."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = Connection(other)
    with one, contextlib.closing(connection):
        yield one, connection


def test_messages_and_descriptors_cross(echo: Echo) -> None:
    """Both ways, and what arrives is closed by an exec."""
    read_end, write_end = os.pipe()
    with contextlib.closing(echo.connections()) as connections, connections.borrowed(soon()) as connection:
        connection.send({"text": "é", "numbers": [1, 2]}, [write_end], deadline=soon())
        message, (received,) = connection.receive(soon())
    os.write(received, b"x")
    assert (b"x", False) == (os.read(read_end, 5), os.get_inheritable(received))
    assert {"text": "é", "numbers": [1, 2], "seated": False} == message
    close_all([read_end, write_end, received])


def test_a_socket_in_a_folder_is_this_users_alone(tmp_path: Path) -> None:
    """Its file has mode 0600, and is gone with the server."""
    echo = Echo(tmp_path)
    modes = [stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()]
    echo.server.close()
    assert ([0o600], []) == (modes, list(tmp_path.iterdir()))


def test_a_folder_with_a_long_name(tmp_path: Path) -> None:
    """The kernel's limit on the paths of sockets is not the folder's."""
    folder = tmp_path / ("long-" * 40)
    folder.mkdir()
    echo = Echo(folder)
    with contextlib.closing(echo.connections()) as connections:
        connections.open(soon())
        assert exchange(connections, "fork-1")
    echo.server.close()


def test_sockets_of_the_dead_are_swept(tmp_path: Path) -> None:
    """What nobody listens on any more is removed; what somebody does is not, nor what is no socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(f"/proc/self/fd/{os.open(tmp_path, os.O_RDONLY)}/rfork-dead.socket")
    (tmp_path / "rfork-notes.socket").write_text("mine")
    first = Echo(tmp_path)
    second = Echo(tmp_path)
    names = {file.name for file in tmp_path.iterdir()}
    alive = {Path(made.server.parameters["socket"]).name for made in (first, second)}
    for made in (first, second):
        made.server.close()
    assert alive | {"rfork-notes.socket"} == names


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    """Is an error that names the setting."""
    with pytest.raises(SettingsError, match="RFORK_LOCAL_SOCKETS"):
        Echo(tmp_path / "nowhere")


def test_a_folder_that_is_mounted_elsewhere(tmp_path: Path) -> None:
    """The reader looks where it sees the folder itself."""
    folder, other = tmp_path / "a", tmp_path / "b"
    folder.mkdir()
    other.symlink_to(folder)
    echo = Echo(folder)
    parameters = {
        **echo.server.parameters,
        "socket": f"/nowhere/{Path(echo.server.parameters['socket']).name}",
    }
    with contextlib.closing(Connections(parameters, 30, folder=other)) as connections:
        connections.open(soon())
        assert exchange(connections, "fork-1")
    echo.server.close()
    with pytest.raises(SourceGone):
        Connections(parameters, 30, folder=other).open(soon())


def test_a_source_that_has_gone_and_one_elsewhere(echo: Echo) -> None:
    """A closed server is SourceGone; one that this side cannot see is NotOneHost, and says what to share."""
    reached = echo.connections()
    reached.open(soon())
    echo.server.close()
    for connections in (reached, echo.connections()):
        with pytest.raises(SourceGone), connections.borrowed(soon()) as connection:
            connection.receive(soon())
    elsewhere = {**echo.server.parameters, "network": "net:[1]", "folder": "1:1"}
    with pytest.raises(NotOneHost) as caught:
        Connections(elsewhere, 30).open(soon())
    assert "RFORK_LOCAL_SOCKETS" in caught.value.hint
    with pytest.raises(NotOneHost, match="another host"):
        Connections({**echo.server.parameters, "boot": "another"}, 30).open(soon())


def test_a_connection_is_kept_for_the_next_read(echo: Echo) -> None:
    """But not one on which something failed."""
    with contextlib.closing(echo.connections()) as connections:
        with connections.borrowed(soon()) as first:
            pass
        with pytest.raises(KeyError), connections.borrowed(soon()) as second:
            raise KeyError
        with connections.borrowed(soon()) as third:
            assert (True, False) == (first is second, second is third)


def test_strangers_keep_no_reader_out(echo: Echo) -> None:
    """The lobby loses its oldest; who has a place stays, and who comes is served."""
    with contextlib.closing(echo.connections()) as connections, contextlib.ExitStack() as crowd:
        assert exchange(connections, "fork-1")
        strangers = [crowd.enter_context(contextlib.closing(echo.connections())) for _ in range(LOBBY + 20)]
        for stranger in strangers:
            stranger.open(soon())
        newest = crowd.enter_context(contextlib.closing(echo.connections()))
        assert (True, True) == (exchange(connections, "fork-1"), exchange(newest, "fork-2"))


def test_one_fork_has_a_bounded_number_of_places(echo: Echo) -> None:
    """However many connections it opens; others still get one."""
    with contextlib.ExitStack() as crowd:
        all_of_it = [
            crowd.enter_context(contextlib.closing(echo.connections())) for _ in range(MOST_OF_A_FORK + 2)
        ]
        seated = [exchange(connections, "fork-1") for connections in all_of_it]
        other = crowd.enter_context(contextlib.closing(echo.connections()))
        assert (MOST_OF_A_FORK, True) == (seated.count(True), exchange(other, "fork-2"))


@pytest.mark.parametrize(
    "packet", [b"\xff\xfe", b"[1]", b"{", b"x" * (LARGEST_MESSAGE + 1), b"[" * LARGEST_MESSAGE]
)
def test_what_is_no_message_ends_that_connection_alone(echo: Echo, packet: bytes) -> None:
    """The server goes on."""
    address = echo.server.parameters["socket"]
    with contextlib.closing(echo.connections()) as connections:
        assert exchange(connections, "fork-1")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(30)
            folder = os.open(Path(address).parent if not address.startswith("@") else "/", os.O_RDONLY)
            stranger.connect(
                f"\0{address[1:]}"
                if address.startswith("@")
                else f"/proc/self/fd/{folder}/{Path(address).name}"
            )
            os.close(folder)
            stranger.send(packet)
            assert b"" == stranger.recv(5)
        assert exchange(connections, "fork-1")
    assert "SourceCorrupt" in echo.ended


def test_descriptors_of_what_is_refused_are_closed() -> None:
    """Too many, or beside something that is no message: this process keeps none."""
    before = len(os.listdir("/proc/self/fd"))
    for packet, count in ((b"{}", MOST_DESCRIPTORS + 1), (b"nothing", 3)):
        with raw() as (stranger, connection):
            socket.send_fds(stranger, [packet], [0] * count)
            with pytest.raises(SourceCorrupt):
                connection.receive(soon())
    assert before == len(os.listdir("/proc/self/fd"))


def test_deadlines_are_kept() -> None:
    """Who hears nothing, or is not listened to, gives up."""
    with raw() as (_, connection):
        with pytest.raises(SourceStalled):
            connection.receive(soon(0.1))
        until = soon(0.3)

        def fill() -> None:
            while True:
                connection.send({"x": "x" * 60_000}, deadline=until)

        with pytest.raises(SourceStalled):
            fill()


def test_a_cut_wakes_who_waits() -> None:
    """From another thread."""
    with raw() as (_, connection):
        cutter = threading.Timer(0.05, connection.cut)
        cutter.start()
        with pytest.raises(SourceGone):
            connection.receive(soon())
        cutter.join()
