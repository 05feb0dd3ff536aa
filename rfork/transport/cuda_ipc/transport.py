"""The `cuda_ipc` transport: availability, export and connect.

Copies between GPUs of one host, or within one GPU, over NVLink or PCIe. Needs no network, and no memory in
addition to the tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from rfork.cuda.device import TorchDevices
from rfork.cuda.library import MIN_VERSION, CudaDriverLibrary, DriverError
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
from rfork.transport.same_host.host_identity import same_host_availability

if TYPE_CHECKING:
    from rfork.transport.cuda_ipc.driver import IpcDriver
    from rfork.transport.cuda_ipc.exporter import CudaIpcExporter
    from rfork.transport.cuda_ipc.reader import CudaIpcReader

log = logger(__name__)


def _ipc_driver() -> IpcDriver:
    from rfork.transport.cuda_ipc.driver import IpcDriver

    return IpcDriver()


class CudaIpcTransport:
    """Copies from one process's GPU memory to another's on the same host.

    `driver` creates the driver for the GPUs. The rest of the package is imported on use: each instance without named
    transports creates this object, also without a GPU.
    """

    name = "cuda_ipc"
    one_sided = False
    connect_timeout_s = 0.0

    def __init__(self, settings: InstanceSettings, driver: Callable[[], IpcDriver] = _ipc_driver) -> None:
        self._settings = settings
        self._driver = driver

    def availability(self) -> Availability:
        """Available on Linux with an NVIDIA GPU visible to torch; see `Transport.availability`."""
        same_host = same_host_availability()
        if not same_host.usable:
            return same_host
        if not TorchDevices.has_gpu():
            return Availability(False, "torch finds no CUDA device")
        try:
            version = CudaDriverLibrary().version()
        except (RforkError, DriverError) as error:
            return Availability(False, str(error), error.hint if isinstance(error, RforkError) else "")
        if version < MIN_VERSION:
            text = f"the NVIDIA driver supports only CUDA {version // 1000}.{version % 1000 // 10}"
            return Availability(False, text, "needs CUDA 11.4 (driver R470) or newer")
        return Availability(True, "between GPUs of this host")

    def export(self, image: Image, gate: AccessGate) -> CudaIpcExporter:
        """Source side: share the image's GPU memory with the readers that `gate` authorizes.

        Raises TransportUnavailable or a subclass for an image in host memory, or in memory that other
        processes cannot open; SettingsError if the socket directory cannot be used.
        """
        from rfork.transport.cuda_ipc.exporter import CudaIpcExporter

        try:
            return CudaIpcExporter(image, gate, self._driver(), self._settings)
        except DriverError as error:
            raise TransportUnavailable(f"the GPU driver failed: {error}") from error

    def connect(
        self,
        endpoint: Endpoint,
        image: Image,
        token: TokenSource,
        deadline: float,
        open_control_stream: OpenControlStream = no_control_stream,
    ) -> CudaIpcReader:
        """Target side: pin the source and open some of its memory as a test.

        A lease that is rejected at this point is reported by the first read. Raises as `CudaIpcReader.read`,
        and NotSameHost, PeerAccessUnavailable, VersionMismatch or TransportUnavailable.
        """
        from rfork.transport.cuda_ipc import protocol
        from rfork.transport.cuda_ipc.allocations import allocations_of
        from rfork.transport.cuda_ipc.reader import CudaIpcReader
        from rfork.transport.cuda_ipc.source_memory import require_peer_access
        from rfork.transport.mooncake.read_plan import AddressMap
        from rfork.transport.same_host.client import ConnectionPool

        settings, parameters = self._settings, endpoint.parameters
        remote = AddressMap(endpoint.segments, image.layout.image_bytes)
        connections = ConnectionPool(parameters, settings.source_idle_timeout_s, folder=settings.unix_socket_dir)
        with ExitStack() as on_error:
            on_error.callback(connections.close)
            connections.open(deadline)
            try:
                driver = self._driver()
                target = allocations_of(driver, image)
                if not target.table:
                    raise TransportUnavailable("this instance's image has no bytes on a GPU")
                require_peer_access(driver, parameters.get(protocol.DEVICES, "").split(","), target.devices)
            except DriverError as error:
                raise TransportUnavailable(f"the GPU driver failed: {error}") from error
            reader = CudaIpcReader(driver, connections, image, token, parameters, remote=remote, target=target)
            on_error.callback(reader.close)
            try:
                reader.open(deadline)
            except (LeaseRejected, SourceBusy, SourceWeightsChanged) as error:
                log.debug("source rejected the request for now", reason=str(error))
            on_error.pop_all()
        return reader
