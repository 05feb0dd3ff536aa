"""`rfork sidecar`: plans stock SGLang's R-Fork.

Next to a seed (``--remote-instance-weight-loader-start-seed-via-transfer-engine``) it publishes the engine's
ranks to the planner while the engine is healthy. Next to a client (``--load-format remote_instance
--remote-instance-weight-loader-backend transfer_engine``) it listens where the client expects its seed, and
returns the seed that the planner chose. So reader slots, drains, quarantine, hosts and racks are respected,
and a seed that has left is not returned. One sidecar may do both.

The stock protocol sets these limits:

* No byte is verified. The client compares names, element counts and element sizes; two models of the same
  shape pass.
* A lease is not enforced: any client that reaches the engine's TransferEngine can read, and over TCP write,
  the memory registered there. The lease protects the info of where weights are, and the seeds' reader
  slots. Over TCP (``MOONCAKE_PROTOCOL=tcp`` in the sidecar's environment),
  ``RFORK_ALLOW_UNAUTHENTICATED_TCP=1`` is required.
* No relays, stripes, resume or storage: a client reads everything from one complete seed, and exits if that
  fails.
* Parameters only: buffers and tensors attached after loading are not sent, and a client does not
  post-process quantised weights.
* Ranks are identified by tp_rank alone: engines with pipeline stages or a draft model are rejected.
* A client does not become a seed: SGLang publishes no info of an engine that was loaded this way.

Its HTTP servers:

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
from types import TracebackType
from typing import Final

import httpx
import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as Path
from typing_extensions import Self

from rfork.addresses import LOOPBACK, host_port
from rfork.engines.sglang_bridge.engine import (
    INFO_PATHS,
    NO_KEEPALIVE,
    TIMEOUT_S,
    TRANSFER_INFO_RESPONSE,
    StockEngine,
    TransferInfoResponse,
    WeightInfo,
    unreachable_error,
)
from rfork.engines.sglang_bridge.lease_manager import MAX_LEASE_S, SEED_WAIT_TIMEOUT_S, LeaseManager
from rfork.engines.sglang_bridge.publisher import ENGINE_POLL_INTERVAL_S, Publisher
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
from rfork.planner_client.client import PlannerClient
from rfork.planner_client.lease import KEYS_TIMEOUT_S
from rfork.schema import Route
from rfork.settings import InstanceSettings, SidecarSettings, TlsSettings

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


class Sidecar:
    """All parts of a sidecar. Call `start` or use it in a `with` block; `close` drains and stops it.

    The constructor raises SettingsError or PortInUse and opens no connections.
    """

    def __init__(
        self,
        settings: InstanceSettings,
        own: SidecarSettings,
        *,
        poll_interval_s: float = ENGINE_POLL_INTERVAL_S,
        seed_wait_timeout_s: float = SEED_WAIT_TIMEOUT_S,
    ) -> None:
        _check(settings, own)
        self._settings, self._own = settings, own
        self._poll_interval_s, self._seed_wait_timeout_s = poll_interval_s, seed_wait_timeout_s
        key = own.engine_api_key.get_secret_value() if own.engine_api_key is not None else None
        self._planner = PlannerClient.of(settings)
        self._info_client = InfoClient(settings.tls)
        self._engine = StockEngine(own.engine_url, token=key, tls=settings.tls) if own.engine_url else None
        self.publisher: Publisher | None = None
        self.lease_manager: LeaseManager | None = None
        self._for_seeds: HttpServerThread | None = None
        self._for_clients: HttpServerThread | None = None
        try:
            self._build()
        except BaseException:
            self.close(0.0)
            raise

    @property
    def seed_address(self) -> str | None:
        """host:port for other sidecars; None if no engine is published."""
        if self._for_seeds is None:
            return None
        return host_port(self._settings.advertised_host, self._for_seeds.port)

    @property
    def client_address(self) -> str | None:
        """host:port for stock clients; None if no client is served."""
        return self._for_clients.address if self._for_clients is not None else None

    def start(self) -> Self:
        """Start the servers, the engine poll and the lease renewal."""
        for part in (self._for_seeds, self._for_clients, self.publisher, self.lease_manager):
            if part is not None:
                part.start()
        log.warning(
            "SGLang's weights are unverified, and any client that reaches an engine's TransferEngine can read them",
            protocol=self._own.mooncake_protocol,
        )
        return self

    def close(self, drain_s: float) -> None:
        """Return leases, stop accepting readers, wait for current readers, and unregister from the planner."""
        if self.lease_manager is not None:
            self.lease_manager.stop()
        if self._for_clients is not None:
            self._for_clients.close()
        if self.publisher is not None:
            if drain_s > 0 and not self.publisher.drain(drain_s):
                log.warning("sidecar closes although clients still read from its engine", drain_s=drain_s)
            self.publisher.stop()
        if self._for_seeds is not None:
            self._for_seeds.close()
        if self._engine is not None:
            self._engine.close()
        self._info_client.close()
        self._planner.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(self._settings.drain_timeout_s if exc_type is None else 0.0)

    def _build(self) -> None:
        settings, own = self._settings, self._own
        if self._engine is not None:
            self.publisher = Publisher(
                self._engine, self._planner, settings, model=settings.model,
                address=lambda: self.seed_address or "", poll_interval_s=self._poll_interval_s,
            )  # fmt: skip
            self._for_seeds = HttpServerThread(
                seed_app(self.publisher), settings.bind, settings.http_port,
                setting="RFORK_HTTP_PORT", tls=settings.tls,
            )  # fmt: skip
        if own.source_model is not None:
            publisher = self.publisher
            self.lease_manager = LeaseManager(
                self._planner, self._info_client, settings, model=own.source_model, wait_s=self._seed_wait_timeout_s,
                max_lease_s=MAX_LEASE_S, engine_up=(lambda: publisher.engine_up) if publisher is not None else None,
            )  # fmt: skip
            self._for_clients = HttpServerThread(
                client_app(self.lease_manager), own.bind, own.port, setting="RFORK_SIDECAR_PORT"
            )
            if own.bind not in LOOPBACK:
                log.warning(
                    "sidecar is open: any client that reaches it can get leases on the weights",
                    bind=own.bind,
                    hint="set RFORK_SIDECAR_BIND=127.0.0.1 if all SGLang clients run on this machine",
                )


def _check(settings: InstanceSettings, own: SidecarSettings) -> None:
    """Raise SettingsError for an unusable configuration."""
    if settings.planner is None:
        raise SettingsError("no planner is set", hint="pass --planner URL or set RFORK_PLANNER")
    if own.engine_url is None and own.source_model is None:
        raise SettingsError(
            "the sidecar has nothing to do",
            hint="set --engine URL to publish an SGLang server, --client-of-model NAME to serve SGLang clients, "
            "or both",
        )
    if own.mooncake_protocol == "tcp" and not settings.allow_unauthenticated_tcp:
        raise SettingsError(
            "MOONCAKE_PROTOCOL is tcp: any client that reaches an engine's TransferEngine port can read and write its "
            "weights",
            hint="set RFORK_ALLOW_UNAUTHENTICATED_TCP=1 if you fully trust the network",
        )
