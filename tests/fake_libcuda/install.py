"""Installation of the fake driver into this process: memory of `FakeGpu.allocate` is device memory to rfork."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest

from rfork.cuda import library
from rfork.cuda.device import CudaStream, TorchDevices, cuda_driver
from rfork.image import digest
from rfork.image.digest import GpuKernel
from tests.fake_libcuda.fake_gpu import FakeGpu


class EngineStreams:
    """The streams on which torch's operations run, one for each device: never the legacy stream."""

    def __init__(self) -> None:
        self._streams: dict[int, CudaStream] = {}

    def current_stream(self, index: int) -> int:
        """Return the handle of a device's stream; see `TorchDevices.current_stream`."""
        if index not in self._streams:
            self._streams[index] = CudaStream(cuda_driver(), index)
        return self._streams[index].handle

    def close(self) -> None:
        """Destroy the streams."""
        for stream in self._streams.values():
            stream.close()


def _without_kernel(self: GpuKernel) -> None:
    """Leave a device without a hash kernel: the fake runs no kernels."""


def _replace(patch: pytest.MonkeyPatch, gpu: FakeGpu, streams: EngineStreams) -> None:
    patch.setattr(library, "LIBRARY_PATH", gpu.path)
    patch.setattr(TorchDevices, "has_gpu", lambda: True)
    patch.setattr(TorchDevices, "device_of", gpu.device_of)
    patch.setattr(TorchDevices, "current_stream", streams.current_stream)
    patch.setattr(GpuKernel, "_prepare", _without_kernel)


@contextlib.contextmanager
def installed() -> Iterator[FakeGpu]:
    """Within the context, rfork uses the fake driver. At its end, all that rfork should have released must be."""
    gpu, streams = FakeGpu(), EngineStreams()
    gpu.reset()
    with pytest.MonkeyPatch.context() as patch:
        _replace(patch, gpu, streams)
        cuda_driver.cache_clear()
        digest._kernel_of.cache_clear()
        gc.collect()  # of earlier tests
        before = gpu.open_handles
        try:
            yield gpu
            gpu.check()
            streams.close()
            _close_driver()
            gc.collect()
            left = {name: count - before.get(name, 0) for name, count in gpu.open_handles.items()}
            assert {} == {name: count for name, count in left.items() if count > 0}
        finally:
            gpu.free_all()
            gpu.reset()
            cuda_driver.cache_clear()
            digest._kernel_of.cache_clear()


def _close_driver() -> None:
    """Destroy the streams that the driver keeps until its process ends."""
    if not cuda_driver.cache_info().currsize:
        return
    for streams in cuda_driver()._streams.values():
        streams.close()


def install() -> FakeGpu:
    """Let rfork use the fake driver until this process ends. Its errors are in the file named by FAKE_CUDA_LOG."""
    gpu = FakeGpu()
    _replace(pytest.MonkeyPatch(), gpu, EngineStreams())
    return gpu
