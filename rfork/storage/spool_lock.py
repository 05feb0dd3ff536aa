"""Finds or creates the spool of a process and locks it. Runs on the target."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from rfork.errors import StorageError
from rfork.image.layout import Layout
from rfork.storage.spool import HEADER, Spool, header_of, release, write_all

MAX_SPOOLS = 16
"""Maximum number of processes with the same rank and model that may have spools in one folder."""
TTL_S = 3 * 86400.0
"""A spool that was not resumed within this time is removed by the next fork of the same name."""


def acquire_spool(folder: Path, name: str, layout: Layout) -> Spool:
    """Return the spool that a terminated process of this name left, or a new one.

    Concurrent processes get separate spools. Spools of another layout, and expired ones, are removed. Raises
    StorageError if no spool is available: the folder is missing or not writable, all spools are in use, or a
    file in its place does not belong to this user.
    """
    paths = [folder / f"{name}.{number}.partial" for number in range(MAX_SPOOLS)]
    try:
        for attempt in (_open_existing, _create):
            for path in paths:
                spool = attempt(path, layout)
                if spool is not None:
                    _remove_expired([other for other in paths if other != path], layout)
                    return spool
    except OSError as error:
        raise StorageError(f"{error.filename or folder}: {error.strerror or error}") from None
    raise StorageError(f"{folder}: {MAX_SPOOLS} processes already keep chunks of {name} here")


def _remove_expired(paths: Sequence[Path], layout: Layout) -> None:
    """Remove expired spools. Best effort: the next fork of this name tries again."""
    for path in paths:
        with contextlib.suppress(OSError, StorageError):
            if time.time() - os.lstat(path).st_mtime > TTL_S:
                expired = _open_existing(path, layout)
                if expired is not None:
                    expired.remove()
                    expired.close()


def _open_existing(path: Path, layout: Layout) -> Spool | None:
    """Return the spool at this path unless another process has locked it. Removes one of another layout."""
    try:
        descriptor = _locked(path, 0)
    except FileNotFoundError:
        return None
    if descriptor is None:
        return None
    try:
        fits = os.pread(descriptor, HEADER.size, 0) == header_of(layout.layout_id, layout.chunks)
        spool = Spool(path, descriptor, layout)
    except BaseException:
        release(descriptor)
        raise
    if fits:
        return spool
    spool.remove()
    spool.close()
    return None


def _create(path: Path, layout: Layout) -> Spool | None:
    """Create a spool at this path; return None if the file already exists."""
    try:
        descriptor = _locked(path, os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return None
    if descriptor is None:  # another process locked it before its header was written
        return None
    try:
        write_all(descriptor, header_of(layout.layout_id, layout.chunks), 0)
        return Spool(path, descriptor, layout)
    except BaseException:
        release(descriptor)
        raise


def _locked(path: Path, extra_flags: int) -> int | None:
    """Open and lock a file. Returns None if another process has locked it; raises StorageError if it is not
    this user's.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | extra_flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise StorageError(f"{path}: not a regular file that only this user can access")
        if status.st_nlink > 1:
            raise StorageError(f"{path}: has a second hard link")
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        release(descriptor)
        raise
    if not status.st_nlink:  # its process just finished and removed it
        release(descriptor)
        return None
    return descriptor
