"""Version of the weights that an instance would load: a hub commit, or the fingerprint of its files.

Runs on the target, without torch. Never uses the network to find a commit.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from rfork.errors import SettingsError
from rfork.schema import WeightsVersion
from rfork.settings import StorageSettings, hub_cache
from rfork.storage.location import Location
from rfork.storage.versions.fingerprint import fingerprint_of
from rfork.storage.versions.weight_files import FORMATS, PICKLES

COMMIT: Final = re.compile(r"[0-9a-f]{40}")
HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_IN_CACHE: Final = re.compile(r".*/models--[^/]+/snapshots/(?P<commit>[0-9a-f]{40})(?P<below>/.+)?", re.DOTALL)

COMMIT_PREFIX: Final = "commit:"
_version: TypeAdapter[str] = TypeAdapter(WeightsVersion)


def hub_commit(source: str | Path, revision: str | None = None, *, cache: str | Path | None = None) -> str | None:
    """Return the resolved commit (40 hex digits) of a model, or None if it is unknown.

    `source` is a path in a Hugging Face cache (``models--ORG--NAME/snapshots/COMMIT``, or below; links are
    not followed), or a hub id whose `revision` (``main`` if None) is in the local cache. The cache is at
    `cache`, or at the location set by ``HF_HUB_CACHE`` or ``HF_HOME``. A `revision` that is a full commit is
    returned unchanged. A local folder with the name of a hub id counts as a folder, as in engines.

    An engine with access to the hub may update ``main`` to a newer commit at start: call this after it has
    resolved the model, or specify a revision.
    """
    if found := _in_cache(source):
        return found["commit"]
    if not is_hub_id(source):
        return None
    wanted = revision or "main"
    if COMMIT.fullmatch(wanted):
        return wanted
    if ".." in wanted.split("/") or wanted.startswith("/") or "\0" in wanted:
        return None
    model = _cached_model(source, cache)
    try:
        commit = (model / "refs" / wanted).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return commit if COMMIT.fullmatch(commit) else None


def _cached_model(source: str | Path, cache: str | Path | None = None) -> Path:
    return Path(cache or hub_cache(), f"models--{str(source).replace('/', '--')}")


def folder_of(source: str | Path, revision: str | None = None) -> Path | None:
    """Return the local folder with the weight files of a folder, file or hub id; None if they are not local."""
    if is_hub_id(source):
        commit = hub_commit(source, revision)
        folder = _cached_model(source) / "snapshots" / commit if commit is not None else None
        return folder if folder is not None and folder.is_dir() else None
    location = Location.parse(source)
    if location.scheme != "file":
        return None
    path = Path(location.path)
    return path if path.is_dir() else path.parent


def is_hub_id(source: str | Path) -> bool:
    """Return True if this can only be a hub id: it has the form of one, and no local file or folder has this
    name.
    """
    return (
        isinstance(source, str)
        and HUB_ID.fullmatch(source) is not None
        and not source.endswith((*FORMATS, *PICKLES))
        and not os.path.lexists(source)
    )


def is_complete_snapshot(source: str | Path) -> bool:
    """Return True if this is a commit's folder in a Hugging Face cache, rather than something below it."""
    found = _in_cache(source)
    return found is not None and found["below"] is None


def _in_cache(source: str | Path) -> re.Match[str] | None:
    text = str(source)
    if "://" in text:
        if not text.startswith("file:///"):
            return None
        text = text.removeprefix("file://")
    if ".." in text.split("/"):  # with links in the path, the name alone does not determine the folder
        return None
    return _IN_CACHE.fullmatch(os.path.abspath(os.path.expanduser(text)))


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
