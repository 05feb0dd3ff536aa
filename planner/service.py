"""The planner as a process: one uvicorn worker on a socket that is bound before anything else starts."""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

import uvicorn

from planner.app import create_app
from rfork.errors import PortInUse, SettingsError
from rfork.logs import logger
from rfork.settings import LOOPBACK, PlannerSettings

BACKLOG: Final = 2048
SHUTDOWN_S: Final = 3
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def serve(settings: PlannerSettings, ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGINT or SIGTERM; `ready` is called with the URL once requests are answered.

    Logs through structlog as the caller has set it up. Raises PortInUse, or SettingsError for an address
    or TLS files that cannot be used.
    """
    with bind(settings) as listener, _quiet_signals():
        _server(settings, listener, ready).run(sockets=[listener])


@contextlib.contextmanager
def running(settings: PlannerSettings) -> Iterator[str]:
    """Serve on a thread of this process for the time of the `with` block; yields the URL."""
    up = threading.Event()
    with bind(settings) as listener:
        server = _server(settings, listener, lambda _: up.set())

        def run() -> None:
            try:
                server.run(sockets=[listener])
            finally:
                up.set()

        thread = threading.Thread(target=run, name="rfork-planner", daemon=True)
        thread.start()
        up.wait()
        try:
            if not server.started:
                raise SettingsError("the planner did not start; its log says why")
            yield url_of(settings, listener)
        finally:
            server.should_exit = True
            thread.join()


def bind(settings: PlannerSettings) -> socket.socket:
    """The listening socket. Raises PortInUse, or SettingsError where the address cannot be used."""
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.bind, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        # A restart must not wait for the old process's connections to time out.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(settings.bind, settings.port, setting="RFORK_PLANNER_PORT") from None
        raise SettingsError(
            f"cannot listen on {settings.bind}:{settings.port}: {error.strerror or error}",
            hint="set RFORK_PLANNER_BIND to an address of this machine",
        ) from None
    return listener


def url_of(settings: PlannerSettings, listener: socket.socket) -> str:
    """The URL that the listening socket is reached at."""
    host = f"[{settings.bind}]" if ":" in settings.bind else settings.bind
    return f"{'https' if settings.tls.serves else 'http'}://{host}:{listener.getsockname()[1]}"


class _Server(uvicorn.Server):
    """Says when it is up, and when it is about to go."""

    def __init__(
        self, config: uvicorn.Config, on_start: Callable[[], None], on_stop: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._on_start = on_start
        self._on_stop = on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()  # first: uvicorn waits for every answer under way, and event streams have no end
        await super().shutdown(sockets)


def _server(
    settings: PlannerSettings, listener: socket.socket, ready: Callable[[str], None] | None
) -> uvicorn.Server:
    log, tls, url = logger("planner"), settings.tls, url_of(settings, listener)
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        workers=1,
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        # Or a caller on this host could name any address as its own.
        proxy_headers=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
        ssl_certfile=tls.certificate,
        ssl_keyfile=tls.key,
        ssl_ca_certs=str(tls.ca) if tls.serves and tls.ca else None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if tls.serves and tls.ca else ssl.CERT_NONE,
    )
    try:
        config.load()  # reads the TLS files
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"the planner's TLS files cannot be used: {error}") from error
    if settings.bind not in LOOPBACK and settings.token is None and settings.tokens is None:
        log.warning(
            "THE PLANNER IS OPEN: anyone who reaches it can get leases on the weights",
            bind=settings.bind,
            hint="set RFORK_PLANNER_TOKEN or RFORK_PLANNER_TOKENS",
        )

    def started() -> None:
        log.info("planner is up", url=url)
        if ready is not None:
            ready(url)

    return _Server(config, started, app.events.close)


@contextlib.contextmanager
def _quiet_signals() -> Iterator[None]:
    """uvicorn stops at a signal and then raises it again: let that do nothing, for an exit in order."""

    def ignore(number: int, frame: FrameType | None) -> None:
        pass

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, ignore) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
