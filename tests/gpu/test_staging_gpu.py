"""Bytes of GPU tensors through the host: two concurrent steps, and forks between two processes over http."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from rfork.image.capture import image_from_tensors
from rfork.image.digest import gpu_kernel
from rfork.image.memory import Image
from rfork.image.staging import STEP_BYTES
from rfork.settings import InstanceSettings
from rfork.transport.base import Endpoint
from rfork.transport.http import HttpTransport
from tests.transport_contract import TOKEN, FakeGate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]

ROOT = Path(__file__).parents[2]
SIZES = (5 * STEP_BYTES + 3, 77, 3 * STEP_BYTES - 1)
SECONDS = 60.0


def noise(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


def on_gpu(*, filled: bool) -> tuple[Image, dict[str, torch.Tensor]]:
    """Return an image of three GPU tensors and one CPU tensor: the same noise each time, or zeros."""
    tensors = {
        f"t{index}": (noise(size) if filled else torch.zeros(size, dtype=torch.uint8)).cuda()
        for index, size in enumerate(SIZES)
    }
    tensors["t9_on_host"] = noise(1000) if filled else torch.zeros(1000, dtype=torch.uint8)
    return image_from_tensors(tensors), tensors


def content(tensors: dict[str, torch.Tensor]) -> bytes:
    return b"".join(tensor.cpu().numpy().tobytes() for tensor in tensors.values())


@pytest.mark.parametrize("step", [1 << 20, STEP_BYTES, 3_000_001, 1 << 30])
def test_steps_are_the_bytes_of_the_tensors(step: int) -> None:
    """For every step size, reads return the tensors' bytes, and writes change them."""
    source, tensors = on_gpu(filled=True)
    target, zeros = on_gpu(filled=False)
    size = source.layout.image_bytes
    with source.reading(0, size, step) as read, target.writing(0, size, step) as written:
        for views, destinations in zip(read, written, strict=True):
            for view, destination in zip(views, destinations, strict=True):
                destination[:] = view
    assert content(tensors) == content(zeros)
    assert [source.digest(chunk) for chunk in range(3)] == [target.digest(chunk) for chunk in range(3)]


def test_a_failed_step_leaves_the_rest_unchanged() -> None:
    """Earlier steps are in the tensors, the failed one is not, and the image remains usable."""
    image, tensors = on_gpu(filled=False)

    def write_and_fail() -> None:
        with image.writing(0, 4 * STEP_BYTES) as steps:
            for number in range(3):
                (view,) = next(steps)
                view[:] = bytes([7]) * STEP_BYTES
                if number == 2:
                    raise ConnectionError

    with pytest.raises(ConnectionError):
        write_and_fail()
    first = tensors["t0"].cpu()
    assert 2 * STEP_BYTES * 7 == int(first[: 2 * STEP_BYTES].sum())
    assert 0 == int(first[2 * STEP_BYTES :].sum())
    with contextlib.suppress(ConnectionError), image.reading(0, image.layout.image_bytes) as steps:
        next(steps)
        raise ConnectionError
    with image.readable(0, 2 * STEP_BYTES) as views:
        assert bytes([7]) * 2 * STEP_BYTES == b"".join(views)


def test_a_copy_waits_for_no_kernel() -> None:
    """Bytes are read and digested while the engine's stream has seconds of queued work."""
    image, tensors = on_gpu(filled=True)
    expected = content(tensors)
    gpu_kernel(tensors["t0"].device).wait_until_ready()
    for _ in range(2):  # create everything first whose creation may wait for the device
        image.digest(0)
        with image.readable(0, image.layout.image_bytes):
            pass
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 32)
    busy = torch.cuda.Event()
    busy.record()
    with image.readable(0, image.layout.image_bytes) as views:
        found = b"".join(views)
    image.digest(0)
    still_busy = not busy.query()
    torch.cuda.synchronize()
    assert still_busy
    assert expected == found


def test_many_threads_share_an_image() -> None:
    """Eight threads read their own ranges concurrently."""
    image, tensors = on_gpu(filled=True)
    expected, size = content(tensors), image.layout.image_bytes
    found: dict[int, bytes] = {}

    def read(begin: int) -> None:
        with image.reading(begin, min(begin + 5_000_000, size)) as steps:
            found[begin] = b"".join(bytes(view) for views in steps for view in views)

    threads = [threading.Thread(target=read, args=(begin,)) for begin in range(0, size, 5_000_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert expected == b"".join(found[begin] for begin in sorted(found))


def serve() -> None:
    """Main function of the other process: export the image, print the endpoint, and end with standard input."""
    exporter = HttpTransport(InstanceSettings()).export(on_gpu(filled=True)[0], FakeGate())
    parameters = exporter.endpoint().parameters
    print(parameters["url"], parameters["etag"], flush=True)
    sys.stdin.read()
    exporter.close()


def test_http_from_gpu_to_gpu_in_two_processes() -> None:
    """A target in this process receives the tensors of a source in another process, with equal digests."""
    source = subprocess.Popen(
        [sys.executable, "-c", "from tests.gpu.test_staging_gpu import serve; serve()"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert source.stdin is not None
    assert source.stdout is not None
    try:
        url, etag = source.stdout.readline().split()
        image, tensors = on_gpu(filled=False)
        endpoint = Endpoint("http", {"url": url, "etag": etag})
        until = time.monotonic() + SECONDS
        reader = HttpTransport(InstanceSettings()).connect(endpoint, image, lambda: TOKEN, until)
        for begin, end in image.layout.chunks:
            reader.read(begin, end, until)
        reader.close()
        expected_image, expected = on_gpu(filled=True)
        assert content(expected) == content(tensors)
        assert expected_image.manifest().weights_id == image.manifest().weights_id
    finally:
        source.stdin.close()
        try:
            source.wait(SECONDS)
        except subprocess.TimeoutExpired:
            source.kill()
            source.wait()
        source.stdout.close()
