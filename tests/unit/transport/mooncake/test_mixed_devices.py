"""Models with tensors both in host memory and on a GPU."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Sequence

import pytest
import torch

from rfork.errors import GpuDirectUnavailable, TransportUnavailable
from rfork.image.capture import image_from_tensors
from rfork.image.memory import Image
from rfork.image.registration import Region
from rfork.settings import InstanceSettings
from rfork.transport.base import Endpoint
from rfork.transport.mooncake import exporter as exporter_module
from rfork.transport.mooncake import reader as reader_module
from rfork.transport.mooncake import topology
from rfork.transport.mooncake import transport as transport_module
from rfork.transport.mooncake.engine import TransferState, register
from rfork.transport.mooncake.exporter import TransferEngineExporter
from rfork.transport.mooncake.library import LibraryState
from rfork.transport.mooncake.read_plan import AddressMap
from rfork.transport.mooncake.reader import TransferEngineReader
from rfork.transport.mooncake.topology import RdmaDevice
from rfork.transport.mooncake.transport import TransferEngineTransport

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class MultiDeviceImage(Image):
    """An image in host memory that claims to be on other devices."""

    image_devices = frozenset({CPU})

    @property
    def devices(self) -> frozenset[torch.device]:
        return self.image_devices


def image_on(image_devices: set[torch.device], value: int = 0) -> Image:
    """Return an image of sixteen small adjacent tensors, which fit into one staged read."""
    buffer = torch.full((16 * 128,), value, dtype=torch.uint8)
    plain = image_from_tensors({f"t{at:02}": buffer[at * 128 : at * 128 + 64] for at in range(16)})
    image = MultiDeviceImage(plain.layout, plain.regions)
    image.image_devices = frozenset(image_devices)
    return image


class FakeEngine:
    """An engine that copies within this process, synchronously. Registration raises if `fails`."""

    session = "127.0.0.1:1"
    protocol = "rdma"

    def __init__(self, *, fails: bool = False) -> None:
        self.reads: list[int] = []
        self._fails = fails

    def register(self, areas: Sequence[Region]) -> None:
        if self._fails:
            raise TransportUnavailable("not registered", hint="ulimit -l unlimited")

    def start_read(self, session: str, local: int, remote: int, length: int) -> int:
        ctypes.memmove(local, remote, length)
        self.reads.append(length)
        return len(self.reads)

    def state(self, read: int) -> TransferState:
        return TransferState.DONE

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("image_devices", "reads"), [({CPU}, 1), ({CPU, CUDA}, 16)])
def test_small_pieces_are_staged_only_in_host_memory(
    monkeypatch: pytest.MonkeyPatch, image_devices: set[torch.device], reads: int
) -> None:
    """The CPU cannot copy to a device address, so each piece is then a separate read. GPUs flush network writes."""
    flushed: list[torch.device] = []
    monkeypatch.setattr(reader_module, "flush_rdma_writes", flushed.append)
    source, target, engine = image_on({CPU}, 7), image_on(image_devices), FakeEngine()
    size = source.layout.image_bytes
    remote = AddressMap(source.segments(0, size), size)
    gpus = [device for device in image_devices if device != CPU]
    reader = TransferEngineReader(engine, "session", remote, target, gather=True, flushed_gpus=gpus)  # type: ignore[arg-type]
    reader.read(0, size, math.inf)
    with target.readable(0, size) as views:
        assert bytes([7]) * size == b"".join(views)
        assert reads == len(engine.reads)
    assert gpus == flushed
    reader.close()


@pytest.mark.parametrize(("image_devices", "gather"), [({CPU}, "yes"), ({CPU, CUDA}, "no")])
def test_gather_is_disabled_for_device_memory(
    monkeypatch: pytest.MonkeyPatch, image_devices: set[torch.device], gather: str
) -> None:
    """On a device, adjacent tensors may be registered separately."""
    monkeypatch.setattr(exporter_module, "MooncakeEngine", lambda host, protocol, devices: FakeEngine())
    monkeypatch.setattr("rfork.image.registration.allocator_segments", list)
    exporter = TransferEngineExporter(image_on(image_devices), "127.0.0.1", "rdma", "mlx5_0")
    assert exporter.ready(time.monotonic() + 60)
    assert gather == exporter.endpoint().parameters["gather"]
    exporter.close()


@pytest.mark.parametrize(
    ("image_devices", "error"), [({CPU}, TransportUnavailable), ({CPU, CUDA}, GpuDirectUnavailable)]
)
def test_a_failed_registration_of_gpu_memory_is_a_gpu_direct_error(
    monkeypatch: pytest.MonkeyPatch, image_devices: set[torch.device], error: type[TransportUnavailable]
) -> None:
    """The error and its hint concern GPUDirect if any tensor is on a GPU."""
    monkeypatch.setattr("rfork.image.registration.allocator_segments", list)
    engine = FakeEngine(fails=True)
    with pytest.raises(TransportUnavailable, match="not registered") as raised:
        register(engine, image_on(image_devices), [(1, 1)])  # type: ignore[arg-type]
    assert error is type(raised.value)
    assert (error is GpuDirectUnavailable) == ("rfork doctor" in raised.value.hint)


@pytest.fixture
def started_engines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Protocol of each engine that was started, on a machine without RDMA whose wheel supports CUDA."""
    protocols: list[str] = []

    def engine(host: str, protocol: str, devices: str) -> FakeEngine:
        protocols.append(protocol)
        return FakeEngine()

    def connected(session: str, remote: int, protocol: str, *rest: object) -> FakeEngine:
        return engine("", protocol, "")

    monkeypatch.setattr(transport_module, "library_state", lambda: LibraryState(("a wheel",), cuda=True))
    monkeypatch.setattr(topology, "rdma_devices", lambda root: (RdmaDevice("mlx5_0", state="DOWN"),))
    monkeypatch.setattr(exporter_module, "MooncakeEngine", engine)
    monkeypatch.setattr(transport_module, "connect_engine", connected)
    return protocols


def _export(transport: TransferEngineTransport, image: Image) -> None:
    exporter = transport.export(image, None)  # type: ignore[arg-type]
    exporter.ready(time.monotonic() + 60)
    exporter.close()


def _connect(transport: TransferEngineTransport, image: Image) -> None:
    segments = tuple(image.segments(0, image.layout.image_bytes))
    endpoint = Endpoint("transfer_engine", {"session": "127.0.0.1:1", "protocol": "tcp"}, segments)
    transport.connect(endpoint, image, lambda: "token", math.inf).close()


@pytest.mark.parametrize("begin", [_export, _connect], ids=["source", "target"])
@pytest.mark.parametrize("image_devices", [{CUDA}, {CPU, CUDA}], ids=["gpu", "mixed"])
def test_gpu_memory_is_refused_over_tcp(
    started_engines: list[str],
    begin: Callable[[TransferEngineTransport, Image], None],
    image_devices: set[torch.device],
) -> None:
    """Neither side starts an engine, so nothing is registered; the error names the device and the alternatives."""
    transport = TransferEngineTransport(InstanceSettings(allow_unauthenticated_tcp=True))
    with pytest.raises(TransportUnavailable, match="cuda:0") as raised:
        begin(transport, image_on(image_devices))
    assert "RDMA" in raised.value.hint
    assert "http" in raised.value.hint
    assert [] == started_engines


@pytest.mark.parametrize("begin", [_export, _connect], ids=["source", "target"])
def test_host_memory_is_transferred_over_tcp(
    started_engines: list[str], begin: Callable[[TransferEngineTransport, Image], None]
) -> None:
    """The same machine starts an engine for it."""
    begin(TransferEngineTransport(InstanceSettings(allow_unauthenticated_tcp=True)), image_on({CPU}))
    assert ["tcp"] == started_engines
