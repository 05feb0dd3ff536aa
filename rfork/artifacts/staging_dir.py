"""Staging folder inside a cache, in which files are assembled before they are moved into place. Runs on the target.

The process that fills it locks it, so that the leftovers of a dead process can be recognised and removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rfork.artifacts.cache_types import STAGING
from rfork.errors import StorageError
from rfork.logs import logger

log = logger(__name__)

SUFFIX: Final = ".tmp"
OWNER_MODE: Final = 0o755
"""Independent of the umask: a folder that others can write to would be skipped from then on."""
ATTEMPTS: Final = 20
STALE_AGE_S: Final = 24 * 3600.0
"""Age in seconds after which a folder counts as abandoned on a file system without locks."""


@contextlib.contextmanager
def staging_dir(folder: Path) -> Iterator[Path]:
    """Create a staging folder in `folder` for the duration of the block, creating `folder` if necessary.

    Raises OSError.
    """
    folder.mkdir(mode=OWNER_MODE, parents=True, exist_ok=True)
    for _ in range(ATTEMPTS):
        staging = Path(tempfile.mkdtemp(prefix=STAGING, suffix=SUFFIX, dir=folder))
        try:
            lock = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # removed before it was opened
            continue
        try:
            with contextlib.suppress(OSError):  # the file system has no locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not staging.exists():  # removed before it was locked
                continue
            try:
                yield staging
            finally:
                shutil.rmtree(staging, ignore_errors=True)
            return
        finally:
            os.close(lock)
    raise StorageError(f"{folder}: other processes keep removing the staging folder")


def remove_stale(folder: Path) -> int:
    """Remove the staging folders of dead processes in `folder`. Returns their number."""
    removed = 0
    for stale in folder.glob(f"{STAGING}*{SUFFIX}"):
        try:
            lock = os.open(stale, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            except OSError:
                if time.time() - os.fstat(lock).st_mtime < STALE_AGE_S:
                    continue
            removed += 1
            shutil.rmtree(stale, ignore_errors=True)
        finally:
            os.close(lock)
    if removed:
        log.info("removed staging folders of dead processes", folder=str(folder), folders=removed)
    return removed
