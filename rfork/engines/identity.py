"""Version of the weights and name of the replica that an instance reports. Runs on the target.

The planner assigns one version of the weights to all ranks of a replica. A replica's name changes at each
start, so that a restarted server is not taken for its predecessor.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Final
from uuid import uuid4

import torch.distributed

from rfork import settings as options
from rfork.errors import RforkError, StorageNotFound
from rfork.logs import logger
from rfork.schema import Rank
from rfork.settings import InstanceSettings, StorageSettings
from rfork.weights_version import is_single

log = logger(__name__)

STORE_KEY: Final = "rfork/replica"


def replica_of(settings: InstanceSettings, rank: Rank) -> str | None:
    """Return the name of the replica that this process belongs to, or None if its ranks cannot agree on one.

    Ranks agree through the store of torch.distributed's default group, else by the setting `replica`. A model
    replicated on every rank (a speculative draft) belongs to the same replica as the main model of its
    process.
    """
    process = os.getpid()
    own = f"{settings.replica or 'replica'}-{_process_name(process)}"
    if is_single(rank):
        return _agreed_names.get(process, own)
    agreed = _agreed(own)
    if agreed is not None:
        _agreed_names[process] = agreed
    return agreed or settings.replica


_agreed_names: Final[dict[int, str]] = {}
"""Names by process id: a forked child does not belong to its parent's replica."""


def _agreed(own: str) -> str | None:
    """Return the name that the first rank proposed; None without a process group. Never waits for other ranks."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    try:
        store = torch.distributed.distributed_c10d._get_default_store()
        return str(store.compare_set(STORE_KEY, "", own).decode())
    except Exception as error:  # a custom store may lack the operation
        log.warning(
            "the ranks of this replica cannot agree on a name", reason=str(error), hint="set RFORK_REPLICA on all ranks"
        )
        return None


@lru_cache
def _process_name(pid: int) -> str:
    """Return a random name for this process. A forked child gets another one."""
    return uuid4().hex[:12]


CurrentVersion = Callable[[], str | None]
"""Computes the current version of an instance's own files."""


def choose_version(
    stated: str | None,
    files: CurrentVersion | None,
    snapshot: str | Path | None,
    settings: StorageSettings | None = None,
) -> tuple[str | None, CurrentVersion | None]:
    """Return the version that an instance requests, and a function that recomputes it if it comes from files.

    It is the stated version, else that of the instance's files, else that of its snapshot. With None, the
    instance accepts the version that is served. Raises StorageError types.
    """
    if stated is not None:
        return stated, None
    if files is not None and (version := files()) is not None:
        return version, files
    if snapshot is None:
        return None, None
    from rfork.storage.versions.fingerprint import fingerprint_of

    try:
        return fingerprint_of(snapshot, settings), None
    except StorageNotFound:
        return None, None


def version_of_reload(source: str | Path, revision: str | None = None) -> CurrentVersion:
    """Return a function that names the weights of `source` after they were loaded into a running model.

    Call this before the files are read, and the function afterwards. The function returns None if the files
    have changed meanwhile or cannot be read.
    """
    before = _version_or_none(source, revision)

    def after() -> str | None:
        return before if before is not None and before == _version_or_none(source, revision) else None

    return after


def _version_or_none(source: str | Path, revision: str | None) -> str | None:
    # Imported where it is used: a fork without files does not wait for it.
    from rfork.storage.versions.version import version_of_files

    try:
        return version_of_files(source, revision, options.load(StorageSettings))
    except RforkError as error:
        log.warning("version of the new weights unknown", reason=str(error), hint=error.hint)
        return None
