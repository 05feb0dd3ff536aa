"""NIXL agents: registration of memory, loading of a peer, and transfers. Runs on both sides.

Each reader has an agent, and the source one for it: destroying the source's agent revokes the keys and closes
the connections of that reader alone. Deregistration would not: within a host and over TCP, UCX still reads the
memory afterwards.
"""

from __future__ import annotations

import threading
import uuid
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Any, Final, Literal

import torch

from rfork.addresses import is_loopback
from rfork.cuda.device import device_of
from rfork.errors import RforkError, SourceCorrupt, SourceUnavailable, TransportUnavailable, VersionMismatch
from rfork.image.memory import Image
from rfork.image.registration import Region, allocator_segments, contiguous_runs, merge_regions, regions_to_register
from rfork.image.staging import CPU
from rfork.transport.bpf_filter import PacketFilter, listening_ports
from rfork.transport.nixl.library import Descriptor, NativeAgent, bindings, start_agent
from rfork.transport.nixl.metadata import check_metadata

FabricProtocol = Literal["rdma", "tcp", "backend"]
"""Network below an agent: RDMA or TCP of the UCX backend, or whatever another backend uses."""

FIRST_PORT, LAST_PORT = 17001, 19000
"""TCP ports of UCX, one for each network interface of an agent."""
UCX: Final = "UCX"

_start_lock = threading.Lock()


class NixlReadState(Enum):
    """State of one transfer."""

    RUNNING = 0
    DONE = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class Fabric:
    """Backend, network and devices of an agent. `bind`: address that rfork listens on."""

    protocol: FabricProtocol
    backend: str = UCX
    devices: str = ""
    bind: str = ""

    @property
    def options(self) -> Mapping[str, str]:
        """Options of the backend."""
        return {"ucx_devices": self.devices} if self.protocol == "rdma" else {}

    @property
    def variables(self) -> Mapping[str, str | None]:
        """Environment in which UCX starts; it overrides the user's, which may be meant for another library."""
        if self.protocol == "rdma":
            # UCX executes reads and writes over TCP and shared memory in software, at any address of the process.
            return {"UCX_TLS": "^tcp,posix,sysv", "UCX_NET_DEVICES": None}
        if self.protocol == "tcp":
            return {
                "UCX_TLS": "cma,tcp,self",
                "UCX_TCP_PORT_RANGE": f"{FIRST_PORT}-{LAST_PORT}",
                "UCX_NET_DEVICES": "lo" if is_loopback(self.bind) else None,
                # Otherwise loading a peer blocks for two minutes if its host does not reply.
                "UCX_TCP_CONN_NB": "y",
                "UCX_TCP_SYN_CNT": "2",
            }
        return {}


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Registered memory on a GPU; memory in no such region is host memory."""

    address: int
    length: int
    device: int


class MemoryMap:
    """Device of each address: sorted regions on GPUs, and host memory elsewhere."""

    def __init__(self, on_devices: Iterable[DeviceMemory] = ()) -> None:
        self.on_devices = sorted(on_devices, key=lambda region: region.address)
        self._begins = [region.address for region in self.on_devices]

    def device(self, address: int) -> int | None:
        """Return the index of the GPU with this address; None for host memory."""
        index = bisect_right(self._begins, address) - 1
        if index < 0 or address >= self.on_devices[index].address + self.on_devices[index].length:
            return None
        return self.on_devices[index].device


class NixlAgent:
    """A running agent. Raises MissingExtra, or TransportUnavailable or a subclass, if it cannot start.

    Over TCP only hosts that its `packet_filter` allows can connect. In the milliseconds between the start of the
    agent and of the filter, any client can.
    """

    def __init__(self, fabric: Fabric) -> None:
        self.name = uuid.uuid4().hex
        self.fabric = fabric
        self.memory = MemoryMap()
        self.packet_filter = PacketFilter()
        self._bindings: Any = bindings()
        with _start_lock:
            before = listening_ports()
            self._native: NativeAgent | None = start_agent(self.name, fabric.backend, fabric.options, fabric.variables)
            try:
                # A port is added by number: the process may open other ports at the same time.
                for port in sorted(listening_ports() - before):
                    if FIRST_PORT <= port <= LAST_PORT:
                        self.packet_filter.add(port)
            except RforkError:
                self.close()
                raise

    def register(self, image: Image) -> int:
        """Register the memory of an image; return the number of regions. Raises TransportUnavailable."""
        found = memory_regions(image)
        for device, regions in found:
            self.register_regions(regions, device)
        return sum(len(regions) for _, regions in found)

    def register_regions(self, regions: Sequence[Region], device: int | None = None) -> None:
        """Register regions of host memory or of a GPU. Raises TransportUnavailable."""
        if not regions:
            return
        memory_type = self._bindings.DRAM_SEG if device is None else self._bindings.VRAM_SEG
        descriptors = [(address, length, device or 0, "") for address, length in regions]
        try:
            self._running().registerMem(self._bindings.nixlRegDList(memory_type, descriptors), [])
        except Exception as error:
            raise TransportUnavailable(
                f"nixl could not register {len(regions)} memory areas: {error}",
                hint="raise the locked-memory limit (ulimit -l unlimited); see `rfork doctor`",
            ) from error
        if device is not None:
            added = (DeviceMemory(address, length, device) for address, length in regions)
            self.memory = MemoryMap((*self.memory.on_devices, *added))

    def metadata(self) -> bytes:
        """Return the addresses of this agent and the keys of its memory, which allow any peer to read and write it."""
        try:
            metadata = bytes(self._running().getLocalMD())
        except Exception as error:
            raise TransportUnavailable(f"nixl cannot export its metadata: {error}") from error
        try:
            check_metadata(metadata, self.name)
        except SourceCorrupt as error:
            raise VersionMismatch(
                f"unknown format of this release of NIXL: {error}", hint="install nixl 1.5"
            ) from error
        return metadata

    def load_peer(self, metadata: bytes, name: str) -> None:
        """Load another agent's metadata. Raises SourceCorrupt if it is malformed, or if it has another name.

        Addresses and keys are opaque: some malformed ones end the process.
        """
        check_metadata(metadata, name)
        try:
            loaded = self._running().loadRemoteMD(metadata)
        except SourceUnavailable:
            raise
        except Exception as error:
            if isinstance(error, self._bindings.nixlBackendError):  # UCX could not connect
                raise SourceUnavailable(f"nixl cannot reach the source: {error}") from error
            raise SourceCorrupt(f"nixl rejected the source's metadata: {error}") from error
        if bytes(loaded) != name.encode():
            raise SourceCorrupt("the source's metadata is that of another agent")

    def start_read(
        self,
        peer: str,
        local: Sequence[Descriptor],
        remote: Sequence[Descriptor],
        *,
        local_on_gpu: bool = False,
        remote_on_gpu: bool = False,
    ) -> int:
        """Start reading each remote descriptor into the local one, and return the transfer's handle.

        Within a host the call itself copies the bytes. Raises SourceUnavailable if NIXL refuses.
        """
        module, native = self._bindings, self._running()
        types = [module.VRAM_SEG if on_gpu else module.DRAM_SEG for on_gpu in (local_on_gpu, remote_on_gpu)]
        try:
            handle = native.createXferReq(
                module.NIXL_READ,
                module.nixlXferDList(types[0], list(local)),
                module.nixlXferDList(types[1], list(remote)),
                peer,
                b"",
                [],
            )
        except Exception as error:
            raise SourceUnavailable(f"nixl refused a read: {error}") from error
        try:
            native.postXferReq(handle, b"")
        except Exception as error:
            self.release(handle)
            raise SourceUnavailable(f"nixl could not start a read: {error}") from error
        return handle

    def state(self, handle: int) -> NixlReadState:
        """Return the state of a transfer."""
        try:
            status = self._running().getXferStatus(handle)
        except SourceUnavailable:
            raise
        except Exception:
            return NixlReadState.FAILED
        if status == self._bindings.NIXL_SUCCESS:
            return NixlReadState.DONE
        return NixlReadState.RUNNING if status == self._bindings.NIXL_IN_PROG else NixlReadState.FAILED

    def release(self, handle: int) -> None:
        """Free a transfer that is done or has failed."""
        try:
            self._running().releaseXferReq(handle)
        except SourceUnavailable:
            raise
        except Exception:  # NIXL frees it with the agent
            return

    def close(self) -> None:
        """Destroy the agent. When this returns, no more bytes are transferred, even by unfinished transfers.

        The caller ensures that no other thread is inside a call. Idempotent.
        """
        native, self._native = self._native, None
        self.packet_filter.close()
        # The last reference: its destructor ends the agent's threads and connections.
        del native

    def _running(self) -> NativeAgent:
        if self._native is None:
            raise SourceUnavailable("the nixl agent is closed")
        return self._native


def memory_regions(image: Image) -> list[tuple[int | None, list[Region]]]:
    """Return the regions of an image, by the index of their GPU; None: host memory."""
    if image.devices <= {CPU}:
        return [(None, regions_to_register(image))]
    devices = [_index(device_of(storage)) for storage in image.runs.storages]
    runs = contiguous_runs(image)
    order = sorted(range(len(runs)), key=lambda number: -1 if devices[number] is None else devices[number] or 0)
    segments = allocator_segments()
    return [
        (device, merge_regions([runs[number] for number in group], segments))
        for device, group in groupby(order, key=devices.__getitem__)
    ]


def _index(device: torch.device) -> int | None:
    return None if device.type == "cpu" else device.index or 0
