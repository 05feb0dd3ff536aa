"""Translates operating system errors to rfork errors."""

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
    errno.ESTALE: StorageChanged,  # NFS: replaced or removed on the server
    errno.ENOSPC: StorageFull,
    errno.EDQUOT: StorageFull,
    errno.EFBIG: StorageFull,
}


def storage_error(path: Path, error: OSError) -> StorageError:
    """Return the rfork error for an OSError."""
    error_type = _ERROR_TYPES.get(error.errno or 0, StorageError)
    return error_type(f"{path}: {error.strerror or error}")
