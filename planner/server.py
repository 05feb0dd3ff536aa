"""The planner as a process: one uvicorn worker on a socket that is bound before anything else starts."""

from __future__ import annotations

import contextlib
import gc
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Final

import uvicorn

from planner.app import create_app
from planner.http_server import BoundedServer, address_of, listen, uvicorn_config
from planner.integrations.runner import InProcessRunner, create_in_process_runner
from planner.origins import KnownHosts
from rfork import __version__
from rfork.addresses import LOOPBACK
from rfork.errors import SettingsError
from rfork.logs import logger
from rfork.net.tls import server_context
from rfork.schema import VERSION_HEADER
from rfork.settings import PlannerSettings

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def serve(settings: PlannerSettings, ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGINT or SIGTERM; `ready` is called with the URL once requests are answered.

    The configured integrations run alongside. Logs as configured by the caller. Raises
    PortInUse, or SettingsError for an invalid address or invalid TLS files.
    """
    with (
        bind(settings) as listener,
        _record_signals() as signals_received,
        create_in_process_runner(settings, url_of(settings, listener)) as integrations,
    ):
        server = _server(settings, listener, ready, integrations, signals_received)
        # Everything allocated so far, mainly modules, lives as long as the process. Exclude it from garbage
        # collection, which would block the event loop.
        gc.collect()
        gc.freeze()
        server.run(sockets=[listener])


@contextlib.contextmanager
def run_in_thread(settings: PlannerSettings) -> Iterator[str]:
    """Serve on a thread of this process for the duration of the `with` block; yields the URL."""
    started = threading.Event()
    with bind(settings) as listener:
        server = _server(settings, listener, lambda _: started.set())

        def run() -> None:
            try:
                server.run(sockets=[listener])
            finally:
                started.set()

        thread = threading.Thread(target=run, name="rfork-planner", daemon=True)
        thread.start()
        started.wait()
        try:
            if not server.started:
                raise SettingsError("the planner did not start; see its log")
            yield url_of(settings, listener)
        finally:
            server.should_exit = True
            thread.join()


def bind(settings: PlannerSettings) -> socket.socket:
    """Return the listening socket. Raises PortInUse, or SettingsError for an invalid address."""
    return listen(settings.bind, settings.port, prefix="RFORK_PLANNER_", port_setting="PORT")


def url_of(settings: PlannerSettings, listener: socket.socket) -> str:
    """Return the URL of the listening socket."""
    return f"{'https' if settings.tls.serves else 'http'}://{address_of(settings.bind, listener)}"


class _PlannerServer(BoundedServer):
    """Calls back when it is ready and before it stops. Exits immediately if a signal was already received."""

    def __init__(
        self,
        config: uvicorn.Config,
        on_start: Callable[[], None],
        on_stop: Callable[[], None],
        signals_received: Sequence[int],
    ) -> None:
        super().__init__(config)
        self._on_start = on_start
        self._on_stop = on_stop
        self._signals_received = signals_received

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # uvicorn handles signals from here on, so this check misses none of the earlier ones.
        self.should_exit = self.should_exit or bool(self._signals_received)
        if self.started and not self.should_exit:
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()  # first: uvicorn waits for every response in progress, and event streams have no end
        await super().shutdown(sockets)


def _server(
    settings: PlannerSettings,
    listener: socket.socket,
    ready: Callable[[str], None] | None,
    integrations: InProcessRunner | None = None,
    signals_received: Sequence[int] = (),
) -> uvicorn.Server:
    log, tls, url = logger("planner"), settings.tls, url_of(settings, listener)
    app = create_app(settings, hosts=KnownHosts.of(settings))
    if integrations is not None:
        app.metrics.registry.register(integrations.metrics)
    try:
        context = server_context(tls)
    except SettingsError as error:
        raise SettingsError(
            f"invalid TLS files of the planner: {error}",
            hint="check RFORK_TLS_CA, RFORK_TLS_CERTIFICATE and RFORK_TLS_KEY: each must be a PEM file",
        ) from error
    config = uvicorn_config(app, context, headers=[(VERSION_HEADER, __version__)])
    if tls.certificate is not None:
        app.metrics.follow_certificate(tls.certificate)
    if settings.bind not in LOOPBACK and settings.token is None and settings.tokens_file is None:
        log.warning(
            "planner is open: any client that reaches it can get leases on the weights",
            bind=settings.bind,
            hint="set RFORK_PLANNER_TOKEN or RFORK_PLANNER_TOKENS_FILE",
        )

    def started() -> None:
        log.info("planner ready", url=url)
        if integrations is not None:
            integrations.start()
        if ready is not None:
            ready(url)

    def stopping() -> None:
        app.events.close()
        app.broadcaster.close()
        if integrations is not None:
            integrations.stop()

    return _PlannerServer(config, started, stopping, signals_received)


@contextlib.contextmanager
def _record_signals() -> Iterator[list[int]]:
    """Record signals in a list, and ignore the one that uvicorn raises again after shutdown, for an orderly
    exit.

    Signals that arrive before uvicorn installs its handlers are in the list.
    """
    signals_received = list[int]()

    def note(number: int, frame: FrameType | None) -> None:
        signals_received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield signals_received
        return
    previous_handlers = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield signals_received
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
