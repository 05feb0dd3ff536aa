"""The `transfer_engine` transport: availability, export and connect.

Over RDMA the target's memory is registered, because its network card writes it. Over TCP it is not: the
engine's own thread writes it, so the target exposes no memory.

CUDA images over RDMA use the same code with device addresses; small pieces are then read one by one instead
of staged. Neither is covered by this project's tests, which have no such devices; device selection and error
messages are tested on copies of sysfs. CUDA images over TCP are refused on both sides: the library copies
their bytes in pieces of 64 KiB through pageable memory on the legacy stream, which waits for the inference
engine's kernels and delays them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from rfork.cuda.device import must_flush_rdma_writes
from rfork.errors import DeviceDown, SourceUnavailable, TransportUnavailable
from rfork.image.memory import Image
from rfork.settings import InstanceSettings
from rfork.thread_priority import SERVING_THREAD_NICE
from rfork.transport.base import (
    AccessGate,
    Availability,
    Endpoint,
    OpenControlStream,
    TokenSource,
    no_control_stream,
)
from rfork.transport.mooncake import topology
from rfork.transport.mooncake.engine import connect_engine, regions_within_limit, register
from rfork.transport.mooncake.exporter import TransferEngineExporter
from rfork.transport.mooncake.library import LibraryState, WireProtocol, has_wheel, library_state, require_cuda
from rfork.transport.mooncake.read_plan import AddressMap
from rfork.transport.mooncake.reader import TransferEngineReader


class TransferEngineTransport:
    """One-sided reads over Mooncake's TransferEngine: over RDMA if this machine has it, otherwise TCP if
    allowed.

    `root` is the parent of /sys and /proc.
    """

    name = "transfer_engine"
    one_sided = True
    connect_timeout_s = 0.0

    def __init__(self, settings: InstanceSettings, root: Path = Path("/")) -> None:
        self._settings = settings
        self._root = root

    def availability(self) -> Availability:
        """Report availability and protocol; see `Transport.availability`."""
        found = self._rdma_devices()
        if self._is_forbidden_tcp(found) and has_wheel():
            return self._availability(LibraryState(()), found)  # importing the library would take 40 ms
        return self._availability(library_state(), found)

    def _availability(self, state: LibraryState, found: Sequence[topology.RdmaDevice]) -> Availability:
        if state.error:
            return Availability(False, state.error, state.hint)
        if self._protocol(found) == "rdma":
            try:
                devices = topology.select_devices(found, self._settings.rdma_devices, ())
            except DeviceDown as error:
                return Availability(False, str(error), error.hint)
            return Availability(True, f"over RDMA ({', '.join(device.name for device in devices)})")
        if self._is_forbidden_tcp(found):
            faults = ", ".join(f"{device.name}: {device.fault}" for device in found)
            missing = f"no usable RDMA device ({faults})" if faults else "no RDMA device"
            return Availability(
                False,
                f"{missing}; over plain TCP, any process on a reader's host could read and write the weights",
                "set RFORK_ALLOW_UNAUTHENTICATED_TCP=1 if the hosts of all readers are fully trusted",
            )
        return Availability(
            True,
            "over plain TCP, allowed by RFORK_ALLOW_UNAUTHENTICATED_TCP: any process on a reader's host can read and "
            "write the weights",
        )

    def _is_forbidden_tcp(self, found: Sequence[topology.RdmaDevice]) -> bool:
        return self._protocol(found) != "rdma" and not self._settings.allow_unauthenticated_tcp

    def export(self, image: Image, gate: AccessGate) -> TransferEngineExporter:
        """Source side: register the image's memory. `gate` is not used: see TransferEngineExporter.

        Raises TransportUnavailable or a subclass: DeviceDown, VersionMismatch if the wheel does not support
        the image's memory, GpuDirectUnavailable. An image on a GPU is refused over TCP.
        """
        protocol, devices = self._select_protocol(image)
        host, nice = self._settings.advertised_host, SERVING_THREAD_NICE
        return TransferEngineExporter(image, host, protocol, devices, nice)

    def connect(
        self,
        endpoint: Endpoint,
        image: Image,
        token: TokenSource,
        deadline: float,
        open_control_stream: OpenControlStream = no_control_stream,
    ) -> TransferEngineReader:
        """Target side: create an engine for this source. The lease was checked when the channel was opened.

        Raises SourceUnavailable, SourceTimeout or SourceCorrupt (an address map that does not cover the
        image), and, like `export`, TransportUnavailable or a subclass if this side cannot use the transport, also if a
        GPU neither orders nor can flush the writes of network cards.
        """
        protocol, devices = self._select_protocol(image)
        session, source_protocol = (
            endpoint.parameters.get("session", ""),
            endpoint.parameters.get("protocol", ""),
        )
        if source_protocol != protocol:
            raise TransportUnavailable(
                f"{session} serves over {source_protocol or 'no protocol'}, but this machine reads over {protocol}",
                hint="use another transport between these two machines",
            )
        remote = AddressMap(endpoint.segments, image.layout.image_bytes)
        if not endpoint.segments:
            raise SourceUnavailable(f"{session} serves no memory of its weights")
        # Before anything is read: a refusal selects the next transport.
        flushed_gpus = [gpu for gpu in image.gpus if must_flush_rdma_writes(gpu)]
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
        return TransferEngineReader(engine, session, remote, image, gather=gather, flushed_gpus=flushed_gpus)

    def _select_protocol(self, image: Image) -> tuple[WireProtocol, str]:
        """Return the protocol for this image and its RDMA devices, comma separated; no devices over TCP.

        Reads the state of the ports only once: it may change, and a machine may have thousands of sysfs
        files.

        Raises TransportUnavailable or a subclass if the transport cannot run here, or not with this image.
        """
        state, found = library_state(), self._rdma_devices()
        available, protocol = self._availability(state, found), self._protocol(found)
        if not available.usable:
            error_type = DeviceDown if protocol == "rdma" and not state.error else TransportUnavailable
            raise error_type(f"transfer_engine: {available.reason}", hint=available.hint)
        gpus = sorted((device for device in image.devices if device.type == "cuda"), key=str)
        if gpus and protocol == "tcp":
            raise TransportUnavailable(
                f"transfer_engine over plain TCP cannot transfer GPU memory ({', '.join(map(str, gpus))}): "
                "its copies would delay the engine's kernels",
                hint="use RDMA, or RFORK_TRANSPORTS=http",
            )
        if gpus:
            require_cuda(state, torch.version.cuda)
        if protocol == "tcp":
            return protocol, ""
        for gpu in gpus:
            topology.gpu_direct_mode(gpu, self._root)
        pci_locations = [topology.pci_location(topology.gpu_address(gpu), self._root / "sys") for gpu in gpus]
        devices = topology.select_devices(found, self._settings.rdma_devices, pci_locations)
        return protocol, ",".join(device.name for device in devices)

    def _protocol(self, found: Sequence[topology.RdmaDevice]) -> WireProtocol:
        """Return RDMA if a device is usable or devices are configured."""
        if self._settings.rdma_devices or any(not device.fault for device in found):
            return "rdma"
        return "tcp"

    def _rdma_devices(self) -> tuple[topology.RdmaDevice, ...]:
        return topology.rdma_devices(self._root / "sys")
