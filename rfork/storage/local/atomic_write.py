"""Atomic commit of a file: rename and fsync."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from rfork.storage.local.errors import storage_error


def commit_file(descriptor: int, temporary: Path, path: Path, *, replace: bool) -> None:
    """Sync a complete file and rename it to its final name. Raises StorageError subclasses."""
    try:
        os.fsync(descriptor)
        if replace:
            temporary.replace(path)
        else:
            _rename_no_replace(temporary, path)
        _fsync_dir(path.parent)
    except OSError as error:
        raise storage_error(path, error) from None


def _rename_no_replace(temporary: Path, path: Path) -> None:
    """Rename a file unless the name is already in use."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    except OSError as error:
        # A file system without hard links: a concurrent writer writes the same bytes.
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        if not path.exists():
            temporary.replace(path)


def _fsync_dir(folder: Path) -> None:
    """Sync the folder, so that its new names are durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not support fsync on folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
