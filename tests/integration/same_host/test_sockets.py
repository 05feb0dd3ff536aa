"""Unix sockets with and without a file: their paths, permissions and errors."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path

import pytest

from rfork.errors import NotSameHost, SettingsError, SourceCorrupt, SourceUnavailable, TargetError
from rfork.transport.same_host.client import ConnectionPool
from rfork.transport.same_host.host_identity import socket_path
from tests.integration.same_host.echo_server import EchoServer, exchange_message
from tests.transport_contract import soon


def test_another_process_at_the_sources_socket_is_rejected(echo: EchoServer) -> None:
    """A process that took over the address of a dead source is rejected if process ids are comparable."""
    parameters = {**echo.server.parameters, "process": "1 0"}
    with pytest.raises(SourceUnavailable, match="another process"):
        ConnectionPool(parameters, 30).open(soon())
    apart = {**parameters, "namespaces": "pid:[1] user:[1]"}
    with contextlib.closing(ConnectionPool(apart, 30)) as connections:
        connections.open(soon())


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_a_socket_without_permission_falls_back(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another user's socket, or one with another security label, the next transport is used and the hint
    states the reason.
    """
    echo = EchoServer()

    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(socket.socket, "connect", refuse)
        with pytest.raises(NotSameHost) as caught:
            echo.connections().open(soon())
    echo.server.close()
    assert all(word in caught.value.hint for word in ("user", "SELinux"))


def test_an_invalid_socket_path_is_the_sources_fault() -> None:
    """A source that advertises an invalid path is at fault."""
    echo = EchoServer()
    with pytest.raises(SourceCorrupt):
        ConnectionPool({**echo.server.parameters, "socket": "/a\0b/c"}, 30).open(soon())
    echo.server.close()


def test_a_reader_out_of_descriptors_is_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """It blames itself, and neither the source nor the host."""
    echo = EchoServer()
    connections = echo.connections()

    def refuse(*arguments: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", refuse)
        with pytest.raises(TargetError):
            connections.open(soon())
    echo.server.close()


def test_a_socket_file_is_private_to_its_user(tmp_path: Path) -> None:
    """Its file has mode 0600 and is removed with the server."""
    echo = EchoServer(tmp_path)
    modes = [stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()]
    echo.server.close()
    assert [0o600] == modes
    assert [] == list(tmp_path.iterdir())


def test_a_long_directory_name_works(tmp_path: Path) -> None:
    """The kernel's limit on socket paths does not limit the directory's name."""
    folder = tmp_path / ("long-" * 40)
    folder.mkdir()
    echo = EchoServer(folder)
    with contextlib.closing(echo.connections()) as connections:
        connections.open(soon())
        assert exchange_message(connections, "fork-1")
    echo.server.close()


def test_sockets_of_dead_processes_are_removed(tmp_path: Path) -> None:
    """Sockets without a listener are removed; live sockets and other files stay."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead,
        socket_path(tmp_path / "rfork-dead.socket") as path,
    ):
        dead.bind(path)
    (tmp_path / "rfork-notes.socket").write_text("mine")
    first = EchoServer(tmp_path)
    second = EchoServer(tmp_path)
    names = {file.name for file in tmp_path.iterdir()}
    alive = {Path(made.server.parameters["socket"]).name for made in (first, second)}
    for made in (first, second):
        made.server.close()
    assert alive | {"rfork-notes.socket"} == names


def test_a_missing_directory_is_a_settings_error(tmp_path: Path) -> None:
    """The error names the setting."""
    with pytest.raises(SettingsError, match="RFORK_UNIX_SOCKET_DIR"):
        EchoServer(tmp_path / "nowhere")


def test_a_directory_mounted_at_another_path_works(tmp_path: Path) -> None:
    """The reader uses the path at which it sees the directory."""
    folder, other = tmp_path / "a", tmp_path / "b"
    folder.mkdir()
    other.symlink_to(folder)
    echo = EchoServer(folder)
    parameters = {
        **echo.server.parameters,
        "socket": f"/nowhere/{Path(echo.server.parameters['socket']).name}",
    }
    with contextlib.closing(ConnectionPool(parameters, 30, folder=other)) as connections:
        connections.open(soon())
        assert exchange_message(connections, "fork-1")
    echo.server.close()
    with pytest.raises(SourceUnavailable):
        ConnectionPool(parameters, 30, folder=other).open(soon())


def test_a_closed_source_and_a_source_on_another_host(echo: EchoServer) -> None:
    """A closed server is SourceUnavailable; a socket that is not visible here is NotSameHost, with a hint on
    what to share.
    """
    reached = echo.connections()
    reached.open(soon())
    echo.server.close()
    for connections in (reached, echo.connections()):
        with pytest.raises(SourceUnavailable), connections.lease(soon()) as connection:
            connection.receive(soon())
    elsewhere = {**echo.server.parameters, "network": "net:[1]", "folder": "1:1"}
    with pytest.raises(NotSameHost) as caught:
        ConnectionPool(elsewhere, 30).open(soon())
    assert "RFORK_UNIX_SOCKET_DIR" in caught.value.hint
    with pytest.raises(NotSameHost, match="another host"):
        ConnectionPool({**echo.server.parameters, "boot": "another"}, 30).open(soon())
