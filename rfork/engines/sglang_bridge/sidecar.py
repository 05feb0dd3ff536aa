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
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rfork.addresses import LOOPBACK, host_port
from rfork.engines.sglang_bridge.engine import StockEngine
from rfork.engines.sglang_bridge.http_servers import HttpServerThread, InfoClient, client_app, seed_app
from rfork.engines.sglang_bridge.lease_manager import MAX_LEASE_S, SEED_WAIT_TIMEOUT_S, LeaseManager
from rfork.engines.sglang_bridge.publisher import ENGINE_POLL_INTERVAL_S, Publisher
from rfork.errors import SettingsError
from rfork.logs import logger
from rfork.planner_client.client import PlannerClient
from rfork.settings import InstanceSettings, SidecarSettings

log = logger("rfork.sidecar")


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
