"""Errors of the operating system by the names that they have here."""

from __future__ import annotations

import errno
from pathlib import Path

from rfork.errors import StorageChanged, StorageDenied, StorageError, StorageFull, StorageMissing

_KINDS = {
    errno.ENOENT: StorageMissing,
    errno.ENOTDIR: StorageMissing,
    errno.EACCES: StorageDenied,
    errno.EPERM: StorageDenied,
    errno.EROFS: StorageDenied,
    errno.ESTALE: StorageChanged,  # of NFS: it was replaced or removed on its server
    errno.ENOSPC: StorageFull,
    errno.EDQUOT: StorageFull,
    errno.EFBIG: StorageFull,
}


def storage_error(path: Path, error: OSError) -> StorageError:
    """What an error of the operating system is called here."""
    kind = _KINDS.get(error.errno or 0, StorageError)
    return kind(f"{path}: {error.strerror or error}")
