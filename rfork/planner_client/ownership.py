"""The owner secret of a server: proves to the planner that a record is changed by the server it describes.

A server draws its secret once and sends it with every call that changes something. The planner binds an
instance's record to the first secret that it sees for it, and derives the instance's lease keys from the
secret's digest as well as from its own key. So another caller can neither change the record nor obtain the
keys, not even after a restart of the planner, when it may be the first to report under the instance's id.

All processes of one server share the secret, so that a preStop hook may drain what the engine registered: by
`RFORK_OWNER_SECRET`, or else by a file that only this user can read.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Final

from rfork.logs import logger
from rfork.settings import InstanceSettings

OWNER_HEADER: Final = "X-Rfork-Owner"
"""HTTP header of the secret."""
SECRET: Final = re.compile("[!-~]{32,256}")
"""Form of a secret: visible ASCII."""

_OF_THIS_PROCESS: Final = secrets.token_urlsafe(32)


def owner_id(secret: str) -> str:
    """The digest by which the planner knows the owner; it tells nothing of the secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def owner_secret(settings: InstanceSettings) -> str:
    """The secret of the server that this process is part of.

    Where the server has no name (`InstanceSettings.replica`) no other process can know its instances: the secret is
    this process's own. So it is where no private file can be written, which is logged.
    """
    if settings.owner_secret is not None:
        return settings.owner_secret.get_secret_value()
    if settings.replica is None:
        return _OF_THIS_PROCESS
    return _shared(settings.replica)


def process_secret() -> str:
    """The secret of this process alone."""
    return _OF_THIS_PROCESS


@lru_cache(64)
def _shared(replica: str) -> str:
    """Read once: a cleaner of temporary files may remove the file while the server runs."""
    try:
        return shared_secret(replica, Path(tempfile.gettempdir()))
    except OSError as error:
        logger(__name__).warning(
            "owner secret not shared between processes", replica=replica, reason=str(error),
            hint="set RFORK_OWNER_SECRET, or `rfork drain` in another process cannot drain this server",
        )  # fmt: skip
        return _OF_THIS_PROCESS


def shared_secret(replica: str, temporary: Path) -> str:
    """The secret that this user's processes of one server share, by a file under `temporary`.

    Raises OSError where the file cannot be written, or where another user could have read or written it.
    """
    folder = temporary / f"rfork-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    _check_private(folder, stat.S_ISDIR)
    path = folder / f"owner-{hashlib.sha256(replica.encode()).hexdigest()[:32]}"
    if not path.exists():
        own = folder / f"{path.name}.{secrets.token_hex(8)}"
        own.touch(mode=0o600, exist_ok=False)
        try:
            own.write_text(secrets.token_urlsafe(32))
            # A link appears complete or not at all; of several processes the first one wins.
            path.hardlink_to(own)
        except FileExistsError:
            pass
        finally:
            own.unlink()
    _check_private(path, stat.S_ISREG)
    found = path.read_text()
    if not SECRET.fullmatch(found):
        raise OSError(f"{path} does not hold a secret: remove it")
    return found


def _check_private(path: Path, is_type: Callable[[int], bool]) -> None:
    found = path.lstat()
    if not is_type(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OSError(f"{path} is not a private file or folder of this user")
