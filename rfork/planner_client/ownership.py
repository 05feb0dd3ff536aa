"""Owner secret of a replica: proves to the planner that its records are changed by the replica itself.

A replica generates its secret once and sends it with every call that changes something. The planner binds an
instance's record to the first secret that it receives for it, and derives the instance's lease keys from the
secret's digest as well as from its own key. Another caller can therefore neither change the record nor obtain
the keys, not even after a restart of the planner, when it may be the first to report under the instance's id.

All processes of a replica share the secret, so that a preStop hook may drain what the engine registered: by
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
"""HTTP header with the secret."""
SECRET: Final = re.compile("[!-~]{32,256}")
"""Format of a secret: visible ASCII."""

_OF_THIS_PROCESS: Final = secrets.token_urlsafe(32)


def owner_id(secret: str) -> str:
    """Return the digest by which the planner identifies the owner; it does not reveal the secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def owner_secret(settings: InstanceSettings) -> str:
    """Return the secret of the replica that this process belongs to.

    If the replica has no name (`InstanceSettings.replica`), no other process can know its instances, and the
    secret belongs to this process only. The same applies if no private file can be written, which is logged.
    """
    if settings.owner_secret is not None:
        return settings.owner_secret.get_secret_value()
    if settings.replica is None:
        return _OF_THIS_PROCESS
    return _shared(settings.replica)


def process_secret() -> str:
    """Return the secret of this process."""
    return _OF_THIS_PROCESS


@lru_cache(64)
def _shared(replica: str) -> str:
    """Read the file only once: temporary files may be deleted while the server runs."""
    try:
        return shared_secret(replica, Path(tempfile.gettempdir()))
    except OSError as error:
        logger(__name__).warning(
            "owner secret not shared between processes", replica=replica, reason=str(error),
            hint="set RFORK_OWNER_SECRET, or `rfork drain` in another process cannot drain this server",
        )  # fmt: skip
        return _OF_THIS_PROCESS


def shared_secret(replica: str, temporary: Path) -> str:
    """Return the secret shared by this user's processes of one replica, stored in a file under `temporary`.

    Raises OSError if the file cannot be written, or if another user could have read or written it.
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
            # Creating a link is atomic, and only the first of several processes succeeds.
            path.hardlink_to(own)
        except FileExistsError:
            pass
        finally:
            own.unlink()
    _check_private(path, stat.S_ISREG)
    found = path.read_text()
    if not SECRET.fullmatch(found):
        raise OSError(f"{path} does not contain a secret: remove it")
    return found


def _check_private(path: Path, is_type: Callable[[int], bool]) -> None:
    found = path.lstat()
    if not is_type(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OSError(f"{path} is not a private file or folder of this user")
