"""Imports the modules of a fork, and searches for tensors, while an engine initializes itself.

Python's part of that is short where an engine waits for drivers and for other ranks. When the fork begins, the imports
would delay it by 0.3 s, and the search by 0.1 s.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from rfork.gc_pause import gc_paused
from rfork.logs import logger

# None of them imports an engine, whose modules the engine's own thread may be importing.
MODULES = (
    "rfork.engines.load_or_fork",
    "rfork.engines.relocation",
    "rfork.engines.weight_lifecycle",
    "rfork.storage.versions.version",
    "rfork.transport.cuda_ipc",
    "rfork.transport.http",
    "rfork.transport.mooncake",
    "rfork.transport.shared_memory",
)

log = logger(__name__)


class EarlyImports:
    """Imports the modules on another thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start to import, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=_import_modules, name="rfork-imports", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until all are imported, if it was started."""
        if self._thread is not None:
            self._thread.join()


@contextmanager
def early_imports() -> Iterator[None]:
    """Import on another thread inside the block, which waits for it: a process must not fork during an import."""
    imports = EarlyImports()
    imports.start()
    try:
        yield
    finally:
        imports.wait()


def _import_modules() -> None:
    try:
        with gc_paused():
            for module in MODULES:
                import_module(module)
            # Imported late, too: the plug-ins import this module in all of an engine's processes.
            from rfork.engines.completeness import scan_early

            scan_early()
    except Exception as error:  # the fork imports them again, and reports the error
        log.debug("early import failed", reason=f"{type(error).__name__}: {error}")
