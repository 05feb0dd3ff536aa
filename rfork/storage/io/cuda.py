"""Copies into CUDA tensors: page-locked staging, and copies that no kernel waits for."""

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
    """Copies of one `fill`, on a stream of its own for each device; see `Copier`."""

    def __init__(self, devices: Iterable[torch.device], settings: StorageSettings) -> None:
        """The copies begin after what the calling thread's current streams have been given by now."""
        self._direct_storage = DirectStorage.find(settings)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        for device in devices:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # Freshly allocated memory may still be written by kernels of whoever freed it.
            stream.wait_stream(torch.cuda.current_stream(device))
            self._streams[device] = stream
        if self._direct_storage is not None:
            # It asks no stream.
            for stream in self._streams.values():
                stream.synchronize()

    def read(self, block: ReadBlock, pieces: Sequence[tuple[int, torch.Tensor]]) -> bool:
        """See `Copier.read`: by GPUDirect Storage."""
        return self._direct_storage is not None and self._direct_storage.read(block, pieces)

    def copy(self, into: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> CopyHandle:
        """See `Copier.copy`."""
        stream = self._streams[into[0].device]
        try:
            with torch.cuda.stream(stream):
                # One call for all of a block: 20,000 small tensors cost 20,000 copies, but few steps here.
                torch._foreach_copy_(list(into), list(source), non_blocking=True)
                # One that sleeps, instead of keeping a core busy that reads could use.
                event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                event.record(stream)
        except BaseException:
            stream.synchronize()  # what was begun still reads the source
            raise
        return _CudaCopy(event)

    def close(self) -> None:
        """See `Copier.close`."""
        if self._direct_storage is not None:
            self._direct_storage.close()


class _CudaCopy:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


def pinned_staging(memory: int, buffer_bytes: int) -> BufferPool:
    """Staging that the GPU's copy engine reads by itself, in huge pages: disks write into these quickest."""
    pinned = _Pinned()
    return BufferPool(memory, buffer_bytes, pinned.make, pinned.free)


class _Pinned:
    """Page-locked memory: rfork's own where CUDA agrees to lock it, else the driver's. Thread-safe."""

    def __init__(self) -> None:
        self._registered: set[int] = set()

    def make(self, nbytes: int) -> torch.Tensor:
        memory = allocate_host(nbytes)
        code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, 0)  # type: ignore[no-untyped-call]
        if code == CUDA_SUCCESS:
            self._registered.add(memory.data_ptr())
            return memory
        with suppress(RuntimeError):
            # CUDA keeps the refusal, and would blame the next kernel for it: this one takes the blame.
            torch.zeros(1, device="cuda")
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def free(self, memory: torch.Tensor) -> None:
        if memory.data_ptr() in self._registered:
            self._registered.remove(memory.data_ptr())
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
