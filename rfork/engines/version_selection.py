"""Version of the weights that an instance would load from its own files. Runs on the target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rfork import settings as options
from rfork.errors import RforkError, StorageNotFound
from rfork.logs import logger
from rfork.settings import StorageSettings
from rfork.storage.versions.fingerprint import fingerprint_of
from rfork.storage.versions.version import is_hub_id, version_of

log = logger(__name__)

CurrentVersion = Callable[[], str | None]
"""Computes the current version of an instance's own files."""


def version_of_files(
    source: str | Path, revision: str | None = None, settings: StorageSettings | None = None
) -> str | None:
    """Return the version of the weights at a folder, URI or hub id; None if there are none.

    A hub `revision` with an unknown commit is a version by its own name, so that no other version is taken
    for it. Raises StorageError types for unreadable files.
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
    try:
        return version_of_files(source, revision, options.load(StorageSettings))
    except RforkError as error:
        log.warning("version of the new weights unknown", reason=str(error), hint=error.hint)
        return None
