"""Version of the weights that an instance would load from storage. Runs on the target, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from rfork.errors import SettingsError
from rfork.schema import WeightsVersion
from rfork.settings import StorageSettings
from rfork.storage.versions.fingerprint import fingerprint_of
from rfork.storage.versions.hub import hub_commit, is_complete_snapshot, is_hub_id

COMMIT_PREFIX: Final = "commit:"
_version: TypeAdapter[str] = TypeAdapter(WeightsVersion)


def checked_version(text: str) -> str:
    """Return a stated version. Raises SettingsError unless it has 1 to 256 printable characters."""
    try:
        return _version.validate_python(text)
    except ValidationError as error:
        raise SettingsError(
            f"{text[:80]!r} is not a valid version: {error.errors()[0]['msg']}", hint="e.g. the revision's name"
        ) from None


def version_of(
    source: str | Path, *, revision: str | None = None, settings: StorageSettings | None = None
) -> str | None:
    """Return ``commit:`` and the commit of a hub model, otherwise the fingerprint of the weight files at
    `source`.

    `source` is a folder, a file, a storage URI, or a hub id. None means that no version is known: a folder
    without weight files, or a hub id that is not in the local cache (yet). A single file or subfolder of a
    hub model has its own fingerprint, because a repository may contain several sets of weights. Raises the
    same errors as `fingerprint_of`.
    """
    hub_id = is_hub_id(source)
    if hub_id or is_complete_snapshot(source):
        commit = hub_commit(source, revision)
        return f"{COMMIT_PREFIX}{commit}" if commit is not None else None
    return fingerprint_of(source, settings)
