"""Images on a GPU: digests equal the CPU's, and bytes arrive in the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rfork.cuda.device import cuda_driver
from rfork.image.capture import image_from_tensors
from rfork.image.digest import LEAF_BYTES, digest_bytes, digest_plan, gpu_kernel, plan_of
from rfork.image.registration import regions_to_register

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]


def on_this_gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def kernel_digest(pieces: Sequence[torch.Tensor]) -> bytes:
    """Return the digest that the kernel computes for tensors on the GPU."""
    device, driver = on_this_gpu(), cuda_driver()
    hash_leaves = gpu_kernel(device).hash_leaves
    assert hash_leaves is not None
    driver.current_work(device.index).wait()
    with driver.on_device(device.index), driver.streams(device.index).digest.as_torch_stream():
        return digest_plan(plan_of(pieces, LEAF_BYTES), device, hash_leaves)


@pytest.mark.parametrize("length", [1, 240, 241, 1025, LEAF_BYTES, 3 * LEAF_BYTES + 77, 5 << 20])
def test_gpu_digest_is_the_cpu_digest(length: int) -> None:
    """A chunk has the same digest on GPU and CPU, whether or not the kernel is ready."""
    data = torch.randint(0, 256, (length,), dtype=torch.uint8)
    image = image_from_tensors({"a": data.cuda()})
    for _ in range(2):
        assert digest_bytes([memoryview(data.numpy().tobytes())]) == image.digest(0)
        gpu_kernel(on_this_gpu()).wait_until_ready()


@pytest.fixture
def kernel() -> None:
    """Compile the device's kernel, which is used afterwards."""
    pytest.importorskip("triton", reason="Triton is not installed: hashes are computed on the host")
    assert gpu_kernel(on_this_gpu()).wait_until_ready()


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("length", [1, 240, 241, 1025, 1088, LEAF_BYTES, LEAF_BYTES + 241, (9 << 20) + 77])
@pytest.mark.parametrize("shift", [0, 1, 4, 8])
def test_kernel_digest_is_the_cpu_digest(length: int, shift: int) -> None:
    """The kernel's hash equals the CPU's at any address."""
    data = torch.randint(0, 256, (length + shift,), dtype=torch.uint8)
    expected = digest_bytes([memoryview(data[shift:].numpy().tobytes())])
    assert expected == kernel_digest([data.cuda()[shift:]])


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("sizes", [[5, 3_000_000, 1, 400_000, 70], [131_072, 262_148, 65_536], [33_333] * 90])
def test_the_kernel_hashes_pieces(sizes: list[int]) -> None:
    """Leaves that span tensors are joined, others are read in place."""
    data = torch.randint(0, 256, (sum(sizes),), dtype=torch.uint8)
    pieces = [piece.cuda() for piece in torch.split(data, sizes)]
    assert digest_bytes([memoryview(data.numpy().tobytes())]) == kernel_digest(pieces)


@pytest.mark.usefixtures("kernel")
def test_concurrent_digests_do_not_interfere() -> None:
    """Many chunks, digested concurrently by threads, have the digests that each has alone."""
    chunks = [torch.randint(0, 256, ((2 << 20) + index,), dtype=torch.uint8) for index in range(24)]
    on_gpu = [chunk.cuda() for chunk in chunks]
    with ThreadPoolExecutor(6) as pool:
        assert [digest_bytes([memoryview(chunk.numpy().tobytes())]) for chunk in chunks] == list(
            pool.map(lambda chunk: kernel_digest([chunk]), on_gpu)
        )


@pytest.mark.usefixtures("kernel")
def test_odd_pieces_on_the_gpu() -> None:
    """Pieces at odd addresses and of odd lengths have the same bytes."""
    data = torch.randint(0, 256, (700_001,), dtype=torch.uint8)
    pieces = torch.split(data.cuda()[3:], [5, 130_000, 1, 400_000, 169_992])
    assert digest_bytes([memoryview(bytes(data[3:].tolist()))]) == kernel_digest(pieces)


def test_bytes_written_by_the_host_are_in_the_tensors() -> None:
    """Bytes written into staging are in the GPU tensors after the block, and are read back unchanged."""
    tensors = {"a": torch.zeros(1000, device="cuda"), "b": torch.zeros(77, dtype=torch.uint8, device="cuda")}
    image = image_from_tensors(tensors)
    expected = bytes(index % 251 for index in range(image.layout.image_bytes))
    with image.writable(0, len(expected)) as views:
        rest = expected
        for view in views:
            view[:], rest = rest[: view.nbytes], rest[view.nbytes :]
    with image.readable(0, len(expected)) as views:
        assert expected == b"".join(views)
    assert list(expected[4000:]) == tensors["b"].tolist()


def test_an_exception_writes_nothing() -> None:
    """A writable block that fails leaves GPU tensors unchanged."""
    tensor = torch.ones(64, dtype=torch.uint8, device="cuda")

    def write_and_fail() -> None:
        with image_from_tensors({"a": tensor}).writable(0, 64) as views:
            views[0][:] = bytes(64)
            raise ConnectionError

    with pytest.raises(ConnectionError):
        write_and_fail()
    assert 64 == int(tensor.sum())


def test_an_image_on_both_devices_is_one_image() -> None:
    """An image of CPU and GPU tensors has the manifest of the same image on the CPU."""
    mixed = {"a": torch.arange(300_000), "b": torch.arange(300_000, device="cuda")}
    image = image_from_tensors(mixed)
    on_cpu = image_from_tensors({name: tensor.cpu() for name, tensor in mixed.items()})
    assert on_cpu.manifest().weights_id == image.manifest().weights_id
    assert len(regions_to_register(image)) == 2
