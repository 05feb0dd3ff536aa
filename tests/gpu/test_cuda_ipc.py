"""cuda_ipc on real GPUs between two processes: types of memory, process deaths, and cleanup."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from rfork.cuda.device import CopyOp
from rfork.errors import SourceError, SourceTimeout, SourceUnavailable
from rfork.image.capture import image_from_tensors
from rfork.image.memory import Image, Segment
from rfork.settings import InstanceSettings
from rfork.transport.base import Endpoint
from rfork.transport.cuda_ipc import CudaIpcTransport
from rfork.transport.cuda_ipc.allocations import allocations_of
from rfork.transport.cuda_ipc.driver import IpcDriver
from tests.transport_contract import TOKEN, FakeGate, content, soon

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
SIZES = [3, 4096, MIB, 17, *([8191] * 500), 70 * MIB + 5, 1]
SMALL = [50_000] * 20_000


def tensors_of(sizes: Sequence[int], device: str, *, filled: bool, on_host: Sequence[int]) -> Image:
    """Return an image of byte tensors on a device, except those with an index in `on_host`; zeros unless
    `filled`.
    """
    tensors: dict[str, torch.Tensor] = {}
    for index, size in enumerate(sizes):
        tensor_device = "cpu" if index in on_host else device
        if filled:
            line = torch.arange(size, dtype=torch.int64, device=tensor_device)
            tensors[f"t{index}"] = ((line * 7 + index * 13 + 1) % 251).to(torch.uint8)
        else:
            tensors[f"t{index}"] = torch.zeros(size, dtype=torch.uint8, device=tensor_device)
    return image_from_tensors(tensors)


class CudaIpcSourceProcess:
    """A seed process that exports an image until its standard input ends."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        device: int = 0,
        on_host: Sequence[int] = (),
        expandable: bool = False,
        visible: str = "",
    ) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        environment["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{expandable}"
        if visible:
            environment["CUDA_VISIBLE_DEVICES"] = visible
        wanted = json.dumps([list(sizes), f"cuda:{device}", list(on_host)])
        self.process = subprocess.Popen(
            [sys.executable, __file__, wanted],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        description = json.loads(self.read_line())
        segments = tuple(Segment(*segment) for segment in description["segments"])
        self.endpoint = Endpoint("cuda_ipc", description["parameters"], segments)
        self.handle_types = set(description["kinds"])

    def read_line(self) -> str:
        """Return the next line of its output."""
        line = self.process.stdout.readline() if self.process.stdout is not None else ""
        if not line:
            self.end()
            raise ChildProcessError("the source has ended")
        return line

    def close_exporter(self) -> None:
        """Close its exporter and wait for the confirmation."""
        if self.process.stdin is not None:
            self.process.stdin.write("close\n")
            self.process.stdin.flush()
        self.read_line()

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


StartSource = Callable[..., CudaIpcSourceProcess]


@pytest.fixture
def start() -> Iterator[StartSource]:
    """Start sources, which are killed after the test."""
    started: list[CudaIpcSourceProcess] = []

    def start(sizes: Sequence[int], **more: object) -> CudaIpcSourceProcess:
        started.append(CudaIpcSourceProcess(sizes, **more))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for source in started:
        source.end()


def expected(sizes: Sequence[int]) -> bytes:
    """Return the bytes of every source with these sizes."""
    return content(tensors_of(sizes, "cpu", filled=True, on_host=()))


def target_of(sizes: Sequence[int], device: str = "cuda:0", on_host: Sequence[int] = ()) -> Image:
    """Return a target image of zeros."""
    return tensors_of(sizes, device, filled=False, on_host=on_host)


@pytest.mark.parametrize("expandable", [False, True], ids=["cudaMalloc", "expandable-segments"])
@pytest.mark.parametrize("on_host", [[], [0, 3, 4, 20]], ids=["all-on-gpu", "some-in-host-memory"])
def test_every_byte_arrives(start: StartSource, expandable: bool, on_host: list[int]) -> None:
    """Both types of torch's memory are read correctly, together with tensors in host memory."""
    source, image = start(SIZES, expandable=expandable, on_host=on_host), target_of(SIZES)
    reader = CudaIpcTransport(InstanceSettings()).connect(source.endpoint, image, lambda: TOKEN, soon())
    reader.read(0, image.layout.image_bytes, soon())
    reader.close()
    assert expected(SIZES) == content(image)
    # Fabric handles are used if the machine has an IMEX channel.
    assert source.handle_types <= ({"descriptor", "fabric"} if expandable else {"legacy"})


def test_a_target_in_expandable_segments(start: StartSource) -> None:
    """A target whose tensors span many pieces of memory is filled correctly."""
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        image = target_of(SIZES)
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    source = start(SIZES)
    reader = CudaIpcTransport(InstanceSettings()).connect(source.endpoint, image, lambda: TOKEN, soon())
    reader.read(0, image.layout.image_bytes, soon())
    reader.close()
    assert expected(SIZES) == content(image)


def test_many_small_tensors(start: StartSource) -> None:
    """Twenty thousand tensors, read in chunks by four threads, arrive completely."""
    source, image = start(SMALL), target_of(SMALL)
    reader = CudaIpcTransport(InstanceSettings()).connect(source.endpoint, image, lambda: TOKEN, soon())
    image_bytes, step = image.layout.image_bytes, 16 * MIB
    ranges = [(at, min(at + step, image_bytes)) for at in range(0, image_bytes, step)]

    def read(share: Sequence[tuple[int, int]]) -> None:
        for begin, end in share:
            reader.read(begin, end, soon())

    threads = [threading.Thread(target=read, args=(ranges[index::4],)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader.close()
    assert expected(SMALL) == content(image)


def test_a_target_that_keeps_a_tensor_in_host_memory(start: StartSource) -> None:
    """Tensors on the source's GPU and in the target's host memory are copied to the host."""
    source, image = start(SIZES), target_of(SIZES, on_host=[2, 5])
    reader = CudaIpcTransport(InstanceSettings()).connect(source.endpoint, image, lambda: TOKEN, soon())
    reader.read(0, image.layout.image_bytes, soon())
    reader.close()
    assert expected(SIZES) == content(image)


def test_a_killed_source(start: StartSource) -> None:
    """Reads from a killed source raise, and this process's GPU keeps working."""
    source, image = start(SIZES), target_of(SIZES)
    reader = CudaIpcTransport(InstanceSettings()).connect(source.endpoint, image, lambda: TOKEN, soon())
    reader.read(0, MIB, soon())
    source.process.kill()
    source.process.wait()
    with pytest.raises(SourceError):
        reader.read(0, image.layout.image_bytes, soon())
    reader.close()
    assert 10 == int(torch.ones(10, device="cuda").sum())


def test_a_closed_source_releases_its_memory(start: StartSource) -> None:
    """After the exporter's `close`, nothing of it is mapped here, and reads raise SourceUnavailable."""
    source, image = start(SIZES), target_of(SIZES)
    reader = CudaIpcTransport(InstanceSettings()).connect(source.endpoint, image, lambda: TOKEN, soon())
    reader.read(0, image.layout.image_bytes, soon())
    source.close_exporter()
    with pytest.raises(SourceUnavailable):
        reader.read(0, MIB, soon())
    reader.close()


@pytest.mark.parametrize("expandable", [False, True], ids=["cudaMalloc", "expandable-segments"])
def test_nothing_is_left_mapped(start: StartSource, expandable: bool) -> None:
    """Readers that connect and disconnect leave no memory of this device allocated."""
    source, image = start(SIZES, expandable=expandable), target_of(SIZES)
    free: list[int] = []
    for _ in range(4):
        reader = CudaIpcTransport(InstanceSettings()).connect(source.endpoint, image, lambda: TOKEN, soon())
        reader.read(0, image.layout.image_bytes, soon())
        reader.close()
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info(0)[0])
    # The first one loads what the driver keeps.
    assert max(free[1:]) - min(free[1:]) < 4 * MIB


def test_a_deadline_that_has_passed(start: StartSource) -> None:
    """No byte is copied after the deadline."""
    source, image = start(SIZES), target_of(SIZES)
    reader = CudaIpcTransport(InstanceSettings()).connect(source.endpoint, image, lambda: TOKEN, soon())
    with pytest.raises(SourceTimeout):
        reader.read(0, MIB, soon(-1.0))
    reader.close()
    assert bytes(image.layout.image_bytes) == content(image)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("visible", ["", "1"], ids=["all-visible", "each-sees-its-own"])
@pytest.mark.parametrize("expandable", [False, True], ids=["cudaMalloc", "expandable-segments"])
def test_from_one_gpu_to_another(start: StartSource, visible: str, expandable: bool) -> None:
    """A source on the second GPU is read into the first one, whether or not the source sees the first one."""
    driver = IpcDriver()
    if not driver.can_access_peer(0, 1):
        pytest.skip("these two GPUs are not peers")
    source = start(SIZES, device=0 if visible else 1, visible=visible, expandable=expandable)
    image = target_of(SIZES)
    reader = CudaIpcTransport(InstanceSettings()).connect(source.endpoint, image, lambda: TOKEN, soon())
    reader.read(0, image.layout.image_bytes, soon())
    reader.close()
    assert expected(SIZES) == content(image)


# -- the driver alone ---------------------------------------------------------------------------


def test_devices_have_names() -> None:
    """Each device is found by its UUID, and no device by another name."""
    driver = IpcDriver()
    count = torch.cuda.device_count()
    assert list(range(count)) == [driver.device_index(driver.uuid(device)) for device in range(count)]
    assert driver.device_index("00" * 16) is None


def test_allocations_hold_their_tensors() -> None:
    """The found allocations contain the bytes of every tensor, and are few."""
    driver, image = IpcDriver(), target_of([4096] * 1000)
    areas = allocations_of(driver, image)
    for address, length in zip(image.regions.addresses, image.regions.lengths, strict=True):
        assert areas.index(address) is not None
        assert areas.index(address + length - 1) is not None
    assert len(areas.table) < 100


def test_copies_leave_the_thread_as_it_was() -> None:
    """Copies do not change the thread's current device, and do not wait for its streams."""
    driver = IpcDriver()
    one, two = torch.arange(1000, device="cuda"), torch.zeros(1000, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.current_device()
    stream = driver.copy_stream(0)
    stream.copy([CopyOp(one.data_ptr(), two.data_ptr(), one.nbytes)])
    while not stream.done():
        pass
    stream.close()
    assert before == torch.cuda.current_device()
    assert torch.equal(one, two)


def test_queries_do_not_break_a_graph_capture() -> None:
    """Queries to the driver on one thread do not break a graph capture on another."""
    driver, image = IpcDriver(), target_of(SIZES)
    found: list[int] = []
    line = torch.zeros(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()

    def query_driver() -> None:
        areas = allocations_of(driver, image)
        handles = [driver.export(area) for area in areas.table if area.handle_type == "legacy"]
        stream = driver.copy_stream(0)
        found.append(len(handles) + stream.done())
        stream.close()

    with torch.cuda.graph(graph, capture_error_mode="global"):
        line += 1
        thread = threading.Thread(target=query_driver)
        thread.start()
        thread.join()
    graph.replay()
    torch.cuda.synchronize()
    assert 1 == len(found)
    assert 1000 == int(line.sum())


def _serve(sizes: Sequence[int], device: str, on_host: Sequence[int]) -> None:
    """Main function of the source's process."""
    image = tensors_of(sizes, device, filled=True, on_host=on_host)
    exporter = CudaIpcTransport(InstanceSettings()).export(image, FakeGate())
    endpoint = exporter.endpoint()
    description = {
        "parameters": dict(endpoint.parameters),
        "segments": [list(segment) for segment in endpoint.segments],
        "kinds": sorted({area.handle_type for area in allocations_of(IpcDriver(), image).table}),
    }
    print(json.dumps(description), flush=True)
    for _ in sys.stdin:
        exporter.close()
        print("closed", flush=True)


if __name__ == "__main__":
    _serve(*json.loads(sys.argv[1]))
