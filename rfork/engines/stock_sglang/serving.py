"""The sidecar's two listeners, and how one sidecar asks another.

* For stock clients: the endpoints of a stock seed, without a token, because those clients show none. On
  loopback unless `RFORK_SIDECAR_BIND` says otherwise: whoever reaches it gets leases, and learns where
  weights lie.
* For other sidecars (at `RFORK_BIND`; TLS by ``RFORK_TLS_*``): the info of one seed, for the bearer of a
  lease on it.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import threading
from typing import Final

import httpx
import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as Path

from rfork.engines.stock_sglang.engine import (
    ANEW,
    INFO_PATHS,
    STOCK_ANSWER,
    TIMEOUT_S,
    StockAnswer,
    WeightInfo,
    unreached,
)
from rfork.engines.stock_sglang.leasing import SeedDesk
from rfork.engines.stock_sglang.publishing import KEYS_S, Publisher
from rfork.errors import (
    LeaseRefused,
    NoSource,
    PortInUse,
    RforkError,
    SettingsError,
    SourceChanged,
    SourceCorrupt,
    SourceGone,
)
from rfork.logs import logger
from rfork.settings import TlsSettings, host_port
from rfork.tls_files import client_context
from rfork.wire import Route

SEEDS: Final = "/v1/stock-seeds"
FETCH_S: Final = TIMEOUT_S + KEYS_S + 1.0
"""Seconds for another sidecar's answer: it may wait for its keys, and asks its own engine first."""
RANKS: Final = 1 << 20

log = logger("rfork.sidecar")


def client_app(desk: SeedDesk) -> Starlette:
    """What stock clients ask: 200 as a stock seed answers, else a status that they take for a failure."""

    async def info(request: Request) -> Response:
        shown = request.query_params.get("rank", "")
        if not (shown.isascii() and shown.isdigit() and int(shown) < RANKS):
            return _refusal(400, "Missing or invalid rank parameter")
        rank = int(shown)
        try:
            found = await run_in_threadpool(desk.answer, rank)
        except RforkError as error:
            log.error("STOCK CLIENT REFUSED", rank=rank, kind=error.kind, reason=str(error), hint=error.hint)
            return _refusal(404 if isinstance(error, NoSource) else 503, str(error))
        return _told(rank, found)

    return Starlette(routes=[Path(path, info) for path in INFO_PATHS])


def seed_app(publisher: Publisher) -> Starlette:
    """What other sidecars ask, with a lease as bearer token."""

    async def info(request: Request) -> Response:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        try:
            rank, found = await run_in_threadpool(publisher.give, request.path_params["instance_id"], token)
        except LeaseRefused as error:
            return _refusal(403, str(error))
        except (SourceGone, SourceChanged) as error:
            return _refusal(410, str(error))
        except RforkError as error:
            return _refusal(503, str(error))
        return _told(rank, found)

    return Starlette(routes=[Path(f"{SEEDS}/{{instance_id}}", info)])


class InfoClient:
    """Asks other sidecars. Call it with a route and a rank; closes with `close`."""

    def __init__(self, tls: TlsSettings, transport: httpx.BaseTransport | None = None) -> None:
        """`transport` replaces the sockets, for tests."""
        self._scheme = "https" if tls.enabled else "http"
        verify = client_context(tls) if tls.enabled else True
        self._http = httpx.Client(
            timeout=FETCH_S, limits=ANEW, trust_env=False, verify=verify, transport=transport
        )

    def __call__(self, route: Route, rank: int) -> WeightInfo:
        """The info of the route's source; raises SourceError kinds, or LeaseRefused."""
        url = f"{self._scheme}://{route.address}{SEEDS}/{route.source_id}"
        try:
            response = self._http.get(url, headers={"Authorization": f"Bearer {route.lease.token}"})
        except httpx.HTTPError as error:
            raise unreached(f"the sidecar of {route.source_id} at {route.address}", error, FETCH_S) from error
        if response.status_code == httpx.codes.FORBIDDEN:
            raise LeaseRefused(f"{route.source_id} refused the lease: {response.text[:200]}")
        if not response.is_success:
            raise SourceGone(
                f"{route.source_id} gave nothing ({response.status_code}): {response.text[:200]}"
            )
        try:
            answer = STOCK_ANSWER.validate_json(response.content)
        except ValidationError as error:
            raise SourceCorrupt(
                f"{route.source_id} gave no answer of SGLang's: {error.errors()[0]['msg']}"
            ) from None
        if answer.rank != rank:
            raise SourceCorrupt(f"{route.source_id} answered for rank {answer.rank} instead of {rank}")
        return WeightInfo(*answer.remote_instance_transfer_engine_info)

    def close(self) -> None:
        """Ask no more."""
        self._http.close()


class Listening:
    """One application served on a thread of this process. Raises PortInUse or SettingsError."""

    def __init__(
        self, app: Starlette, bind: str, port: int, *, setting: str, tls: TlsSettings | None = None
    ) -> None:
        """`setting`: the variable that names the port; bound at once, so that `port` is known."""
        self._socket = _bound(bind, port, setting)
        self.port = int(self._socket.getsockname()[1])
        self.address = host_port(bind, self.port)
        config = uvicorn.Config(
            app, log_config=None, access_log=False, server_header=False, lifespan="off", ws="none",
            proxy_headers=False, timeout_graceful_shutdown=1,
            ssl_certfile=tls.certificate if tls else None, ssl_keyfile=tls.key if tls else None,
            ssl_ca_certs=str(tls.ca) if tls and tls.serves and tls.ca else None,
            ssl_cert_reqs=ssl.CERT_REQUIRED if tls and tls.serves and tls.ca else ssl.CERT_NONE,
        )  # fmt: skip
        try:
            config.load()  # reads the TLS files
        except (OSError, ssl.SSLError) as error:
            self._socket.close()
            raise SettingsError(f"the sidecar's TLS files cannot be used: {error}") from error
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="rfork-sidecar-http", daemon=True)

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            self._server.run(sockets=[self._socket])


def _bound(bind: str, port: int, setting: str) -> socket.socket:
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        if listener is not None:
            listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(bind, port, setting=setting) from None
        raise SettingsError(f"cannot listen on {bind}:{port}: {error.strerror or error}") from None
    return listener


def _told(rank: int, info: WeightInfo) -> Response:
    answer = StockAnswer(rank=rank, remote_instance_transfer_engine_info=(info.session, dict(info.tensors)))
    return Response(answer.model_dump_json(), media_type="application/json")


def _refusal(status: int, message: str) -> Response:
    """In the form of SGLang's own."""
    return JSONResponse({"error": {"message": message}}, status_code=status)
