"""The version of the weights that an instance would load by itself. Runs on the target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rfork import settings as options
from rfork.errors import RforkError, StorageNotFound
from rfork.logs import logger
from rfork.settings import StorageSettings
from rfork.storage.versions.fingerprint import fingerprint_of
from rfork.storage.versions.hub import is_hub_id
from rfork.storage.versions.version import version_of

log = logger(__name__)

CurrentVersion = Callable[[], str | None]
"""Computes the version of an instance's own files, as they are now."""


def version_of_files(
    source: str | Path, revision: str | None = None, settings: StorageSettings | None = None
) -> str | None:
    """Return the version of the weights at a folder, URI or hub id; None where there are none.

    A hub `revision` whose commit is not known here is a version by its own name, so that no other one is
    taken for it. Raises StorageError kinds for files that cannot be read.
    """
    version = version_of(source, revision=revision, settings=settings)
    if version is None and revision is not None and is_hub_id(source):
        return f"revision:{revision}"
    return version


def choose_version(
    stated: str | None,
    files: CurrentVersion | None,
    snapshot: str | Path | None,
    settings: StorageSettings | None = None,
) -> tuple[str | None, CurrentVersion | None]:
    """Return the version that an instance asks for, and how to compute it again if it is that of files.

    It is the stated one, else that of the instance's files, else that of its snapshot. None: the instance
    takes over the version that is served. Raises StorageError kinds.
    """
    if stated is not None:
        return stated, None
    if files is not None and (version := files()) is not None:
        return version, files
    if snapshot is None:
        return None, None
    try:
        return fingerprint_of(snapshot, settings), None
    except StorageNotFound:
        return None, None


def version_of_reload(source: str | Path, revision: str | None = None) -> CurrentVersion:
    """Return a function that names the weights of `source` once they are loaded over a running model's.

    Call this before the files are read, and the function afterwards. It returns None where the files changed
    meanwhile, or cannot be read.
    """
    before = _version_or_none(source, revision)

    def after() -> str | None:
        return before if before is not None and before == _version_or_none(source, revision) else None

    return after


def _version_or_none(source: str | Path, revision: str | None) -> str | None:
    try:
        return version_of_files(source, revision, options.load(StorageSettings))
    except RforkError as error:
        log.warning("the version of the new weights is not known", because=str(error), hint=error.hint)
        return None
