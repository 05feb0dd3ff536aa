"""Work of rfork and CUDA graphs that another thread captures in global mode, as engines do, leave each other intact."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from itertools import cycle
from pathlib import Path

import pytest
import torch

from rfork.cuda.device import CopyOp
from rfork.image.capture import image_from_tensors
from rfork.image.memory import Image
from rfork.image.staging import pinned_memory
from rfork.settings import StorageSettings
from rfork.storage.io.reader import Extent, fill
from rfork.storage.local import LocalStore
from rfork.storage.location import Location
from rfork.transport.cuda_ipc.driver import IpcDriver, IpcHandle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]
ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
OWNER_BYTES = 4 * MIB
OWNER_FILL = 7
"""Byte of which the memory of another process consists."""
ROUNDS = 5
"""Times that each kind of work must complete while graphs are captured."""
TIME_LIMIT_S = 5.0
"""For each kind: all of them end within the time limit of their step, so one that fails is named."""


def filled_image() -> Image:
    """Return an image of one large tensor and several small ones, with random bytes."""
    sizes = [24 * MIB, *(1000 + index for index in range(50))]
    data = [torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda") for size in sizes]
    return image_from_tensors({f"t{index}": tensor for index, tensor in enumerate(data)})


def content(image: Image) -> bytes:
    """Return the bytes of an image."""
    with image.readable(0, image.layout.image_bytes) as views:
        return b"".join(views)


class OwnerProcess:
    """Another process with memory of cudaMalloc, which ends with `close`: its handle, and the memory's place in it."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise ChildProcessError("the owner has ended")
        handle, size, offset = line.split()
        self.handle, self.size, self.offset = IpcHandle(bytes.fromhex(handle)), int(size), int(offset)

    def close(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Work:
    """Kinds of rfork's work on a GPU. Each call raises AssertionError if its result is wrong.

    Calls that write use other bytes than the call before, so missing ones are found.
    """

    def __init__(self, folder: Path) -> None:
        self._image, self._target = filled_image(), filled_image()
        self._digests = self._image.manifest().digests
        self._bytes = content(self._image)
        self._contents = cycle([self._bytes, self._bytes.translate(bytes(range(255, -1, -1)))])
        self._file = folder / "data"
        self._device = torch.cuda.current_device()
        self._owner: OwnerProcess | None = None

    def close(self) -> None:
        """End the other process, if there is one."""
        if self._owner is not None:
            self._owner.close()

    def digest(self) -> None:
        """Digest every chunk."""
        assert self._digests == self._image.manifest().digests

    def read(self) -> None:
        """Copy the image to the host in steps."""
        with self._image.reading(0, len(self._bytes)) as steps:
            assert self._bytes == b"".join(b"".join(views) for views in steps)

    def write(self) -> None:
        """Copy bytes to an image in steps."""
        written, at = next(self._contents), 0
        with self._target.writing(0, len(written)) as steps:
            for views in steps:
                for view in views:
                    view[:] = written[at : at + view.nbytes]
                    at += view.nbytes
        assert written == content(self._target)

    def storage(self) -> None:
        """Read a file into device memory."""
        written, at = next(self._contents), 0
        self._file.write_bytes(written)
        settings, extents = StorageSettings(concurrency=2), list[Extent]()
        store = LocalStore(Location.parse(self._file.parent), settings)
        with closing(store.open(self._file.name)) as blob:
            for memory in self._target.tensor_slices(0, len(written)):
                extents.append(Extent(blob, at, memory))
                at += memory.numel()
            fill(extents, settings)
        assert written == content(self._target)

    def pin(self) -> None:
        """Page-lock host memory, write to it, and unlock it."""
        assert MIB == int(pinned_memory(MIB, self._device).fill_(1).sum())

    def copy(self) -> None:
        """Copy on a stream of cuda_ipc, from this process's own allocation."""
        memory, *_ = self._image.tensor_slices(0, MIB)
        stream, host = IpcDriver().copy_stream(self._device), pinned_memory(MIB, self._device)
        stream.copy([CopyOp(memory.data_ptr(), host.data_ptr(), MIB)])
        stream.record().wait()
        stream.close()
        assert self._bytes[:MIB] == host.numpy().tobytes()

    def open(self) -> None:
        """Open a legacy handle of another process's allocation, copy from it, and close it."""
        self._owner = owner = self._owner or OwnerProcess()
        driver, host = IpcDriver(), pinned_memory(OWNER_BYTES, self._device)
        host.zero_()
        opened, stream = driver.open(self._device, "legacy", owner.handle, owner.size), driver.copy_stream(self._device)
        try:
            stream.copy([CopyOp(opened.address + owner.offset, host.data_ptr(), OWNER_BYTES)])
            stream.record().wait()
        finally:
            stream.close()
            driver.close(opened)
        assert bytes([OWNER_FILL]) * OWNER_BYTES == host.numpy().tobytes()


KINDS = ("digest", "read", "write", "storage", "pin", "copy", "open")


def capture_once(value: float) -> None:
    """Capture a graph in global mode, replay it, and check its result."""
    source, graph = torch.full((1024,), value, device="cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        result = source
        for _ in range(200):  # so that the capture lasts for a while
            result = result + 1
    graph.replay()
    torch.cuda.synchronize()
    assert torch.full((1024,), value + 200, device="cuda").equal(result)


@pytest.mark.parametrize("kind", KINDS)
def test_a_capture_and_rfork_do_not_disturb_each_other(kind: str, tmp_path: Path) -> None:
    """Graphs are captured and replayed correctly while another thread works, whose results are right too."""
    with closing(Work(tmp_path)) as owned:
        work: Callable[[], None] = getattr(owned, kind)
        work()  # what is created once, before a capture
        capture_once(0)
        _capture_during(work)


def _capture_during(work: Callable[[], None]) -> None:
    """Capture graphs while another thread works; both must complete `ROUNDS` times."""
    done, errors, stop = [0], list[BaseException](), threading.Event()

    def repeat() -> None:
        try:
            while not stop.is_set():
                work()
                done[0] += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=repeat)
    thread.start()
    captures, until = 0, time.monotonic() + TIME_LIMIT_S
    try:
        while (captures < ROUNDS or done[0] < ROUNDS) and not errors and time.monotonic() < until:
            captures += 1
            capture_once(captures)
    finally:
        stop.set()
        thread.join()
    assert [] == errors
    assert captures >= ROUNDS
    assert done[0] >= ROUNDS


def _own_memory() -> None:
    """Main function of an owner's process: prints handle, size and offset, and keeps the memory until it is killed."""
    memory = torch.full((OWNER_BYTES,), OWNER_FILL, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    driver = IpcDriver()
    allocation = driver.allocation(torch.cuda.current_device(), memory.data_ptr())
    handle = driver.export(allocation)
    print(handle.data.hex(), allocation.size, memory.data_ptr() - allocation.base, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _own_memory()
