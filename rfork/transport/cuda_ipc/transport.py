"""The `cuda_ipc` transport: when it can run, and how both sides begin.

From GPU to GPU of one host, or within one GPU: by NVLink where there is one, else over PCIe. It needs no
network, and takes no memory beside the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from rfork.errors import (
    LeaseRejected,
    RforkError,
    SourceBusy,
    SourceWeightsChanged,
    TransportUnavailable,
)
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.settings import InstanceSettings
from rfork.transport.base import (
    AccessGate,
    Availability,
    Endpoint,
    OpenControlStream,
    TokenSource,
    no_control_stream,
)
from rfork.transport.cuda_ipc import libcuda, protocol
from rfork.transport.cuda_ipc.allocations import allocations_of
from rfork.transport.cuda_ipc.cuda import CudaDriver
from rfork.transport.cuda_ipc.diagnostics import require_peer_access
from rfork.transport.cuda_ipc.driver import Driver, DriverError
from rfork.transport.cuda_ipc.exporter import CudaIpcExporter
from rfork.transport.cuda_ipc.reader import CudaIpcReader
from rfork.transport.cuda_ipc.source_memory import SourceMemory
from rfork.transport.mooncake.read_plan import AddressMap
from rfork.transport.unix_socket.client import ConnectionPool
from rfork.transport.unix_socket.host_identity import same_host_availability

log = logger(__name__)


class CudaIpcTransport:
    """Copies between two processes of one host, out of one's GPU memory into the other's.

    `driver` makes what speaks to the GPUs.
    """

    name = "cuda_ipc"
    one_sided = False

    def __init__(self, settings: InstanceSettings, driver: Callable[[], Driver] = CudaDriver) -> None:
        self._settings = settings
        self._driver = driver

    def availability(self) -> Availability:
        """Usable on Linux with a GPU of NVIDIA's that torch sees; see `Transport.availability`."""
        here = same_host_availability()
        if not here.usable:
            return here
        if torch.version.cuda is None or not torch.cuda.is_available():
            return Availability(False, "torch finds no CUDA device")
        try:
            version = libcuda.CudaDriverLibrary().version()
        except (RforkError, DriverError) as error:
            return Availability(False, str(error), error.hint if isinstance(error, RforkError) else "")
        if version < libcuda.MIN_VERSION:
            text = f"the NVIDIA driver is of CUDA {version // 1000}.{version % 1000 // 10}"
            return Availability(False, text, "CUDA 11.4 (driver R470) or newer is needed")
        return Availability(True, "from GPU to GPU of this host")

    def export(self, image: Image, gate: AccessGate) -> CudaIpcExporter:
        """Source side: show the image's GPU memory to whoever `gate` admits.

        Raises TransportUnavailable kinds for an image of host memory, or of memory that no other process can
        open; SettingsError when the folder of sockets cannot be used.
        """
        try:
            return CudaIpcExporter(image, gate, self._driver(), self._settings)
        except DriverError as error:
            raise TransportUnavailable(f"the GPU's driver refuses: {error}") from error

    def connect(
        self,
        endpoint: Endpoint,
        image: Image,
        token: TokenSource,
        deadline: float,
        talk: OpenControlStream = no_control_stream,
    ) -> CudaIpcReader:
        """Target side: hold on to the source, and open some of its memory to learn whether that works.

        A lease that is refused by then is said by the first read. Raises as `CudaIpcReader.read` does, and
        NotSameHost, PeerAccessUnavailable, VersionMismatch or TransportUnavailable.
        """
        settings, parameters = self._settings, endpoint.parameters
        remote = AddressMap(endpoint.segments, image.layout.image_bytes)
        connections = ConnectionPool(parameters, settings.source_idle_timeout_s, folder=settings.unix_socket_dir)
        connections.open(deadline)
        try:
            reader = self._reader(connections, parameters, image, token, remote)
        except DriverError as error:
            connections.close()
            raise TransportUnavailable(f"the GPU's driver refuses: {error}") from error
        except BaseException:
            connections.close()
            raise
        try:
            reader.open(deadline)
        except (LeaseRejected, SourceBusy, SourceWeightsChanged) as error:
            log.debug("the source refuses for now", because=str(error))
        except BaseException:
            reader.close()
            raise
        return reader

    def _reader(
        self,
        connections: ConnectionPool,
        parameters: Mapping[str, str],
        image: Image,
        token: TokenSource,
        remote: AddressMap,
    ) -> CudaIpcReader:
        driver = self._driver()
        target = allocations_of(driver, image)
        if not target.table:
            raise TransportUnavailable("no byte of this instance's image lies on a GPU")
        require_peer_access(driver, parameters.get(protocol.DEVICES, "").split(","), target.devices)
        stall_s = self._settings.source_idle_timeout_s
        memory = SourceMemory(driver, connections, token, parameters, stall_s)
        return CudaIpcReader(driver, connections, memory, image, token, remote=remote, target=target, stall_s=stall_s)
