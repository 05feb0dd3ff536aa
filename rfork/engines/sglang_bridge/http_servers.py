"""HTTP servers of the sidecar, and the client that sidecars use to query each other.

* For stock clients: the endpoints of a stock seed, without a token, because those clients send none. Bound
  to loopback unless `RFORK_SIDECAR_BIND` is set: any client that reaches it gets leases and the location of
  weights.
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

from rfork.addresses import host_port
from rfork.engines.sglang_bridge.engine import (
    INFO_PATHS,
    NO_KEEPALIVE,
    TIMEOUT_S,
    TRANSFER_INFO_RESPONSE,
    TransferInfoResponse,
    WeightInfo,
    unreachable_error,
)
from rfork.engines.sglang_bridge.lease_manager import LeaseManager
from rfork.engines.sglang_bridge.publisher import KEYS_TIMEOUT_S, Publisher
from rfork.errors import (
    LeaseRejected,
    NoSource,
    PortInUse,
    RforkError,
    SettingsError,
    SourceCorrupt,
    SourceUnavailable,
    SourceWeightsChanged,
    reason_of,
)
from rfork.logs import logger
from rfork.net.tls import client_context
from rfork.schema import Route
from rfork.settings import TlsSettings

SEEDS_PATH: Final = "/v1/stock-seeds"
FETCH_TIMEOUT_S: Final = TIMEOUT_S + KEYS_TIMEOUT_S + 1.0
"""Timeout in seconds of a request to another sidecar, which may wait for lease keys and queries its engine
first.
"""
MAX_RANK_COUNT: Final = 1 << 20

log = logger("rfork.sidecar")


def client_app(lease_manager: LeaseManager) -> Starlette:
    """Return the application for stock clients, which responds like a stock seed."""

    async def info(request: Request) -> Response:
        rank_text = request.query_params.get("rank", "")
        if not (rank_text.isascii() and rank_text.isdigit() and int(rank_text) < MAX_RANK_COUNT):
            return _error_response(400, "Missing or invalid rank parameter")
        rank = int(rank_text)
        try:
            found = await run_in_threadpool(lease_manager.weight_info_for, rank)
        except RforkError as error:
            log.error("SGLang client refused", rank=rank, kind=error.kind, reason=str(error), hint=error.hint)
            return _error_response(404 if isinstance(error, NoSource) else 503, str(error))
        return _info_response(rank, found)

    return Starlette(routes=[Path(path, info) for path in INFO_PATHS])


def seed_app(publisher: Publisher) -> Starlette:
    """Return the application for other sidecars, which authenticate with a lease as bearer token."""

    async def info(request: Request) -> Response:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        try:
            rank, found = await run_in_threadpool(publisher.serve_info, request.path_params["instance_id"], token)
        except LeaseRejected as error:
            return _error_response(403, str(error))
        except (SourceUnavailable, SourceWeightsChanged) as error:
            return _error_response(410, str(error))
        except RforkError as error:
            return _error_response(503, str(error))
        return _info_response(rank, found)

    return Starlette(routes=[Path(f"{SEEDS_PATH}/{{instance_id}}", info)])


class InfoClient:
    """Fetches weight info from other sidecars. Call it with a route and a rank."""

    def __init__(self, tls: TlsSettings, transport: httpx.BaseTransport | None = None) -> None:
        """`transport` replaces the network in tests."""
        self._scheme = "https" if tls.enabled else "http"
        verify = client_context(tls) if tls.enabled else True
        self._http = httpx.Client(
            timeout=FETCH_TIMEOUT_S, limits=NO_KEEPALIVE, trust_env=False, verify=verify, transport=transport
        )

    def __call__(self, route: Route, rank: int) -> WeightInfo:
        """Return the weight info of the route's source. Raises SourceError types or LeaseRejected."""
        url = f"{self._scheme}://{route.address}{SEEDS_PATH}/{route.source_id}"
        try:
            response = self._http.get(url, headers={"Authorization": f"Bearer {route.lease.token}"})
        except httpx.HTTPError as error:
            raise unreachable_error(
                f"the sidecar of {route.source_id} at {route.address}", error, FETCH_TIMEOUT_S
            ) from error
        if response.status_code == httpx.codes.FORBIDDEN:
            raise LeaseRejected(f"the sidecar of {route.source_id} rejected the lease: {response.text[:200]}")
        if not response.is_success:
            failure = f"returned status {response.status_code}: {response.text[:200]}"
            raise SourceUnavailable(f"the sidecar of {route.source_id} {failure}")
        try:
            response_model = TRANSFER_INFO_RESPONSE.validate_json(response.content)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise SourceCorrupt(f"the sidecar of {route.source_id} returned an invalid response: {reason}") from None
        if response_model.rank != rank:
            returned = f"returned rank {response_model.rank} instead of {rank}"
            raise SourceCorrupt(f"the sidecar of {route.source_id} {returned}")
        return WeightInfo(*response_model.remote_instance_transfer_engine_info)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


class HttpServerThread:
    """Serves one application on a thread of this process. Raises PortInUse or SettingsError."""

    def __init__(self, app: Starlette, bind: str, port: int, *, setting: str, tls: TlsSettings | None = None) -> None:
        """Bind immediately, so that `port` is known. `setting` is the variable that sets the port."""
        self._socket = _listen(bind, port, setting)
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
            raise SettingsError(
                f"invalid TLS files of the sidecar: {reason_of(error)}",
                hint="check RFORK_TLS_CERTIFICATE, RFORK_TLS_KEY and RFORK_TLS_CA: each must be a PEM file",
            ) from error
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="rfork-sidecar-http", daemon=True)

    def start(self) -> None:
        """Start serving."""
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            self._server.run(sockets=[self._socket])


def _listen(bind: str, port: int, setting: str) -> socket.socket:
    listener: socket.socket | None = None
    try:
        family, socket_type, protocol, _, address = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket_type, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        if listener is not None:
            listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(bind, port, setting=setting) from None
        raise SettingsError(
            f"cannot listen on {bind}:{port}: {reason_of(error)}",
            hint="set RFORK_BIND and RFORK_SIDECAR_BIND to addresses of this machine",
        ) from None
    return listener


def _info_response(rank: int, info: WeightInfo) -> Response:
    response_model = TransferInfoResponse(
        rank=rank, remote_instance_transfer_engine_info=(info.session, dict(info.tensors))
    )
    return Response(response_model.model_dump_json(), media_type="application/json")


def _error_response(status: int, message: str) -> Response:
    """Return an error in SGLang's own format."""
    return JSONResponse({"error": {"message": message}}, status_code=status)
