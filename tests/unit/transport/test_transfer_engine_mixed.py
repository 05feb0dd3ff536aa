"""A model partly on the host and partly on a GPU: where most bytes lie says nothing of the others."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Sequence

import pytest
import torch

from rfork.errors import NoGpuDirect, TransportUnusable
from rfork.image.areas import Area
from rfork.image.capture import image_of
from rfork.image.memory import Image
from rfork.transport.transfer_engine import exporter as exporter_module
from rfork.transport.transfer_engine.engine import TransferState
from rfork.transport.transfer_engine.exporter import TransferEngineExporter
from rfork.transport.transfer_engine.plan import AddressMap
from rfork.transport.transfer_engine.reader import TransferEngineReader
from rfork.transport.transfer_engine.registering import register

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class PlacedImage(Image):
    """An image in host memory some of which is said to lie on other devices."""

    places = frozenset({CPU})

    @property
    def devices(self) -> frozenset[torch.device]:
        return self.places


def image_on(places: set[torch.device], value: int = 0) -> Image:
    """Sixteen small tensors near one another, which one read takes where they may be staged."""
    buffer = torch.full((16 * 128,), value, dtype=torch.uint8)
    plain = image_of({f"t{at:02}": buffer[at * 128 : at * 128 + 64] for at in range(16)})
    image = PlacedImage(plain.layout, plain.regions)
    image.places = frozenset(places)
    return image


class FakeEngine:
    """Reads this process's own memory, at once. Registers nothing when it `fails`."""

    session = "127.0.0.1:1"
    protocol = "rdma"

    def __init__(self, *, fails: bool = False) -> None:
        self.reads: list[int] = []
        self._fails = fails

    def register(self, areas: Sequence[Area]) -> None:
        if self._fails:
            raise TransportUnusable("not registered", hint="ulimit -l unlimited")

    def start_read(self, session: str, local: int, remote: int, length: int) -> int:
        ctypes.memmove(local, remote, length)
        self.reads.append(length)
        return len(self.reads)

    def state(self, read: int) -> TransferState:
        return TransferState.DONE

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("places", "reads"), [({CPU}, 1), ({CPU, CUDA}, 16)])
def test_small_pieces_are_staged_in_host_memory_alone(places: set[torch.device], reads: int) -> None:
    """The host cannot copy to a device's address: each piece is then a read of its own."""
    source, target, engine = image_on({CPU}, 7), image_on(places), FakeEngine()
    size = source.layout.image_bytes
    remote = AddressMap(source.segments(0, size), size)
    reader = TransferEngineReader(engine, "session", remote, target, gather=True)  # type: ignore[arg-type]
    reader.read(0, size, math.inf)
    with target.readable(0, size) as views:
        assert (bytes([7]) * size, reads) == (b"".join(views), len(engine.reads))
    reader.close()


@pytest.mark.parametrize(("places", "gather"), [({CPU}, "yes"), ({CPU, CUDA}, "no")])
def test_readers_are_told_whether_they_may_read_between_tensors(
    monkeypatch: pytest.MonkeyPatch, places: set[torch.device], gather: str
) -> None:
    """On a device, what is near may be registered apart."""
    monkeypatch.setattr(exporter_module, "Engine", lambda host, protocol, devices: FakeEngine())
    monkeypatch.setattr("rfork.image.areas.allocator_segments", list)
    giving = TransferEngineExporter(image_on(places), "127.0.0.1", "rdma", "mlx5_0")
    assert giving.ready(time.monotonic() + 60)
    assert gather == giving.endpoint().parameters["gather"]
    giving.close()


@pytest.mark.parametrize(("places", "error"), [({CPU}, TransportUnusable), ({CPU, CUDA}, NoGpuDirect)])
def test_memory_of_a_gpu_that_is_not_registered(
    monkeypatch: pytest.MonkeyPatch, places: set[torch.device], error: type[TransportUnusable]
) -> None:
    """However little lies on a GPU, the hint is about reaching it."""
    monkeypatch.setattr("rfork.image.areas.allocator_segments", list)
    engine = FakeEngine(fails=True)
    with pytest.raises(TransportUnusable, match="not registered") as raised:
        register(engine, image_on(places), [(1, 1)])  # type: ignore[arg-type]
    assert (error, error is NoGpuDirect) == (type(raised.value), "rfork doctor" in raised.value.hint)
