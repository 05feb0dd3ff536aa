"""The `nixl` transport: availability, export and connect.

Used only if named: NIXL has no protection from malformed metadata, and over TCP none from its clients.

GPU images use the same code, with NIXL's memory type for them and the index of the GPU. Neither that nor RDMA
is covered by this project's tests, which have no such devices. GPU images over TCP are refused on both sides.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rfork.cuda.device import must_flush_rdma_writes
from rfork.errors import DeviceDown, MissingExtra, SourceTimeout, SourceUnavailable, TransportUnavailable
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
from rfork.transport.mooncake.read_plan import AddressMap
from rfork.transport.nixl import protocol
from rfork.transport.nixl.agent import UCX, Fabric, NixlAgent
from rfork.transport.nixl.exporter import NixlExporter
from rfork.transport.nixl.library import library_state, require_compatible
from rfork.transport.nixl.reader import NixlReader


class NixlTransport:
    """Reads from registered memory through NIXL, each range granted by the source. `root` is the parent of /sys."""

    name = "nixl"
    one_sided = False
    connect_timeout_s = 0.0

    def __init__(self, settings: InstanceSettings, root: Path = Path("/")) -> None:
        self._settings = settings
        self._root = root

    def availability(self) -> Availability:
        """Report availability and network; see `Transport.availability`."""
        return self._availability(topology.rdma_devices(self._root / "sys"))

    def export(self, image: Image, gate: AccessGate) -> NixlExporter:
        """Source side; see `Transport.export`. Raises TransportUnavailable or a subclass."""
        try:
            return NixlExporter(
                image,
                gate,
                self._fabric(image),
                idle_timeout_s=self._settings.source_idle_timeout_s,
                nice=SERVING_THREAD_NICE,
            )
        except MissingExtra as error:
            raise TransportUnavailable(str(error), hint=error.hint) from error

    def connect(
        self,
        endpoint: Endpoint,
        image: Image,
        token: TokenSource,
        deadline: float,
        open_control_stream: OpenControlStream = no_control_stream,
    ) -> NixlReader:
        """Target side; see `Transport.connect`. The lease was checked when the channel was opened.

        Raises VersionMismatch or another TransportUnavailable if the two sides are incompatible, or if a GPU
        neither orders nor can flush the writes of network cards.
        """
        fabric = self._fabric(image)
        require_compatible(endpoint.parameters.get(protocol.VERSION, ""))
        for name, local in ((protocol.BACKEND, fabric.backend), (protocol.PROTOCOL, fabric.protocol)):
            if (remote := endpoint.parameters.get(name, "")) != local:
                raise TransportUnavailable(
                    f"nixl: the source's {name} is {remote[:40] or 'unknown'}, here {local}",
                    hint="use another transport between these two machines",
                )
        addresses = AddressMap(endpoint.segments, image.layout.image_bytes)
        if not endpoint.segments:
            raise SourceUnavailable("the source serves no memory of its weights")
        if time.monotonic() >= deadline:
            raise SourceTimeout("the deadline passed before connecting over nixl")
        # Before anything is read: a refusal selects the next transport.
        flushed_gpus = [gpu for gpu in image.gpus if must_flush_rdma_writes(gpu)]
        agent = NixlAgent(fabric)
        reader = NixlReader(agent, image, token, open_control_stream, remote=addresses, flushed_gpus=flushed_gpus)
        try:
            agent.register(image)
            reader.open(min(deadline, time.monotonic() + self._settings.source_idle_timeout_s))
        except BaseException:
            reader.close()
            raise
        return reader

    def _availability(self, found: Sequence[topology.RdmaDevice]) -> Availability:
        if not sys.platform.startswith("linux"):
            return Availability(False, "needs Linux")
        state = library_state()
        if state.error:
            return Availability(False, state.error, state.hint)
        if self._settings.nixl_backend != UCX:
            return Availability(True, f"NIXL {state.version}, over its backend {self._settings.nixl_backend}")
        if self._uses_rdma(found):
            try:
                devices = topology.select_devices(found, self._settings.rdma_devices, ())
            except DeviceDown as error:
                return Availability(False, str(error), error.hint)
            return Availability(True, f"NIXL {state.version}, over RDMA ({', '.join(each.name for each in devices)})")
        if not self._settings.allow_unauthenticated_tcp:
            return Availability(
                False,
                "no usable RDMA device; over plain TCP, any process on a reader's host could read and write all memory "
                "of this process",
                "set RFORK_ALLOW_UNAUTHENTICATED_TCP=1 if the hosts of all readers are fully trusted",
            )
        return Availability(
            True,
            f"NIXL {state.version}, over plain TCP, allowed by RFORK_ALLOW_UNAUTHENTICATED_TCP: any process on a "
            "reader's host can read and write all memory of this process",
        )

    def _fabric(self, image: Image) -> Fabric:
        """Return backend, network and devices for this image; reads the state of the ports only once.

        Raises TransportUnavailable or a subclass if the transport cannot run here, or not with this image.
        """
        found = topology.rdma_devices(self._root / "sys")
        available = self._availability(found)
        if not available.usable:
            raise TransportUnavailable(f"nixl: {available.reason}", hint=available.hint)
        backend, bind = self._settings.nixl_backend, self._settings.bind
        if backend != UCX:
            return Fabric("backend", backend, bind=bind)
        gpus = sorted(image.gpus, key=str)
        if not self._uses_rdma(found):
            if gpus:
                raise TransportUnavailable(
                    f"nixl over plain TCP cannot transfer GPU memory ({', '.join(map(str, gpus))})",
                    hint="use RDMA, or RFORK_TRANSPORTS=http",
                )
            return Fabric("tcp", bind=bind)
        for gpu in gpus:
            topology.gpu_direct_mode(gpu, self._root)
        locations = [topology.pci_location(topology.gpu_address(gpu), self._root / "sys") for gpu in gpus]
        devices = topology.select_devices(found, self._settings.rdma_devices, locations)
        return Fabric("rdma", devices=",".join(f"{device.name}:{topology.PORT}" for device in devices), bind=bind)

    def _uses_rdma(self, found: Sequence[topology.RdmaDevice]) -> bool:
        """Return True if a device is usable or devices are configured."""
        return bool(self._settings.rdma_devices) or any(not device.fault for device in found)
