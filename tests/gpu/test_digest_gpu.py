"""Images on a GPU: digests equal the CPU's, and bytes arrive in the tensors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rfork.image.capture import image_from_tensors
from rfork.image.digest import LEAF_BYTES, digest_bytes, digest_tensors, leaf_hasher
from rfork.image.registration import regions_to_register

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]


@pytest.mark.parametrize("length", [1, 240, 241, 1025, LEAF_BYTES, 3 * LEAF_BYTES + 77, 5 << 20])
def test_gpu_digest_is_the_cpu_digest(length: int) -> None:
    """A chunk has the same digest on GPU and CPU."""
    data = torch.randint(0, 256, (length,), dtype=torch.uint8)
    assert digest_bytes([memoryview(bytes(data.tolist()))]) == digest_tensors([data.cuda()])


@pytest.fixture
def kernel() -> None:
    """Compile the device's kernel, which is used afterwards."""
    pytest.importorskip("triton", reason="Triton is not installed: hashes are computed on the host")
    assert leaf_hasher(torch.device("cuda", torch.cuda.current_device())).wait_until_ready()


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("length", [1, 240, 241, 1025, 1088, LEAF_BYTES, LEAF_BYTES + 241, (9 << 20) + 77])
@pytest.mark.parametrize("shift", [0, 1, 4, 8])
def test_kernel_digest_is_the_cpu_digest(length: int, shift: int) -> None:
    """The kernel's hash equals the CPU's at any address."""
    data = torch.randint(0, 256, (length + shift,), dtype=torch.uint8)
    expected = digest_bytes([memoryview(data[shift:].numpy().tobytes())])
    assert expected == digest_tensors([data.cuda()[shift:]])


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("sizes", [[5, 3_000_000, 1, 400_000, 70], [131_072, 262_148, 65_536], [33_333] * 90])
def test_the_kernel_hashes_pieces(sizes: list[int]) -> None:
    """Leaves that span tensors are joined, others are read in place."""
    data = torch.randint(0, 256, (sum(sizes),), dtype=torch.uint8)
    pieces = [piece.cuda() for piece in torch.split(data, sizes)]
    assert digest_bytes([memoryview(data.numpy().tobytes())]) == digest_tensors(pieces)


@pytest.mark.usefixtures("kernel")
def test_concurrent_digests_do_not_interfere() -> None:
    """Many chunks, digested concurrently by threads on their own streams, have the digests that each has
    alone.
    """
    chunks = [torch.randint(0, 256, ((2 << 20) + index,), dtype=torch.uint8) for index in range(24)]
    on_gpu = [chunk.cuda() for chunk in chunks]
    torch.cuda.synchronize()

    def digest(chunk: torch.Tensor) -> bytes:
        with torch.cuda.stream(torch.cuda.Stream()):
            return digest_tensors([chunk])

    with ThreadPoolExecutor(6) as pool:
        assert [digest_bytes([memoryview(chunk.numpy().tobytes())]) for chunk in chunks] == list(
            pool.map(digest, on_gpu)
        )


def test_odd_pieces_on_the_gpu() -> None:
    """Pieces at odd addresses and of odd lengths have the same bytes."""
    data = torch.randint(0, 256, (700_001,), dtype=torch.uint8)
    pieces = torch.split(data.cuda()[3:], [5, 130_000, 1, 400_000, 169_992])
    assert digest_bytes([memoryview(bytes(data[3:].tolist()))]) == digest_tensors(pieces)


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
