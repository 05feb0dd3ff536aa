"""The source side of the http transport: an HTTP/1.1 server in the seed's process, for one image.

One thread a connection: bytes go out of the tensors' own memory by `sendmsg`, which works without the
GIL. Who may hold a thread is bounded twice. A connection starts in the *lobby*; once the gate admitted
a token of it, it has a *slot*. A full lobby loses its oldest connection to the newest, so that any
number of silent strangers keeps no reader out; with all slots taken, or those of its fork, the next
reader is answered 503.
"""

from __future__ import annotations

import errno
import logging
import socket
import ssl
import threading
from collections.abc import Sequence

from rfork.errors import LeaseRejected, PortInUse, SettingsError, SourceBusy, SourceWeightsChanged
from rfork.thread_priority import lower_thread_priority
from rfork.transport.base import Endpoint, StatelessExporter
from rfork.transport.http.connection import ServerConnection
from rfork.transport.http.responses import PATH, ImageResource
from rfork.transport.http.stream import PlainStream, Stream, TlsStream

log = logging.getLogger(__name__)

MAX_UNAUTHENTICATED = 128
"""Most connections that have shown no valid token yet."""
MAX_CONNECTIONS = 256
"""Most connections that have."""
MAX_CONNECTIONS_PER_FORK = 64
"""Most of one fork: as many as it may have chunks in flight."""
BACKLOG = 1024
ACCEPT_RETRY_S = 0.05


class HttpExporter(StatelessExporter):
    """Serves one image file from construction until `close`.

    It listens on the first of `ports` that is free. `tls` None: plain TCP. `advertise` is the host that
    readers are told. `nice`: by how much the threads that send are nicer to the rest of the machine than
    this process. Raises PortInUse, or SettingsError when this machine has no such address.
    """

    def __init__(
        self,
        file: ImageResource,
        *,
        bind: str,
        ports: Sequence[int],
        advertise: str,
        tls: ssl.SSLContext | None,
        stall_s: float,
        nice: int = 0,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._file = file
        self._tls = tls
        self._stall_s = stall_s
        self._nice = nice
        self._max_connections = max_connections
        self._listener = _listen(bind, ports)
        host = f"[{advertise}]" if ":" in advertise else advertise
        scheme = "http" if tls is None else "https"
        self._url = f"{scheme}://{host}:{self._listener.getsockname()[1]}{PATH}"
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._unauthenticated: dict[ServerConnection, None] = {}  # oldest first
        self._slots: dict[ServerConnection, str] = {}  # with its fork
        self._threads: set[threading.Thread] = set()
        self._acceptor = threading.Thread(target=self._accept, name="rfork-http-accept", daemon=True)
        self._acceptor.start()

    def endpoint(self) -> Endpoint:
        """The URL, the length of the header in front of the image, and the file's entity tag now."""
        parameters = {"url": self._url, "data_offset": str(len(self._file.header)), "etag": self._file.etag}
        return Endpoint("http", parameters)

    def close(self) -> None:
        """Stop listening, cut every reader, and return once no thread touches the image."""
        with self._lock:
            self._closing.set()
            conversations = [*self._unauthenticated, *self._slots]
            threads = list(self._threads)
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, errno.EBADF):  # closed before
                raise
        for conversation in conversations:
            conversation.stream.abort()
        self._acceptor.join()
        for thread in threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connected, _ = self._listener.accept()
            except OSError as error:
                if self._closing.is_set():
                    return
                # Out of descriptors or memory: make room and go on.
                log.warning("cannot accept a connection: %s", error)
                self._evict_oldest(0)
                self._closing.wait(ACCEPT_RETRY_S)
                continue
            try:
                stream = self._stream(connected)
            except OSError as error:
                log.debug("a client went before it was served: %s", error)
                connected.close()
                continue
            self._evict_oldest(MAX_UNAUTHENTICATED - 1)
            self._start_thread(stream)

    def _stream(self, connected: socket.socket) -> Stream:
        if self._tls is None:
            return PlainStream(connected)
        # The handshake waits for the client, so it is left to the connection's own thread.
        return TlsStream(self._tls.wrap_socket(connected, server_side=True, do_handshake_on_connect=False))

    def _start_thread(self, stream: Stream) -> None:
        """Start a connection's thread; all under the lock, so that `close` sees all of it or nothing."""
        conversation = ServerConnection(stream, self._file, self._stall_s, self._acquire_slot)
        thread = threading.Thread(target=self._run_connection, args=(conversation,), name="rfork-http", daemon=True)
        with self._lock:
            if self._closing.is_set():
                stream.close()
                return
            try:
                thread.start()
            except RuntimeError as error:  # no thread to be had
                log.warning("cannot serve a connection: %s", error)
                stream.close()
                return
            self._unauthenticated[conversation] = None
            self._threads.add(thread)

    def _run_connection(self, conversation: ServerConnection) -> None:
        try:
            lower_thread_priority(self._nice)
            conversation.run()
        except TimeoutError as error:
            # Silent strangers are no news; who was let in and stands still is.
            known = conversation in self._slots
            log.log(logging.INFO if known else logging.DEBUG, "connection given up: %s", error)
        except OSError as error:
            log.debug("connection ended: %s", error)
        except (LeaseRejected, SourceBusy, SourceWeightsChanged) as error:
            log.info("reader cut in mid-body: %s", error)
        finally:
            conversation.stream.close()
            with self._lock:
                self._unauthenticated.pop(conversation, None)
                self._slots.pop(conversation, None)
                self._threads.discard(threading.current_thread())

    def _acquire_slot(self, conversation: ServerConnection, fork_id: str) -> bool:
        """Give a connection of the lobby a slot, as one of this fork; whether it has one now."""
        with self._lock:
            if conversation in self._slots:
                return True
            if conversation not in self._unauthenticated or len(self._slots) >= self._max_connections:
                return False
            if list(self._slots.values()).count(fork_id) >= MAX_CONNECTIONS_PER_FORK:
                return False
            del self._unauthenticated[conversation]
            self._slots[conversation] = fork_id
            return True

    def _evict_oldest(self, max_unauthenticated: int) -> None:
        """Cut the oldest connections of the lobby until it has at most `max_unauthenticated`."""
        with self._lock:
            evicted = list(self._unauthenticated)[: max(0, len(self._unauthenticated) - max_unauthenticated)]
            for conversation in evicted:
                del self._unauthenticated[conversation]
        for conversation in evicted:
            conversation.stream.abort()


def _listen(bind: str, ports: Sequence[int]) -> socket.socket:
    """A listener on the first of the ports that is free: two never get one, as listening takes it."""
    for port in ports:
        try:
            found = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, address = found[0]
            return socket.create_server(address, family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise SettingsError(f"RFORK_BIND: cannot listen on {bind}:{port}: {error.strerror}") from None
    raise PortInUse(bind, ports[0], last=ports[-1], setting="RFORK_HTTP_PORT")
