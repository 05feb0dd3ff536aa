"""Images in device memory on the strict fake driver: reading, writing and digesting touch it by copies alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import nn

from rfork.cuda.device import TorchDevices, cuda_driver
from rfork.cuda.library import DriverError
from rfork.errors import SourceWeightsChanged
from rfork.image.capture import capture
from rfork.image.chunks import MIB
from rfork.image.memory import Image, compute_manifest, image_sha256
from rfork.image.staging import CudaCopier, pinned_memory
from tests.fake_libcuda.fake_gpu import CopyFailure, FakeGpu
from tests.fake_libcuda.images import Kind, device_bytes, device_image, move_to_device, pattern, patterns

SIZES = (3 * MIB + 17, 5, 4096, 1001, 2 * MIB, 0, MIB)
MEMORIES: dict[str, dict[str, object]] = {
    "legacy": {},
    "expandable": {"kind": "expandable"},
    "some on the host": {"on_host": [1, 4]},
    "two devices": {"device": [0, 1, 0, 1, 1, 0, 0], "on_host": [1]},
    "another device": {"device": 1},
}


def make_image(gpu: FakeGpu, memory: str, *, filled: bool = False) -> Image:
    """Return an image of these sizes in one of the memories."""
    return device_image(gpu, SIZES, filled=filled, **MEMORIES[memory])  # type: ignore[arg-type]


DATA = patterns(SIZES)


@pytest.fixture(params=[False, True], ids=["", "captured"])
def gpu(request: pytest.FixtureRequest, fake_gpu: FakeGpu) -> FakeGpu:
    """The fake driver, also while another thread captures a CUDA graph in global mode."""
    fake_gpu.library.fake_set_capturing(request.param)
    return fake_gpu


@pytest.mark.parametrize("memory", MEMORIES)
def test_every_byte_is_read(gpu: FakeGpu, memory: str) -> None:
    """Steps and single reads have the image's bytes."""
    image, data = make_image(gpu, memory, filled=True), DATA
    with image.reading(3, len(data) - 1, 700_001) as steps:
        assert data[3:-1] == b"".join(b"".join(views) for views in steps)
    with image.readable(0, len(data)) as views:
        assert data == b"".join(views)


@pytest.mark.parametrize("memory", MEMORIES)
def test_every_byte_is_written(gpu: FakeGpu, memory: str) -> None:
    """Filled steps are in the tensors when the pass ends, and bytes outside the range keep their values."""
    image, data = make_image(gpu, memory), DATA
    with image.writing(5, len(data) - 3, 600_001) as steps:
        at = 5
        for views in steps:
            for view in views:
                view[:] = data[at : at + view.nbytes]
                at += view.nbytes
    assert bytes(5) + data[5:-3] + bytes(3) == device_bytes(gpu, image)
    with image.writable(0, 5) as views:
        at = 0
        for view in views:
            view[:] = data[at : at + view.nbytes]
            at += view.nbytes
    assert data[:-3] + bytes(3) == device_bytes(gpu, image)


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_manifest_equals_that_of_host_memory(gpu: FakeGpu, memory: str) -> None:
    """Without a hash kernel, the host hashes the bytes in pinned buffers."""
    image = make_image(gpu, memory, filled=True)
    on_host = device_image(gpu, SIZES, filled=True, on_host=range(len(SIZES)))
    assert on_host.devices == {torch.device("cpu")}
    assert on_host.manifest().digests == compute_manifest(image).digests
    assert image_sha256(on_host) == image_sha256(image)


def test_only_the_image_s_devices_get_a_context(fake_gpu: FakeGpu) -> None:
    """An image on GPU 1 is read, written and digested without a context on GPU 0."""
    image = make_image(fake_gpu, "another device", filled=True)
    compute_manifest(image)
    with image.writing(0, 1000) as steps:
        list(steps)
    assert {1} == fake_gpu.contexts


@pytest.mark.parametrize("when", [CopyFailure.AT_QUEUE, CopyFailure.AT_QUERY])
@pytest.mark.parametrize("writes", [False, True], ids=["reading", "writing"])
def test_a_failing_copy_is_raised(fake_gpu: FakeGpu, when: CopyFailure, writes: bool) -> None:
    """A pass over a device that fails raises the driver's error."""
    image = make_image(fake_gpu, "legacy")
    end = image.layout.image_bytes

    def walk() -> None:
        with image.writing(0, end) if writes else image.reading(0, end) as steps:
            list(steps)

    with fake_gpu.failing_copies(when), pytest.raises(DriverError, match="illegal memory access"):
        walk()


def test_writes_begin_after_the_engine_s_work(fake_gpu: FakeGpu) -> None:
    """A kernel of the memory's previous owner that still runs cannot overwrite the new bytes."""
    image = device_image(fake_gpu, [4096])
    other = fake_gpu.allocate(4096)
    fake_gpu.write(other, b"o" * 4096)
    driver, (tensor,) = cuda_driver(), image.tensor_slices(0, 4096)
    stream, copy = TorchDevices.current_stream(0), driver.library.function("cuMemcpyAsync")
    host = pinned_memory(4096, 0)
    host.copy_(torch.frombuffer(bytearray(pattern(0, 4096)), dtype=torch.uint8))
    for _ in range(16):  # each order of unordered copies is equally likely
        with driver.on_device(0), fake_gpu.paused_copies():
            assert 0 == copy(tensor.data_ptr(), other.data_ptr(), 4096, stream)
            copying = CudaCopier([torch.device("cuda", 0)]).host_to_device([tensor], [host])
        copying.wait()
        with driver.on_device(0):
            driver.library.call("cuStreamSynchronize", stream)
        found = fake_gpu.read(tensor)  # not in the assertion: a failure would print the tensor, and so crash
        assert pattern(0, 4096) == found


def test_concurrent_first_uses_share_one_set_of_streams(fake_gpu: FakeGpu) -> None:
    """Threads that need a device's streams at the same time get the same ones, and no others remain."""
    fake_gpu.allocate(1)
    driver, threads = cuda_driver(), 8
    barrier = Barrier(threads)

    def first_use(_: int) -> object:
        barrier.wait()
        return driver.streams(0)

    with ThreadPoolExecutor(threads) as pool:
        assert 1 == len({id(streams) for streams in pool.map(first_use, range(threads))})


class Model(nn.Module):
    """Tied weights, a buffer that no checkpoint contains, and mixed types."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one = nn.Linear(60, 70)
        self.two = nn.Linear(60, 70)
        self.two.weight = self.one.weight
        self.scale = nn.Parameter(torch.randn(7, 9).bfloat16(), requires_grad=False)
        self.register_buffer("table", torch.randn(9), persistent=False)


@pytest.mark.parametrize("kind", ["legacy", "expandable"])
def test_capture_reads_no_byte_of_a_tensor(fake_gpu: FakeGpu, kind: Kind) -> None:
    """Capture of a module on a GPU neither accesses its memory nor copies, and finds the host's layout."""
    on_host = capture(Model())
    image = capture(move_to_device(fake_gpu, Model(), kind=kind))
    assert 0 == fake_gpu.completed_copies
    assert on_host.layout.layout_id == image.layout.layout_id
    assert on_host.manifest().digests == image.manifest().digests
    assert [torch.device("cuda", 0)] == image.gpus


def test_concurrent_passes_share_the_streams(fake_gpu: FakeGpu) -> None:
    """Many threads read and write one image with copies in random order."""
    for seed in range(3):
        fake_gpu.set_seed(seed, 300)
        source, target = make_image(fake_gpu, "legacy", filled=True), make_image(fake_gpu, "expandable")

        def transfer(begin: int, source: Image = source, target: Image = target) -> None:
            end = min(begin + 200_001, source.layout.image_bytes)
            with source.readable(begin, end) as views:
                data = b"".join(views)
            with target.writable(begin, end) as views:
                at = 0
                for view in views:
                    view[:] = data[at : at + view.nbytes]
                    at += view.nbytes

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(transfer, range(0, source.layout.image_bytes, 200_001)))
        assert DATA == device_bytes(fake_gpu, target)


def test_released_memory_is_left_to_its_owner(fake_gpu: FakeGpu) -> None:
    """Borrowed device memory is neither resized nor accessed by a release."""
    image = make_image(fake_gpu, "legacy", filled=True)
    image.release()
    with pytest.raises(SourceWeightsChanged):
        image.digest(0)
