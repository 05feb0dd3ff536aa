"""The `transfer_engine` transport: when it can run, and how both sides begin.

Over RDMA the target's memory is registered, because its network card writes it; over TCP it is not:
the engine's own thread writes it, so a target gives nobody access to its memory.

RDMA and CUDA images take the same path with device addresses, and small pieces are then read one by
one instead of staged. Neither has been run in this project's tests, which have no such devices: which
devices are chosen, and what is said where something is missing, is tested on copies of sysfs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from rfork.errors import DeviceDown, SourceUnavailable, TransportUnavailable
from rfork.image.memory import Image
from rfork.settings import InstanceSettings
from rfork.transport.base import (
    AccessGate,
    Availability,
    Endpoint,
    OpenControlStream,
    TokenSource,
    no_control_stream,
)
from rfork.transport.mooncake import gpu_direct, topology
from rfork.transport.mooncake.exporter import TransferEngineExporter
from rfork.transport.mooncake.handshake import connect_engine
from rfork.transport.mooncake.library import LibraryState, WireProtocol, library_state, require_cuda
from rfork.transport.mooncake.read_plan import AddressMap
from rfork.transport.mooncake.reader import TransferEngineReader
from rfork.transport.mooncake.registration import regions_within_limit, register


class TransferEngineTransport:
    """One-sided reads over Mooncake's TransferEngine; RDMA where this machine has it, else TCP if allowed.

    `root` is where /sys and /proc are looked for.
    """

    name = "transfer_engine"
    one_sided = True

    def __init__(self, settings: InstanceSettings, root: Path = Path("/")) -> None:
        self._settings = settings
        self._root = root

    def availability(self) -> Availability:
        """Whether it can run here, and over what; see `Transport.availability`."""
        return self._availability(library_state(), self._rdma_devices())

    def _availability(self, state: LibraryState, found: Sequence[topology.RdmaDevice]) -> Availability:
        if state.error:
            return Availability(False, f"mooncake cannot be used: {state.error}", state.hint)
        if self._protocol(found) == "rdma":
            try:
                devices = topology.select_devices(found, self._settings.rdma_devices, ())
            except DeviceDown as error:
                return Availability(False, str(error), error.hint)
            return Availability(True, f"over RDMA ({', '.join(device.name for device in devices)})")
        if not self._settings.allow_unauthenticated_tcp:
            faults = ", ".join(f"{device.name}: {device.fault}" for device in found)
            none = f"no RDMA device that works ({faults})" if faults else "no RDMA device"
            return Availability(
                False,
                f"{none}, and over plain TCP a lease lets a whole host read, and write",
                "RFORK_ALLOW_UNAUTHENTICATED_TCP=1 allows that where you trust the hosts of all readers wholly",
            )
        return Availability(True, "over plain TCP, which RFORK_ALLOW_UNAUTHENTICATED_TCP allows: a lease admits a host")

    def export(self, image: Image, gate: AccessGate) -> TransferEngineExporter:
        """Source side: register the image's memory. `gate` is not asked: see TransferEngineExporter.

        Raises TransportUnavailable kinds: DeviceDown, VersionMismatch when the wheel does not fit the image,
        GpuDirectUnavailable.
        """
        protocol, devices = self._gpu_direct_mode(image)
        reachable_at, nice = self._settings.advertised_host, self._settings.serving_thread_nice
        return TransferEngineExporter(image, reachable_at, protocol, devices, nice)

    def connect(
        self,
        endpoint: Endpoint,
        image: Image,
        token: TokenSource,
        deadline: float,
        talk: OpenControlStream = no_control_stream,
    ) -> TransferEngineReader:
        """Target side: an engine for this source alone. The token was shown where `endpoint` came from.

        Raises SourceUnavailable, SourceTimeout or SourceCorrupt (an address map that does not cover the
        image), and TransportUnavailable kinds, as `export`, for what this side lacks.
        """
        protocol, devices = self._gpu_direct_mode(image)
        session, source_protocol = (
            endpoint.parameters.get("session", ""),
            endpoint.parameters.get("protocol", ""),
        )
        if source_protocol != protocol:
            raise TransportUnavailable(
                f"{session} gives over {source_protocol or 'nothing'}, and this machine reads over {protocol}",
                hint="use another transport between these two machines",
            )
        remote = AddressMap(endpoint.segments, image.layout.image_bytes)
        if not endpoint.segments:
            raise SourceUnavailable(f"{session} exports an image without bytes")
        found = regions_within_limit(image, len(devices.split(","))) if protocol == "rdma" else []
        engine = connect_engine(
            session,
            endpoint.segments[0].address,
            protocol,
            self._settings.advertised_host,
            devices,
            min(deadline, time.monotonic() + self._settings.source_idle_timeout_s),
            (lambda engine: register(engine, image, found)) if found else None,
        )
        gather = endpoint.parameters.get("gather") == "yes"
        return TransferEngineReader(engine, session, remote, image, gather=gather)

    def _gpu_direct_mode(self, image: Image) -> tuple[WireProtocol, str]:
        """What this image is read over, and the RDMA devices for that, comma separated; none over TCP.

        From one look at the ports: they go up and down, and a machine may have thousands of files to read.
        Raises TransportUnavailable kinds where it cannot run here, or not with this image.
        """
        state, found = library_state(), self._rdma_devices()
        available, protocol = self._availability(state, found), self._protocol(found)
        if not available.usable:
            error_type = DeviceDown if protocol == "rdma" and not state.error else TransportUnavailable
            raise error_type(f"transfer_engine: {available.reason}", hint=available.hint)
        gpus = sorted((device for device in image.devices if device.type == "cuda"), key=str)
        if gpus:
            require_cuda(state, torch.version.cuda)
        if protocol == "tcp":
            return protocol, ""
        for gpu in gpus:
            gpu_direct.gpu_direct_mode(gpu, self._root)
        pci_locations = [topology.pci_location(topology.gpu_address(gpu), self._root / "sys") for gpu in gpus]
        devices = topology.select_devices(found, self._settings.rdma_devices, pci_locations)
        return protocol, ",".join(device.name for device in devices)

    def _protocol(self, found: Sequence[topology.RdmaDevice]) -> WireProtocol:
        """RDMA where a device works, or some are asked for."""
        if self._settings.rdma_devices or any(not device.fault for device in found):
            return "rdma"
        return "tcp"

    def _rdma_devices(self) -> tuple[topology.RdmaDevice, ...]:
        return topology.rdma_devices(self._root / "sys")
