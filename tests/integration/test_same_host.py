"""Unix sockets between processes of one host: who is let in, who is put out, and what strangers can do."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rfork.errors import (
    NotOneHost,
    RforkError,
    SettingsError,
    SourceCorrupt,
    SourceGone,
    SourceStalled,
    TargetError,
)
from rfork.transport.same_host import listening, server
from rfork.transport.same_host.connection import MOST_DESCRIPTORS, Connection, close_all
from rfork.transport.same_host.dialling import Connections
from rfork.transport.same_host.host import socket_path
from rfork.transport.same_host.messages import LARGEST_MESSAGE
from rfork.transport.same_host.server import LOBBY, MOST_HOLDS_OF_A_FORK, MOST_OF_A_FORK, LocalServer
from tests.transport_contract import soon

LINGER_S = 10
"""Seconds that a stranger's socket takes to close."""


def _kernel_can_refuse() -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, 83, 0)
        except OSError:
            return False
    return True


PASSRIGHTS = _kernel_can_refuse()


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


def test_messages_cross(echo: Echo) -> None:
    """Both ways."""
    with contextlib.closing(echo.connections()) as connections, connections.borrowed(soon()) as connection:
        connection.send({"text": "é", "numbers": [1, 2]}, deadline=soon())
        answer, descriptors = connection.receive(soon())
    assert ({"text": "é", "numbers": [1, 2], "seated": False}, []) == (answer, descriptors)


def test_descriptors_cross() -> None:
    """What arrives is closed by an exec."""
    read_end, write_end = os.pipe()
    with raw() as (source, connection):
        socket.send_fds(source, [b"{}"], [write_end])
        _, (received,) = connection.receive(soon())
    os.write(received, b"x")
    assert (b"x", False) == (os.read(read_end, 5), os.get_inheritable(received))
    close_all([read_end, write_end, received])


def lingering(patience_s: int) -> tuple[socket.socket, list[socket.socket]]:
    """A TCP socket whose last close takes so long, and what keeps it so."""
    listener = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(listener.getsockname())
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    sender.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            sender.send(bytes(1 << 16))
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, patience_s))
    return sender, [listener, listener.accept()[0]]


def stranger_to(echo: Echo) -> socket.socket:
    """A socket that is connected to the server, without a word."""
    address = echo.server.parameters["socket"]
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.settimeout(30)
    if address.startswith("@"):
        stranger.connect(f"\0{address[1:]}")
    else:
        with socket_path(Path(address)) as path:
            stranger.connect(path)
    return stranger


@pytest.mark.skipif(not PASSRIGHTS, reason="needs Linux 6.16")
def test_the_kernel_refuses_descriptors_of_strangers(echo: Echo) -> None:
    """Before the server hears of them, and after it; who sends none is served."""
    with stranger_to(echo) as stranger, contextlib.closing(echo.connections()) as connections:
        for _ in range(2):
            with pytest.raises(PermissionError):
                socket.send_fds(stranger, [b"{}"], [0])
            assert not exchange(connections)


@pytest.mark.parametrize("packets", [1, 3], ids=["received", "not received"])
def test_a_descriptor_that_is_slow_to_close_holds_up_no_close(
    packets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's socket lingers where it is closed last, on a kernel that lets it in; `close` returns."""
    monkeypatch.setattr(listening, "_SO_PASSRIGHTS", -1)
    monkeypatch.setattr(server, "CLOSE_S", 0.1)
    got = threading.Event()

    def serve(connection: Connection) -> None:
        _, descriptors = connection.receive(soon())
        got.set()
        close_all(descriptors)
        connection.receive(soon())

    slow, others = lingering(LINGER_S)
    echo = Echo()
    echo.server.close()
    echo.server = LocalServer("slow", None, serve, nice=0)
    with stranger_to(echo) as stranger:
        for _ in range(packets):
            socket.send_fds(stranger, [b"{}"], [slow.fileno()])
        # The message's copy is now the last: this side's is closed without lingering, as it is not.
        slow.close()
        assert got.wait(30)
        closing = threading.Thread(target=echo.server.close, daemon=True)
        closing.start()
        closing.join(LINGER_S / 2)
        assert not closing.is_alive()
    for other in others:
        other.close()


def test_close_waits_for_who_touches_memory() -> None:
    """However long that takes, and nobody begins to after it."""
    begun, release = threading.Event(), threading.Event()
    late: list[str] = []

    def serve(connection: Connection) -> None:
        with made.touching():
            begun.set()
            release.wait(30)
        try:
            with made.touching():
                late.append("touched")
        except SourceGone as error:
            late.append(error.kind)

    made = LocalServer("touch", None, serve, nice=0)
    with contextlib.closing(Connections(made.parameters, 30)) as connections:
        connections.open(soon())
        assert begun.wait(30)
        closing = threading.Thread(target=made.close, daemon=True)
        closing.start()
        closing.join(0.1)
        waited = closing.is_alive()
        release.set()
        closing.join()
    assert (True, ["SourceGone"]) == (waited, late)


def test_another_process_at_the_sources_socket(echo: Echo) -> None:
    """Who took the name of a source that died is not believed, where the numbers of processes compare."""
    parameters = {**echo.server.parameters, "process": "1 0"}
    with pytest.raises(SourceGone, match="another process"):
        Connections(parameters, 30).open(soon())
    apart = {**parameters, "numbering": "pid:[1] user:[1]"}
    with contextlib.closing(Connections(apart, 30)) as connections:
        connections.open(soon())


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_a_socket_that_may_not_be_connected_to(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's, or one with another label: the next transport is taken, and the hint says why."""
    echo = Echo()

    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(socket.socket, "connect", refuse)
        with pytest.raises(NotOneHost) as caught:
            echo.connections().open(soon())
    echo.server.close()
    assert all(word in caught.value.hint for word in ("user", "SELinux"))


def test_a_socket_that_cannot_be() -> None:
    """What a source says is its socket is no path: that is its fault."""
    echo = Echo()
    with pytest.raises(SourceCorrupt):
        Connections({**echo.server.parameters, "socket": "/a\0b/c"}, 30).open(soon())
    echo.server.close()


def test_a_side_without_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """It blames itself, and neither the source nor the host."""
    echo = Echo()
    connections = echo.connections()

    def refuse(*arguments: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", refuse)
        with pytest.raises(TargetError):
            connections.open(soon())
    echo.server.close()


def test_descriptors_that_the_kernel_keeps_back() -> None:
    """The limit of open files, or a security module: both are named."""
    with raw() as (source, connection):
        socket.send_fds(source, [b"{}"], [0] * 5)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            with pytest.raises(TargetError, match="SELinux") as caught:
                connection.receive(soon())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "ulimit" in caught.value.hint


def test_holds_take_no_places() -> None:
    """A fork that holds on still has all of its places, and no more than a few holds."""
    made = LocalServer("hold", None, lambda connection: None, nice=0)
    crowd = [Connection(socket.socket()) for _ in range(MOST_OF_A_FORK + MOST_HOLDS_OF_A_FORK + 2)]
    made._lobby |= dict.fromkeys(crowd)
    held = [made.hold(connection, "fork-1") for connection in crowd[: MOST_HOLDS_OF_A_FORK + 1]]
    seated = [made.seat(connection, "fork-1") for connection in crowd[MOST_HOLDS_OF_A_FORK + 1 :]]
    made.close()
    for connection in crowd:
        connection.close()
    assert (MOST_HOLDS_OF_A_FORK, False) == (held.count(True), held[-1])
    assert (MOST_OF_A_FORK, False) == (seated.count(True), seated[-1])


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
