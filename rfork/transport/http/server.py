"""Source side of the http transport: an HTTP/1.1 server for one image, in the seed's process.

One thread per connection: `sendmsg` sends bytes directly from the tensors' memory, without the GIL.
Connections are bounded twice. A new connection is *unauthenticated*; once the gate has authorized a token, it
gets a *slot*. If there are too many unauthenticated connections, the oldest is closed, so that idle clients
cannot keep readers out. If all slots, or those of its fork, are in use, the next reader gets a 503.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import threading
from collections.abc import Sequence

from rfork.errors import LeaseRejected, PortInUse, SettingsError, SourceBusy, SourceWeightsChanged, reason_of
from rfork.logs import logger
from rfork.net.stream import PlainStream, Stream, TlsStream
from rfork.thread_priority import lower_thread_priority
from rfork.transport.base import Endpoint, StatelessExporter
from rfork.transport.http.connection import ServerConnection
from rfork.transport.http.responses import PATH, ImageResource

log = logger(__name__)

MAX_UNAUTHENTICATED = 128
"""Maximum number of connections without a valid token."""
MAX_CONNECTIONS = 256
"""Maximum number of connections with a valid token."""
MAX_CONNECTIONS_PER_FORK = 64
"""Maximum number per fork: equal to the maximum number of chunks in flight."""
BACKLOG = 1024
ACCEPT_RETRY_S = 0.05


class HttpExporter(StatelessExporter):
    """Serves one image from construction until `close`.

    Listens on the first free port of `ports`. `tls` None: plain TCP. `advertise` is the host in the URL for
    readers. `nice` lowers the priority of the sending threads. Raises PortInUse, or SettingsError if this
    machine does not have the address.
    """

    def __init__(
        self,
        resource: ImageResource,
        *,
        bind: str,
        ports: Sequence[int],
        advertise: str,
        tls: ssl.SSLContext | None,
        idle_timeout_s: float,
        nice: int = 0,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._resource = resource
        self._tls = tls
        self._idle_timeout_s = idle_timeout_s
        self._nice = nice
        self._max_connections = max_connections
        self._listener = _listen(bind, ports)
        host = f"[{advertise}]" if ":" in advertise else advertise
        scheme = "http" if tls is None else "https"
        self._url = f"{scheme}://{host}:{self._listener.getsockname()[1]}{PATH}"
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._unauthenticated: dict[ServerConnection, None] = {}  # oldest first
        self._slots: dict[ServerConnection, str] = {}  # value: the fork
        self._threads: set[threading.Thread] = set()
        self._acceptor = threading.Thread(target=self._accept, name="rfork-http-accept", daemon=True)
        self._acceptor.start()

    def endpoint(self) -> Endpoint:
        """Return the URL of the image and its current entity tag."""
        return Endpoint("http", {"url": self._url, "etag": self._resource.etag})

    def close(self) -> None:
        """Stop listening, disconnect every reader, and return when no thread accesses the image any more."""
        with self._lock:
            self._closing.set()
            connections = [*self._unauthenticated, *self._slots]
            threads = list(self._threads)
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, errno.EBADF):  # already closed
                raise
        for connection in connections:
            connection.stream.abort()
        self._acceptor.join()
        for thread in threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client_socket, _ = self._listener.accept()
            except OSError as error:
                if self._closing.is_set():
                    return
                # Out of descriptors or memory: close idle connections and continue.
                log.warning("cannot accept a connection", reason=str(error))
                self._evict_oldest(0)
                self._closing.wait(ACCEPT_RETRY_S)
                continue
            try:
                stream = self._stream(client_socket)
            except OSError as error:
                log.debug("client disconnected before it was served", reason=str(error))
                client_socket.close()
                continue
            self._evict_oldest(MAX_UNAUTHENTICATED - 1)
            self._start_thread(stream)

    def _stream(self, client_socket: socket.socket) -> Stream:
        if self._tls is None:
            return PlainStream(client_socket)
        # The handshake waits for the client, so it runs on the connection's thread.
        return TlsStream(self._tls.wrap_socket(client_socket, server_side=True, do_handshake_on_connect=False))

    def _start_thread(self, stream: Stream) -> None:
        """Start a connection's thread; under the lock, so that `close` sees it completely or not at all."""
        connection = ServerConnection(stream, self._resource, self._idle_timeout_s, self._acquire_slot)
        thread = threading.Thread(target=self._run_connection, args=(connection,), name="rfork-http", daemon=True)
        with self._lock:
            if self._closing.is_set():
                stream.close()
                return
            try:
                thread.start()
            except RuntimeError as error:  # the thread could not be started
                log.warning("cannot serve a connection", reason=str(error))
                stream.close()
                return
            self._unauthenticated[connection] = None
            self._threads.add(thread)

    def _run_connection(self, connection: ServerConnection) -> None:
        try:
            lower_thread_priority(self._nice)
            connection.run()
        except TimeoutError as error:
            # Timeouts of unauthenticated clients are not logged as info.
            report = log.info if connection in self._slots else log.debug
            report("connection timed out", reason=str(error))
        except OSError as error:
            log.debug("connection closed", reason=str(error))
        except (LeaseRejected, SourceBusy, SourceWeightsChanged) as error:
            log.info("reader disconnected during a response", reason=str(error))
        finally:
            connection.stream.close()
            with self._lock:
                self._unauthenticated.pop(connection, None)
                self._slots.pop(connection, None)
                self._threads.discard(threading.current_thread())

    def _acquire_slot(self, connection: ServerConnection, fork_id: str) -> bool:
        """Assign one of the slots of this fork to an unauthenticated connection; return True if it has one now."""
        with self._lock:
            if connection in self._slots:
                return True
            if connection not in self._unauthenticated or len(self._slots) >= self._max_connections:
                return False
            if list(self._slots.values()).count(fork_id) >= MAX_CONNECTIONS_PER_FORK:
                return False
            del self._unauthenticated[connection]
            self._slots[connection] = fork_id
            return True

    def _evict_oldest(self, max_unauthenticated: int) -> None:
        """Close the oldest unauthenticated connections until at most `max_unauthenticated` are left."""
        with self._lock:
            evicted = list(self._unauthenticated)[: max(0, len(self._unauthenticated) - max_unauthenticated)]
            for connection in evicted:
                del self._unauthenticated[connection]
        for connection in evicted:
            connection.stream.abort()


def _listen(bind: str, ports: Sequence[int]) -> socket.socket:
    """Listen on the first free port; binding is exclusive, so two processes never share one."""
    for port in ports:
        try:
            addresses = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, address = addresses[0]
            return socket.create_server(address, family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise SettingsError(
                    f"cannot listen on {bind}:{port}: {os.strerror(error.errno) if error.errno else reason_of(error)}",
                    hint="set RFORK_BIND to an address of this machine",
                ) from None
    raise PortInUse(bind, ports[0], last=ports[-1], setting="RFORK_HTTP_PORT")
