"""The last step of a write: a file that is whole gets its name, and both are on the disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from rfork.storage.local.errors import storage_error


def commit_file(descriptor: int, temporary: Path, path: Path, *, replace: bool) -> None:
    """Have a whole file on the disk, and then its name. Raises StorageError kinds."""
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
    """Give a file its name, unless another has it."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    except OSError as error:
        # A file system without links: whoever comes between puts the same bytes there.
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        if not path.exists():
            temporary.replace(path)


def _fsync_dir(folder: Path) -> None:
    """Have the folder's new names on the disk too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no such call for folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
