"""Copies into CUDA tensors: page-locked staging, on streams that no kernel waits for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch

from rfork.settings import StorageSettings
from rfork.storage.io.device_writer import CopyHandle
from rfork.storage.io.extents import ReadBlock
from rfork.storage.io.gds import DirectStorage
from rfork.storage.io.staging import BufferPool, allocate_host

CUDA_SUCCESS = 0


class CudaBlockCopier:
    """Copies of one `fill`, on a dedicated stream for each device; see `BlockCopier`."""

    def __init__(self, devices: Iterable[torch.device], settings: StorageSettings) -> None:
        """Copies begin after all work queued so far on the calling thread's current streams."""
        self._direct_storage = DirectStorage.find(settings)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        for device in devices:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # Kernels of the previous owner may still write to freshly allocated memory.
            stream.wait_stream(torch.cuda.current_stream(device))
            self._streams[device] = stream
        if self._direct_storage is not None:
            # GPUDirect Storage does not synchronise with streams.
            for stream in self._streams.values():
                stream.synchronize()

    def read(self, block: ReadBlock, pieces: Sequence[tuple[int, torch.Tensor]]) -> bool:
        """See `BlockCopier.read`: uses GPUDirect Storage."""
        return self._direct_storage is not None and self._direct_storage.read(block, pieces)

    def copy(self, into: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> CopyHandle:
        """See `BlockCopier.copy`."""
        stream = self._streams[into[0].device]
        try:
            with torch.cuda.stream(stream):
                # One call for the complete block: 20,000 small tensors are still 20,000 copies, but few
                # Python calls.
                torch._foreach_copy_(list(into), list(source), non_blocking=True)
                # A blocking event sleeps instead of spinning on a core that reads could use.
                event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                event.record(stream)
        except BaseException:
            stream.synchronize()  # copies in progress still read the source
            raise
        return _CudaCopy(event)

    def close(self) -> None:
        """See `BlockCopier.close`."""
        if self._direct_storage is not None:
            self._direct_storage.close()


class _CudaCopy:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


def pinned_staging(memory: int, buffer_bytes: int) -> BufferPool:
    """Return page-locked staging in huge pages: the GPU's copy engine reads it directly, and disks write
    fastest to it.
    """
    pinned = _Pinned()
    return BufferPool(memory, buffer_bytes, pinned.make, pinned.free)


class _Pinned:
    """Allocates page-locked memory: registered with CUDA where that succeeds, otherwise from the driver.
    Thread-safe.
    """

    def __init__(self) -> None:
        self._registered: set[int] = set()

    def make(self, nbytes: int) -> torch.Tensor:
        memory = allocate_host(nbytes)
        code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, 0)  # type: ignore[no-untyped-call]
        if code == CUDA_SUCCESS:
            self._registered.add(memory.data_ptr())
            return memory
        with suppress(RuntimeError):
            # CUDA keeps the error and would report it at the next kernel launch: let this one absorb it.
            torch.zeros(1, device="cuda")
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def free(self, memory: torch.Tensor) -> None:
        if memory.data_ptr() in self._registered:
            self._registered.remove(memory.data_ptr())
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
