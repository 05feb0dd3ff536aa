"""GPUDirect Storage: local files straight into GPU memory, where kvikio and the machine can."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

import torch

from rfork.errors import StorageError
from rfork.logs import logger
from rfork.settings import StorageSettings
from rfork.storage.io.extents import ReadBlock
from rfork.storage.local.files import LocalFile

log = logger(__name__)


class CuFileHandle(Protocol):
    """What is used of `kvikio.CuFile`."""

    def raw_read(self, buf: torch.Tensor, size: int, file_offset: int) -> int:
        """Read into device memory on the calling thread; the bytes that came."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class CuFileLibrary(Protocol):
    """What opens files; `kvikio`."""

    def CuFile(self, file: str, flags: str) -> CuFileHandle:
        """Open a file."""
        ...


class DirectStorage:
    """Reads blocks of local files into CUDA tensors; thread-safe. One `fill`'s, closed with it."""

    def __init__(self, library: CuFileLibrary) -> None:
        self._library = library
        self._lock = threading.Lock()
        self._handles: dict[LocalFile, CuFileHandle] = {}
        self._opened = ExitStack()
        self._broken = False

    @classmethod
    def find(cls, settings: StorageSettings) -> DirectStorage | None:
        """This machine's, or None where it has none, or the settings forbid it."""
        if settings.direct_io == "never":
            return None
        try:
            import kvikio
            import kvikio.cufile_driver

            if not kvikio.cufile_driver.get("is_gds_available"):
                log.debug("no GPUDirect Storage", because="the driver says that it is not available")
                return None
        except (ImportError, AttributeError, RuntimeError) as error:
            log.debug("no GPUDirect Storage", because=str(error))
            return None
        return cls(kvikio)

    def read(self, block: ReadBlock, pieces: Sequence[tuple[int, torch.Tensor]]) -> bool:
        """See `Copier.read`; False too for what is no file of this machine, or is in the page cache."""
        file = block.blob
        if self._broken or not isinstance(file, LocalFile) or file.cached(block.begin, block.end - block.begin):
            return False
        try:
            with file.reading() as descriptor:
                handle = self._handle(file, descriptor)
                for offset, into in pieces:
                    count = handle.raw_read(into, into.numel(), offset)
                    if count != into.numel():
                        raise StorageError(f"{file.path} ends before byte {offset + into.numel()}")
        except RuntimeError as error:
            # Whatever cuFile dislikes; if it is the file, the way through the host says what is wrong.
            self._broken = True
            log.debug("no GPUDirect Storage", because=str(error))
            return False
        return True

    def close(self) -> None:
        """Close the files; no read is under way any more."""
        self._opened.close()

    def _handle(self, file: LocalFile, descriptor: int) -> CuFileHandle:
        with self._lock:
            handle = self._handles.get(file)
            if handle is None:
                # Through the descriptor: the name may be another file's by now.
                handle = self._library.CuFile(f"/proc/self/fd/{descriptor}", "r")
                self._opened.callback(handle.close)
                self._handles[file] = handle
            return handle
