"""Protocol selection: decided once per image, from a single scan of the machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from rfork.errors import DeviceDown
from rfork.image.capture import image_from_tensors
from rfork.image.memory import Image
from rfork.settings import InstanceSettings
from rfork.transport.base import Endpoint
from rfork.transport.mooncake import topology
from rfork.transport.mooncake import transport as module
from rfork.transport.mooncake.library import LibraryState
from rfork.transport.mooncake.topology import RdmaDevice
from rfork.transport.mooncake.transport import TransferEngineTransport

IMAGE = image_from_tensors({"a": torch.ones(8192, dtype=torch.uint8)})
PORT_UP, PORT_DOWN = RdmaDevice("mlx5_0"), RdmaDevice("mlx5_0", state="DOWN")


class FakeRdmaDevices:
    """Scans of sysfs that return these devices one after the other, then repeat the last."""

    def __init__(self, *found: RdmaDevice) -> None:
        self._found: Iterator[RdmaDevice] = iter(found)
        self._device = found[0]
        self.scan_count = 0

    def __call__(self, root: Path) -> tuple[RdmaDevice, ...]:
        self.scan_count += 1
        self._device = next(self._found, self._device)
        return (self._device,)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Protocol and devices of each engine that was started."""
    engines: list[tuple[str, str]] = []

    def exporter(image: Image, host: str, protocol: str, devices: str, nice: int) -> None:
        engines.append((protocol, devices))

    def connect(session: str, remote: int, protocol: str, host: str, devices: str, *rest: object) -> None:
        engines.append((protocol, devices))

    monkeypatch.setattr(module, "library_state", lambda: LibraryState(("a wheel",)))
    monkeypatch.setattr(module, "TransferEngineExporter", exporter)
    monkeypatch.setattr(module, "connect_engine", connect)
    monkeypatch.setattr(module, "TransferEngineReader", lambda *rest, **options: None)
    return engines


def export(transport: TransferEngineTransport) -> None:
    transport.export(IMAGE, None)  # type: ignore[arg-type]


def connect(transport: TransferEngineTransport) -> None:
    endpoint = Endpoint(
        "transfer_engine",
        {"session": "10.0.0.1:1", "protocol": "rdma"},
        tuple(IMAGE.segments(0, IMAGE.layout.image_bytes)),
    )
    transport.connect(endpoint, IMAGE, lambda: "token", math.inf)


@pytest.mark.parametrize("begin", [export, connect])
@pytest.mark.parametrize("flips_after", [1, 2, 3, 4])
def test_a_port_that_goes_down_during_the_selection_mixes_no_protocols(
    monkeypatch: pytest.MonkeyPatch,
    started: list[tuple[str, str]],
    begin: Callable[[TransferEngineTransport], None],
    flips_after: int,
) -> None:
    """A single scan decides: no engine starts over RDMA without devices, or over TCP with devices."""
    fake_devices = FakeRdmaDevices(*[PORT_UP] * flips_after, PORT_DOWN)
    monkeypatch.setattr(topology, "rdma_devices", fake_devices)
    begin(TransferEngineTransport(InstanceSettings(allow_unauthenticated_tcp=True)))
    assert [("rdma", "mlx5_0")] == started
    assert 1 == fake_devices.scan_count


@pytest.mark.parametrize(
    ("found", "settings", "usable"),
    [
        (PORT_UP, InstanceSettings(), True),
        (PORT_DOWN, InstanceSettings(), False),
        (PORT_DOWN, InstanceSettings(allow_unauthenticated_tcp=True), True),
        (PORT_DOWN, InstanceSettings(rdma_devices="mlx5_0"), False),
    ],
)
def test_availability_scans_the_devices_once(
    monkeypatch: pytest.MonkeyPatch,
    started: list[tuple[str, str]],
    found: RdmaDevice,
    settings: InstanceSettings,
    usable: bool,
) -> None:
    """Reading sysfs is slow with many devices."""
    fake_devices = FakeRdmaDevices(found)
    monkeypatch.setattr(topology, "rdma_devices", fake_devices)
    available = TransferEngineTransport(settings).availability()
    assert usable == available.usable
    assert 1 == fake_devices.scan_count


def test_a_requested_device_that_is_down_raises(
    monkeypatch: pytest.MonkeyPatch, started: list[tuple[str, str]]
) -> None:
    """The image is not exported over another device."""
    monkeypatch.setattr(topology, "rdma_devices", FakeRdmaDevices(PORT_DOWN))
    with pytest.raises(DeviceDown, match="its port is DOWN"):
        export(TransferEngineTransport(InstanceSettings(rdma_devices="mlx5_0", allow_unauthenticated_tcp=True)))
    assert [] == started
