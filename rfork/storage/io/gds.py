"""GPUDirect Storage: reads local files directly into GPU memory, if kvikio and the machine support it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

import torch

from rfork.cuda.device import on_device
from rfork.errors import StorageError
from rfork.logs import logger
from rfork.settings import StorageSettings
from rfork.storage.io.extents import ReadBlock
from rfork.storage.local import LocalFile

log = logger(__name__)


class CuFileHandle(Protocol):
    """The part of `kvikio.CuFile` that is used."""

    def raw_read(self, buf: torch.Tensor, size: int, file_offset: int) -> int:
        """Read into device memory on the calling thread; return the number of bytes."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class CuFileLibrary(Protocol):
    """Library that opens files; `kvikio`."""

    def CuFile(self, file: str, flags: str) -> CuFileHandle:
        """Open a file."""
        ...


class DirectStorage:
    """Reads blocks of local files into CUDA tensors. Thread-safe. Belongs to one `fill` and is closed with
    it.
    """

    def __init__(self, library: CuFileLibrary) -> None:
        self._library = library
        self._lock = threading.Lock()
        self._handles: dict[LocalFile, CuFileHandle] = {}
        self._opened = ExitStack()
        self._broken = False

    @classmethod
    def find(cls, settings: StorageSettings) -> DirectStorage | None:
        """Return an instance, or None if this machine does not support it or the settings forbid it."""
        if settings.direct_io == "never":
            return None
        try:
            import kvikio
            import kvikio.cufile_driver

            if not kvikio.cufile_driver.get("is_gds_available"):
                log.debug("no GPUDirect Storage", reason="not available according to the driver")
                return None
        except (ImportError, AttributeError, RuntimeError) as error:
            log.debug("no GPUDirect Storage", reason=str(error))
            return None
        return cls(kvikio)

    def read(self, block: ReadBlock, pieces: Sequence[tuple[int, torch.Tensor]]) -> bool:
        """See `BlockCopier.read`; also returns False for blobs that are not local files, and for cached
        ranges.
        """
        file = block.blob
        if self._broken or not isinstance(file, LocalFile) or file.cached(block.begin, block.end - block.begin):
            return False
        try:
            with file.reading() as descriptor, on_device(block.device):
                handle = self._handle(file, descriptor)
                for offset, into in pieces:
                    count = handle.raw_read(into, into.numel(), offset)
                    if count != into.numel():
                        raise StorageError(f"{file.path} ends before byte {offset + into.numel()}")
        except RuntimeError as error:
            # Any failure of cuFile. If the file is the cause, the read through host memory reports the error.
            self._broken = True
            log.debug("no GPUDirect Storage", reason=str(error))
            return False
        return True

    def close(self) -> None:
        """Close the files. Call only when no read is in progress."""
        self._opened.close()

    def _handle(self, file: LocalFile, descriptor: int) -> CuFileHandle:
        with self._lock:
            handle = self._handles.get(file)
            if handle is None:
                # Open by descriptor: the name may refer to another file by now.
                handle = self._library.CuFile(f"/proc/self/fd/{descriptor}", "r")
                self._opened.callback(handle.close)
                self._handles[file] = handle
            return handle
