"""The `transfer_engine` transport: when it can run, and how both sides begin.

Over RDMA the target's memory is registered, because its network card writes it; over TCP it is not:
the engine's own thread writes it, so a target gives nobody access to its memory.

RDMA and CUDA images take the same path with device addresses, and small pieces are then read one by
one instead of staged. Neither has been run in this project's tests, which have no such devices.
"""

from __future__ import annotations

import time

from rfork.errors import MissingExtra, SettingsError, SourceGone
from rfork.image.memory import Image
from rfork.niceness import made_standing_back
from rfork.settings import Settings
from rfork.transport.base import Availability, Endpoint, Gate, Talk, TokenSource, silent
from rfork.transport.transfer_engine.engine import Engine, Protocol, connect_engine
from rfork.transport.transfer_engine.exporter import TransferEngineExporter
from rfork.transport.transfer_engine.library import library_state, rdma_devices
from rfork.transport.transfer_engine.plan import AddressMap
from rfork.transport.transfer_engine.reader import TransferEngineReader


class TransferEngineTransport:
    """One-sided reads over Mooncake's TransferEngine; RDMA where this machine has it, else TCP if allowed."""

    name = "transfer_engine"
    one_sided = True

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @property
    def protocol(self) -> Protocol:
        """What it runs over here."""
        return "rdma" if rdma_devices() else "tcp"

    def availability(self) -> Availability:
        """Whether it can run here, and over what; see `Transport.availability`."""
        state = library_state()
        if state.error:
            return Availability(False, f"mooncake cannot be used: {state.error}", state.hint)
        devices = rdma_devices()
        if devices:
            return Availability(True, f"over RDMA ({', '.join(devices)})")
        if not self._settings.unguarded_tcp:
            return Availability(
                False,
                "no RDMA device, and over plain TCP a lease lets a whole host read, and write",
                "RFORK_UNGUARDED_TCP=1 allows that where you trust the hosts of all readers wholly",
            )
        return Availability(True, "over plain TCP, which RFORK_UNGUARDED_TCP allows: a lease admits a host")

    def export(self, image: Image, gate: Gate) -> TransferEngineExporter:
        """Source side: register the image's memory. `gate` is not asked: see TransferEngineExporter.

        Raises SettingsError where it cannot run, MissingExtra when the wheel does not fit the image.
        """
        self._require(image)
        reachable_at, devices = self._settings.reachable_at, self._settings.rdma_devices
        return made_standing_back(
            self._settings.giving_nice,
            lambda: TransferEngineExporter(image, reachable_at, self.protocol, devices),
        )

    def connect(
        self, endpoint: Endpoint, image: Image, token: TokenSource, deadline: float, talk: Talk = silent
    ) -> TransferEngineReader:
        """Target side: an engine for this source alone. The token was shown where `endpoint` came from.

        Raises SourceGone, SourceStalled or SourceCorrupt (an address map that does not cover the
        image), and SettingsError or MissingExtra for what this side lacks.
        """
        self._require(image)
        session, protocol = endpoint.parameters.get("session", ""), endpoint.parameters.get("protocol", "")
        if protocol != self.protocol:
            raise SettingsError(
                f"{session} gives over {protocol or 'nothing'}, and this machine reads over {self.protocol}",
                hint="use another transport between these two machines",
            )
        remote = AddressMap(endpoint.segments, image.layout.image_bytes)
        if not endpoint.segments:
            raise SourceGone(f"{session} exports an image without bytes")
        engine = connect_engine(
            session,
            endpoint.segments[0].address,
            self.protocol,
            self._settings.reachable_at,
            self._settings.rdma_devices,
            min(deadline, time.monotonic() + self._settings.stall_s),
        )
        self._register_target(engine, image)
        gather = endpoint.parameters.get("gather") == "yes"
        return TransferEngineReader(engine, session, remote, image, gather=gather)

    def _register_target(self, engine: Engine, image: Image) -> None:
        if engine.protocol != "rdma":
            return
        try:
            engine.register(image.allocations())
        except SettingsError:
            engine.close()
            raise

    def _require(self, image: Image) -> None:
        available = self.availability()
        if not available.usable:
            raise SettingsError(f"transfer_engine: {available.reason}", hint=available.hint)
        if image.device.type == "cuda" and not library_state().cuda:
            raise MissingExtra(
                "transfer_engine for CUDA memory",
                extra="mooncake-cuda12",
                why="the installed wheel has no CUDA (for CUDA 13: rfork[mooncake-cuda13])",
            )
