"""Which spool a process takes, of those that others use, left or put in the way. Runs on the target."""

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
"""Processes of one rank of one model that may keep their chunks in one folder at once."""
TTL_S = 3 * 86400.0
"""A spool that nobody came back for in so long is removed by the next fork of its name."""


def acquire_spool(folder: Path, name: str, layout: Layout) -> Spool:
    """The spool that a process of this name left when it died, else a new one.

    Of several processes at once each has its own. What was left of another layout, or too long ago, is
    removed. Raises StorageError where there is none to be had: no such folder, no right to it, all taken,
    or a file in its place that is not this user's own.
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
    raise StorageError(f"{folder}: {MAX_SPOOLS} processes keep {name} here already")


def _remove_expired(paths: Sequence[Path], layout: Layout) -> None:
    """Remove what nobody came back for. Best effort: the next fork of this name tries again."""
    for path in paths:
        with contextlib.suppress(OSError, StorageError):
            if time.time() - os.lstat(path).st_mtime > TTL_S:
                left = _open_existing(path, layout)
                if left is not None:
                    left.remove()
                    left.close()


def _open_existing(path: Path, layout: Layout) -> Spool | None:
    """The spool at this path, if no other process has it; one of another layout is removed."""
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
    """A new spool at this path; None where there is a file already."""
    try:
        descriptor = _locked(path, os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return None
    if descriptor is None:  # somebody found it before it had a header
        return None
    try:
        write_all(descriptor, header_of(layout.layout_id, layout.chunks), 0)
        return Spool(path, descriptor, layout)
    except BaseException:
        release(descriptor)
        raise


def _locked(path: Path, more: int) -> int | None:
    """Open and lock a file. None where another process has it; StorageError where it is not our own."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | more, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise StorageError(f"{path}: is not a file of this user alone")
        if status.st_nlink > 1:
            raise StorageError(f"{path}: has another name besides")
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        release(descriptor)
        raise
    if not status.st_nlink:  # its process ended well just now, and removed it
        release(descriptor)
        return None
    return descriptor
