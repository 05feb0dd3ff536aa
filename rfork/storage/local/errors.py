"""Errors of the operating system by the names that they have here."""

from __future__ import annotations

import errno
from pathlib import Path

from rfork.errors import StorageAccessDenied, StorageChanged, StorageError, StorageFull, StorageNotFound

_ERROR_TYPES = {
    errno.ENOENT: StorageNotFound,
    errno.ENOTDIR: StorageNotFound,
    errno.EACCES: StorageAccessDenied,
    errno.EPERM: StorageAccessDenied,
    errno.EROFS: StorageAccessDenied,
    errno.ESTALE: StorageChanged,  # of NFS: it was replaced or removed on its server
    errno.ENOSPC: StorageFull,
    errno.EDQUOT: StorageFull,
    errno.EFBIG: StorageFull,
}


def storage_error(path: Path, error: OSError) -> StorageError:
    """What an error of the operating system is called here."""
    error_type = _ERROR_TYPES.get(error.errno or 0, StorageError)
    return error_type(f"{path}: {error.strerror or error}")
