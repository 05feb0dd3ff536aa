"""`rfork sidecar`: stock SGLang's R-Fork, planned: what it gives, and what it cannot.

Beside a seed (``--remote-instance-weight-loader-start-seed-via-transfer-engine``) it publishes the engine's
ranks to the planner while the engine is healthy. Beside a client (``--load-format remote_instance
--remote-instance-weight-loader-backend transfer_engine``) it stands where the client looks for its seed,
and answers with the one that the planner chose: places, drains, quarantine, hosts and racks count, and a
seed that is gone is not given. One sidecar may do both.

Its limits are those of the stock protocol:

* No byte is verified. The client compares names, element counts and element sizes; two models of one shape
  pass.
* A lease binds nobody: whoever reaches the engine's TransferEngine reads, and over TCP writes, what is
  registered there. The lease guards the info of where weights lie, and the seeds' places. Over TCP, which
  ``MOONCAKE_PROTOCOL=tcp`` in the sidecar's environment tells of, ``RFORK_ALLOW_UNAUTHENTICATED_TCP=1`` has to be set.
* No relays, stripes, resume or storage: a client reads all from one complete seed, and ends itself where
  that fails.
* Parameters only: buffers and what is hung on modules after load are not sent, and a client does not process
  quantised weights after loading.
* Ranks are told apart by tp_rank alone: engines with pipeline stages or a draft model are refused.
* A client does not become a seed: SGLang publishes no info of an engine that was itself loaded so.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rfork.engines.sglang_bridge.engine import StockEngine
from rfork.engines.sglang_bridge.http_servers import HttpServerThread, InfoClient, client_app, seed_app
from rfork.engines.sglang_bridge.lease_manager import LeaseManager
from rfork.engines.sglang_bridge.publisher import Publisher
from rfork.errors import SettingsError
from rfork.logs import logger
from rfork.planner_client.client import PlannerClient
from rfork.settings import LOOPBACK, InstanceSettings, SidecarSettings, host_port

log = logger("rfork.sidecar")


class Sidecar:
    """All parts of a sidecar. `start` it, or use it in a `with` block; `close` drains and ends it.

    The constructor raises SettingsError or PortInUse, and connects to nothing.
    """

    def __init__(self, settings: InstanceSettings, own: SidecarSettings) -> None:
        _check(settings, own)
        self._settings, self._own = settings, own
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
        """host:port at which other sidecars ask this one; None: it publishes no engine."""
        if self._for_seeds is None:
            return None
        return host_port(self._settings.advertised_host, self._for_seeds.port)

    @property
    def client_address(self) -> str | None:
        """host:port at which stock clients ask; None: it answers none."""
        return self._for_clients.address if self._for_clients is not None else None

    def start(self) -> Self:
        """Answer, look and report from now on."""
        for part in (self._for_seeds, self._for_clients, self.publisher, self.lease_manager):
            if part is not None:
                part.start()
        log.warning(
            "STOCK R-FORK: nothing is verified, and who reaches an engine's TransferEngine reads its weights",
            over=self._own.mooncake_protocol,
        )
        return self

    def close(self, drain_s: float) -> None:
        """Give leases back, have no readers sent here, wait for those there are, and leave the planner's
        books.
        """
        if self.lease_manager is not None:
            self.lease_manager.stop()
        if self._for_clients is not None:
            self._for_clients.close()
        if self.publisher is not None:
            if drain_s > 0 and not self.publisher.drain(drain_s):
                log.warning("closing while some may still read", drain_s=drain_s)
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
                self._engine, self._planner, settings, model=own.model,
                address=lambda: self.seed_address or "", poll_interval_s=own.poll_interval_s,
            )  # fmt: skip
            self._for_seeds = HttpServerThread(
                seed_app(self.publisher), settings.bind, own.seed_port,
                setting="RFORK_SIDECAR_SEED_PORT", tls=settings.tls,
            )  # fmt: skip
        if own.source_model is not None:
            publisher = self.publisher
            self.lease_manager = LeaseManager(
                self._planner, self._info_client, settings, model=own.source_model, wait_s=own.seed_wait_timeout_s,
                lease_hold_s=own.lease_hold_s, engine_up=(lambda: publisher.engine_up) if publisher is not None else None,
            )  # fmt: skip
            self._for_clients = HttpServerThread(
                client_app(self.lease_manager), own.bind, own.port, setting="RFORK_SIDECAR_PORT"
            )
            if own.bind not in LOOPBACK:
                log.warning("THE SIDECAR IS OPEN: whoever reaches it gets leases on the weights", bind=own.bind)


def _check(settings: InstanceSettings, own: SidecarSettings) -> None:
    """Raises SettingsError."""
    if settings.planner is None:
        raise SettingsError("no planner is set", hint="pass --planner URL or set RFORK_PLANNER")
    if own.engine_url is None and own.source_model is None:
        raise SettingsError(
            "there is nothing to do",
            hint="--engine URL publishes a seed, --client-of-model NAME answers a client; both do both",
        )
    if own.mooncake_protocol == "tcp" and not settings.allow_unauthenticated_tcp:
        raise SettingsError(
            "over TransferEngine's plain TCP whoever reaches an engine's port reads and writes its weights",
            hint="RFORK_ALLOW_UNAUTHENTICATED_TCP=1 allows that where you trust the network wholly",
        )
