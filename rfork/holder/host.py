"""Preparation of the holder's process: one per host, many memory files, tensors in mappings of their own."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import resource
import select
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rfork.errors import SettingsError
from rfork.settings import InstanceSettings
from rfork.transport.same_host.memory_file import Descriptor
from rfork.transport.shared_memory.file_layout import MIN_MAPPED_BYTES

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
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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


class WatchedProcess:
    """A process of this host, observed until it ends, also if its parent does not wait for it."""

    def __init__(self, pid: int) -> None:
        """Raises SettingsError if the process cannot be observed."""
        self.pid = pid
        self._descriptor: Descriptor | None = None
        try:
            self._descriptor = Descriptor(os.pidfd_open(pid))
        except ProcessLookupError:
            pass
        except (OSError, AttributeError) as error:
            raise SettingsError(f"cannot observe process {pid}: {error}") from None

    @property
    def has_ended(self) -> bool:
        """True once it has ended."""
        if self._descriptor is None:
            return True
        poll = select.poll()  # `select` is limited to 1024 descriptors
        poll.register(self._descriptor.number, select.POLLIN)
        return bool(poll.poll(0))
