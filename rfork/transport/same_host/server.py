"""The source side of same-host transports: a Unix socket that readers of this host connect to.

One thread a connection. Who may hold a thread is bounded twice, as in `rfork.transport.http.server`: a
connection starts in the *lobby*, and has a *place* once the gate admitted a token of it. A full lobby
loses its oldest connection to the newest, so that any number of silent strangers keeps no reader out.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from rfork.errors import RforkError, SettingsError
from rfork.logs import logger
from rfork.niceness import stand_back
from rfork.transport.same_host.connection import Connection
from rfork.transport.same_host.host import boot_id, folder_identity, network_namespace, socket_path

log = logger(__name__)

LOBBY: Final = 128
"""Most connections that have shown no valid token yet."""
MOST_CONNECTIONS: Final = 256
"""Most connections that have."""
MOST_OF_A_FORK: Final = 64
"""Most of one fork: as many as it may have chunks in flight."""
BACKLOG: Final = 1024
ACCEPT_AGAIN_S: Final = 0.05
_PREFIX: Final = "rfork-"
_SUFFIX: Final = ".socket"


class LocalServer:
    """Accepts connections from construction until `close`, and has `serve` talk on each, on its own thread.

    `folder` None: a socket without a file, seen within this network namespace; else a file of mode 0600
    there, seen by whoever of this user mounts the folder. `serve` returns when the talk is over, or raises;
    the server closes the connection. `nice`: by how much these threads stand back for the process.
    Raises SettingsError when the folder cannot be used.
    """

    def __init__(
        self,
        name: str,
        folder: Path | None,
        serve: Callable[[Connection], None],
        *,
        nice: int,
        most_connections: int = MOST_CONNECTIONS,
    ) -> None:
        self._serve = serve
        self._nice = nice
        self._most_connections = most_connections
        self._file: Path | None = None
        # Nobody can wait under this name, or guess it.
        chosen = f"{_PREFIX}{name}-{secrets.token_hex(16)}"
        parameters = {"boot": boot_id()}
        if folder is None:
            self._listener = _listen(f"\0{chosen}")
            parameters |= {"socket": f"@{chosen}", "network": network_namespace()}
        else:
            self._file = folder / f"{chosen}{_SUFFIX}"
            self._listener = _listen_in(self._file)
            parameters |= {"socket": str(self._file), "folder": folder_identity(folder)}
        self._parameters: Mapping[str, str] = parameters
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._lobby: dict[Connection, None] = {}  # oldest first
        self._places: dict[Connection, str] = {}  # with its fork
        self._threads: set[threading.Thread] = set()
        self._acceptor = threading.Thread(target=self._accept, name=f"rfork-{name}-accept", daemon=True)
        self._acceptor.start()

    @property
    def parameters(self) -> Mapping[str, str]:
        """What an endpoint says for `Connections` to find this server."""
        return self._parameters

    def seat(self, connection: Connection, fork_id: str) -> bool:
        """Give a connection of the lobby a place, as one of this fork; whether it has one now."""
        with self._lock:
            if connection in self._places:
                return True
            if connection not in self._lobby or len(self._places) >= self._most_connections:
                return False
            if list(self._places.values()).count(fork_id) >= MOST_OF_A_FORK:
                return False
            del self._lobby[connection]
            self._places[connection] = fork_id
            return True

    def close(self) -> None:
        """Stop listening, cut every connection, and return once no `serve` runs. Safe to call twice."""
        with self._lock:
            self._closing.set()
            connections = [*self._lobby, *self._places]
            threads = list(self._threads)
        with contextlib.suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        for connection in connections:
            connection.cut()
        self._acceptor.join()
        for thread in threads:
            thread.join()
        self._listener.close()
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connected, _ = self._listener.accept()
            except OSError as error:
                if self._closing.is_set():
                    return
                # Out of descriptors or memory: make room and go on.
                log.warning("cannot accept a connection", because=str(error))
                self._evict_to(0)
                self._closing.wait(ACCEPT_AGAIN_S)
                continue
            self._evict_to(LOBBY - 1)
            self._admit(Connection(connected))

    def _admit(self, connection: Connection) -> None:
        """Start a connection's thread; all under the lock, so that `close` sees all of it or nothing."""
        thread = threading.Thread(target=self._host, args=(connection,), name="rfork-local", daemon=True)
        with self._lock:
            if self._closing.is_set():
                connection.close()
                return
            try:
                thread.start()
            except RuntimeError as error:  # no thread to be had
                log.warning("cannot serve a connection", because=str(error))
                connection.close()
                return
            self._lobby[connection] = None
            self._threads.add(thread)

    def _host(self, connection: Connection) -> None:
        try:
            stand_back(self._nice)
            self._serve(connection)
        except (RforkError, OSError) as error:
            log.debug("connection ended", because=str(error))
        except Exception:  # a bug that one reader runs into must not end the others' service in silence
            log.exception("connection failed")
        finally:
            connection.close()
            with self._lock:
                self._lobby.pop(connection, None)
                self._places.pop(connection, None)
                self._threads.discard(threading.current_thread())

    def _evict_to(self, most: int) -> None:
        """Cut the oldest connections of the lobby until it has at most `most`."""
        with self._lock:
            evicted = list(self._lobby)[: max(0, len(self._lobby) - most)]
            for connection in evicted:
                del self._lobby[connection]
        for connection in evicted:
            connection.cut()


def _listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _listen_in(file: Path) -> socket.socket:
    """Listen on a file; it gets its name once it can be connected to: one that cannot is of the dead."""
    new = file.with_suffix(".new")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        _sweep(file.parent)
        with socket_path(new) as path:
            listener.bind(path)
        os.chmod(new, 0o600)
        listener.listen(BACKLOG)
        os.rename(new, file)
    except OSError as error:
        listener.close()
        new.unlink(missing_ok=True)
        why = f"cannot make a socket in {file.parent}: {error.strerror}"
        raise SettingsError(f"RFORK_LOCAL_SOCKETS: {why}") from None
    return listener


def _sweep(folder: Path) -> None:
    """Remove the sockets of processes that died before they could."""
    for file in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            if not stat.S_ISSOCK(file.lstat().st_mode):
                continue
            probe.setblocking(False)
            try:
                with socket_path(file) as path:
                    probe.connect(path)
            except ConnectionRefusedError:
                file.unlink(missing_ok=True)
