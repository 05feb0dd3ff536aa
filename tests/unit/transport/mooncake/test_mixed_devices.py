"""A model partly on the host and partly on a GPU: where most bytes lie says nothing of the others."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Sequence

import pytest
import torch

from rfork.errors import GpuDirectUnavailable, TransportUnavailable
from rfork.image.capture import image_from_tensors
from rfork.image.memory import Image
from rfork.image.registration import Region
from rfork.transport.mooncake import exporter as exporter_module
from rfork.transport.mooncake.engine import TransferState
from rfork.transport.mooncake.exporter import TransferEngineExporter
from rfork.transport.mooncake.read_plan import AddressMap
from rfork.transport.mooncake.reader import TransferEngineReader
from rfork.transport.mooncake.registration import register

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class MultiDeviceImage(Image):
    """An image in host memory some of which is said to lie on other devices."""

    image_devices = frozenset({CPU})

    @property
    def devices(self) -> frozenset[torch.device]:
        return self.image_devices


def image_on(image_devices: set[torch.device], value: int = 0) -> Image:
    """Sixteen small tensors near one another, which one read takes where they may be staged."""
    buffer = torch.full((16 * 128,), value, dtype=torch.uint8)
    plain = image_from_tensors({f"t{at:02}": buffer[at * 128 : at * 128 + 64] for at in range(16)})
    image = MultiDeviceImage(plain.layout, plain.regions)
    image.image_devices = frozenset(image_devices)
    return image


class FakeEngine:
    """Reads this process's own memory, at once. Registers nothing when it `fails`."""

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
def test_small_pieces_are_staged_in_host_memory_alone(image_devices: set[torch.device], reads: int) -> None:
    """The host cannot copy to a device's address: each piece is then a read of its own."""
    source, target, engine = image_on({CPU}, 7), image_on(image_devices), FakeEngine()
    size = source.layout.image_bytes
    remote = AddressMap(source.segments(0, size), size)
    reader = TransferEngineReader(engine, "session", remote, target, gather=True)  # type: ignore[arg-type]
    reader.read(0, size, math.inf)
    with target.readable(0, size) as views:
        assert (bytes([7]) * size, reads) == (b"".join(views), len(engine.reads))
    reader.close()


@pytest.mark.parametrize(("image_devices", "gather"), [({CPU}, "yes"), ({CPU, CUDA}, "no")])
def test_readers_are_told_whether_they_may_read_between_tensors(
    monkeypatch: pytest.MonkeyPatch, image_devices: set[torch.device], gather: str
) -> None:
    """On a device, what is near may be registered apart."""
    monkeypatch.setattr(exporter_module, "MooncakeEngine", lambda host, protocol, devices: FakeEngine())
    monkeypatch.setattr("rfork.image.registration.allocator_segments", list)
    exporter = TransferEngineExporter(image_on(image_devices), "127.0.0.1", "rdma", "mlx5_0")
    assert exporter.ready(time.monotonic() + 60)
    assert gather == exporter.endpoint().parameters["gather"]
    exporter.close()


@pytest.mark.parametrize(
    ("image_devices", "error"), [({CPU}, TransportUnavailable), ({CPU, CUDA}, GpuDirectUnavailable)]
)
def test_memory_of_a_gpu_that_is_not_registered(
    monkeypatch: pytest.MonkeyPatch, image_devices: set[torch.device], error: type[TransportUnavailable]
) -> None:
    """However little lies on a GPU, the hint is about reaching it."""
    monkeypatch.setattr("rfork.image.registration.allocator_segments", list)
    engine = FakeEngine(fails=True)
    with pytest.raises(TransportUnavailable, match="not registered") as raised:
        register(engine, image_on(image_devices), [(1, 1)])  # type: ignore[arg-type]
    assert (error, error is GpuDirectUnavailable) == (type(raised.value), "rfork doctor" in raised.value.hint)
