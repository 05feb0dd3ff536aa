"""Preparation of the holder's process: one per host, many memory files, tensors in mappings of their own."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rfork.errors import SettingsError
from rfork.image.host_memory import MIN_MAPPED_BYTES
from rfork.settings import InstanceSettings

_M_MMAP_THRESHOLD: Final = -3
"""From <malloc.h>."""


def prepare_memory() -> None:
    """Raise the limit of open files, and place large tensors in mappings of their own, so that files can replace them.

    glibc raises its threshold when such memory is freed, and then places later tensors on the heap.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MIN_MAPPED_BYTES)


@contextmanager
def host_lock(settings: InstanceSettings) -> Iterator[None]:
    """Own the host's lock within the context. Raises SettingsError if another holder owns it."""
    folder = settings.unix_socket_dir or Path(tempfile.gettempdir())
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", settings.node_name)
    path = folder / f"rfork-hold-{name}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SettingsError(f"cannot create {path}: {error.strerror}", hint="set RFORK_UNIX_SOCKET_DIR") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise SettingsError(
            f"a holder is already running on {settings.node_name}",
            hint="one holder keeps the images of all engines of a host; --one-shot starts another for one engine",
        ) from None
    try:
        yield
    finally:
        os.close(descriptor)
