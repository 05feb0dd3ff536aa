"""Over what the transport runs: decided once for each image, from one look at the machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from rfork.errors import DeviceDown
from rfork.image.capture import image_of
from rfork.image.memory import Image
from rfork.settings import Settings
from rfork.transport.base import Endpoint
from rfork.transport.transfer_engine import topology
from rfork.transport.transfer_engine import transport as module
from rfork.transport.transfer_engine.library import LibraryState
from rfork.transport.transfer_engine.topology import RdmaDevice
from rfork.transport.transfer_engine.transport import TransferEngineTransport

IMAGE = image_of({"a": torch.ones(8192, dtype=torch.uint8)})
UP, DOWN = RdmaDevice("mlx5_0"), RdmaDevice("mlx5_0", state="DOWN")


class Ports:
    """Looks at sysfs: what each finds, one after the other; the last one stays."""

    def __init__(self, *found: RdmaDevice) -> None:
        self._found: Iterator[RdmaDevice] = iter(found)
        self._device = found[0]
        self.looks = 0

    def __call__(self, root: Path) -> tuple[RdmaDevice, ...]:
        self.looks += 1
        self._device = next(self._found, self._device)
        return (self._device,)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The protocol and the devices of each engine that was to be started."""
    engines: list[tuple[str, str]] = []

    def exporter(image: Image, host: str, protocol: str, devices: str, nice: int) -> None:
        engines.append((protocol, devices))

    def connect(session: str, remote: int, protocol: str, host: str, devices: str, *rest: object) -> None:
        engines.append((protocol, devices))

    monkeypatch.setattr(module, "library_state", lambda: LibraryState(("a wheel",)))
    monkeypatch.setattr(module, "TransferEngineExporter", exporter)
    monkeypatch.setattr(module, "connect_engine", connect)
    monkeypatch.setattr(module, "TransferEngineReader", lambda *rest, gather: None)
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
def test_a_port_that_goes_down_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
    started: list[tuple[str, str]],
    begin: Callable[[TransferEngineTransport], None],
    flips_after: int,
) -> None:
    """One look decides: no engine is started over RDMA without devices, nor with any over TCP."""
    ports = Ports(*[UP] * flips_after, DOWN)
    monkeypatch.setattr(topology, "rdma_devices", ports)
    begin(TransferEngineTransport(Settings(unguarded_tcp=True)))
    assert ([("rdma", "mlx5_0")], 1) == (started, ports.looks)


@pytest.mark.parametrize(
    ("found", "settings", "usable"),
    [
        (UP, Settings(), True),
        (DOWN, Settings(), False),
        (DOWN, Settings(unguarded_tcp=True), True),
        (DOWN, Settings(rdma_devices="mlx5_0"), False),
    ],
)
def test_whether_it_can_run_takes_one_look(
    monkeypatch: pytest.MonkeyPatch,
    started: list[tuple[str, str]],
    found: RdmaDevice,
    settings: Settings,
    usable: bool,
) -> None:
    """Sysfs is slow where there are many devices."""
    ports = Ports(found)
    monkeypatch.setattr(topology, "rdma_devices", ports)
    available = TransferEngineTransport(settings).availability()
    assert (usable, 1) == (available.usable, ports.looks)


def test_a_named_device_that_is_down(monkeypatch: pytest.MonkeyPatch, started: list[tuple[str, str]]) -> None:
    """An image is not given over another one."""
    monkeypatch.setattr(topology, "rdma_devices", Ports(DOWN))
    with pytest.raises(DeviceDown, match="its port is DOWN"):
        export(TransferEngineTransport(Settings(rdma_devices="mlx5_0", unguarded_tcp=True)))
    assert [] == started
