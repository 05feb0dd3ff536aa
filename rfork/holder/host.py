"""The holder's process on its host: one per host, with many open files."""

from __future__ import annotations

import fcntl
import os
import re
import resource
import select
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rfork.errors import SettingsError
from rfork.settings import InstanceSettings
from rfork.transport.same_host.memory_file import Descriptor


def raise_file_limit() -> None:
    """Raise the limit of open files of this process to its maximum: each chunk is a memory file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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
