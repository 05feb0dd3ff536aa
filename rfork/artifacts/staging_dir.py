"""Where a cache is put together before it is moved into place: a folder in its own. Runs on the target.

It is locked by whoever fills it, so that what a dead process left can be told from one at work, and swept.
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
"""Whatever the umask: a folder that others can write to would be passed over from then on."""
ATTEMPTS: Final = 20
OLD_S: Final = 24 * 3600.0
"""Where folders cannot be locked, one of this age has nobody at work in it."""


@contextlib.contextmanager
def staging_dir(folder: Path) -> Iterator[Path]:
    """A new folder in `folder`, which is made if need be, for the length of the block. Raises OSError."""
    folder.mkdir(mode=OWNER_MODE, parents=True, exist_ok=True)
    for _ in range(ATTEMPTS):
        made = Path(tempfile.mkdtemp(prefix=STAGING, suffix=SUFFIX, dir=folder))
        try:
            lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # swept before it was opened
            continue
        try:
            with contextlib.suppress(OSError):  # no locks on this file system
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():  # swept before it was locked
                continue
            try:
                yield made
            finally:
                shutil.rmtree(made, ignore_errors=True)
            return
        finally:
            os.close(lock)
    raise StorageError(f"{folder}: others sweep each folder that is made there")


def remove_stale(folder: Path) -> int:
    """Remove what processes that died have left in `folder`; how many folders that were."""
    swept = 0
    for left in folder.glob(f"{STAGING}*{SUFFIX}"):
        try:
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            except OSError:
                if time.time() - os.fstat(lock).st_mtime < OLD_S:
                    continue
            swept += 1
            shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(lock)
    if swept:
        log.info("swept what a process left that died", folder=str(folder), folders=swept)
    return swept
