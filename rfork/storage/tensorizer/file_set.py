"""Resolves a name to files: one ``.tensors`` file, or a numbered set that is read as one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack

from rfork.errors import CheckpointError, SettingsError, StorageNotFound
from rfork.schema import Rank
from rfork.settings import StorageSettings
from rfork.storage import registry
from rfork.storage.blob import Blob, BlobStore
from rfork.storage.location import Location
from rfork.storage.snapshots.entry import DATA_SUFFIX, snapshot_name
from rfork.storage.tensorizer.format import FRONT

SUFFIX = ".tensors"

# Excludes percent-escapes of a URI: "%20d" is a space and a letter, "%d0" part of one.
_RANK_PLACEHOLDER = re.compile(r"%(?:0\d)?d(?![0-9a-fA-F])")
_RANK_FILE = re.compile(r"(model|speculative)-rank-\d+.*")
_NUMBERED_FILE = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.tensors")


def set_names(name: str, count: int) -> list[str]:
    """Return the file names of a set: ``NAME-00001-of-00008.tensors`` etc. for ``NAME.tensors``."""
    base = name.removesuffix(SUFFIX)
    return [f"{base}-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]


def existing_files(store: BlobStore, name: str) -> list[str]:
    """Return every existing file of ``NAME.tensors``: the single file, and those of complete and incomplete
    sets.
    """
    base = name.removesuffix(SUFFIX)
    try:
        names = [entry.name for entry in store.list(base)]
    except StorageNotFound:  # the folder does not exist yet
        return []
    return [
        found
        for found in names
        if found == name or ((match := _NUMBERED_FILE.fullmatch(found)) and match["name"] == base)
    ]


def resolve_template(uri: str, rank: Rank) -> str:
    """Return a rank's URI if `uri` is a template such as ``model-rank-%03d.tensors``; otherwise `uri`.

    The number is ``pp * tp_size + tp``, followed by ``-ep-%03d`` as in a snapshot's name (see
    `snapshot_name`). Raises SettingsError for more than one number, and for a speculative rank if the name
    does not contain ``speculative``.
    """
    head, slash, name = uri.rpartition("/")
    if not is_template(uri):
        return uri
    found = _RANK_PLACEHOLDER.findall(name)
    if len(found) != 1:
        raise SettingsError(f"{name!r} has more than one placeholder for the rank's number")
    if rank.role != "main" and rank.role not in name:
        raise SettingsError(
            f"{name!r} is a template for the main model, but the rank's role is {rank.role}",
            hint=f"use a name that contains {rank.role!r}, such as {rank.role}-rank-%03d{SUFFIX}",
        )
    expert = snapshot_name(rank).removesuffix(DATA_SUFFIX).partition("-ep-")
    number = found[0] % (rank.pp * rank.tp_size + rank.tp) + expert[1] + expert[2]
    return head + slash + name.replace(found[0], number)


def is_template(uri: str) -> bool:
    """Return True if a URI is a template for the files of several ranks: ``….tensors`` or ``….safetensors``
    with ``%03d``.
    """
    name = uri.rpartition("/")[2]
    return name.endswith((SUFFIX, DATA_SUFFIX)) and _RANK_PLACEHOLDER.search(name) is not None


def opened_files(uri: str, settings: StorageSettings, resources: ExitStack) -> list[Blob]:
    """Open the blobs of `uri`, in order; `resources` closes them and their store.

    A file stands for itself; a file of a numbered set stands for the complete set. A name that does not exist
    stands for the set of that name; a folder for the one file or set in it. A name without the suffix may be
    either.

    Raises StorageNotFound if there is nothing, or a file of a set is missing; CheckpointError if a folder
    contains more than one model, or files of ranks.
    """
    location = Location.parse(uri)
    if not location.name.endswith(SUFFIX) and not location.query:
        folder = registry.open_store(location.folder, settings)
        resources.callback(folder.close)
        try:
            return _opened(folder, _in_folder(folder), resources)
        except (StorageNotFound, SettingsError):  # no folder, or on a web server, which cannot list it
            if not location.name:
                raise
    store = registry.open_store(location.parent, settings)
    resources.callback(store.close)
    if (match := _NUMBERED_FILE.fullmatch(location.name)) and not location.query:
        return _opened(store, _complete_set(match), resources)
    try:
        return _opened(store, [location.blob_name], resources)
    except StorageNotFound:
        if location.scheme in ("http", "https"):
            raise  # a web server cannot list its files
        found = _sets(store, location.name.removesuffix(SUFFIX))
        if len(found) != 1:
            raise
        return _opened(store, found[0], resources)


def _opened(store: BlobStore, names: Sequence[str], resources: ExitStack) -> list[Blob]:
    blobs: list[Blob] = []
    for name in names:
        blob = store.open(name, front=FRONT)
        resources.callback(blob.close)
        blobs.append(blob)
    return blobs


def _in_folder(store: BlobStore) -> list[str]:
    names = [entry.name for entry in store.list() if entry.name.endswith(SUFFIX) and "/" not in entry.name]
    if ranks := [name for name in names if _RANK_FILE.fullmatch(name)]:
        # The requested rank's file would have matched by name: those of other ranks have other weights.
        raise CheckpointError(
            f"{store.uri} contains {ranks[0]} ({len(ranks)} in total), but not the requested rank",
            hint="pass the rank, or one of these files",
        )
    single = [[name] for name in names if not _NUMBERED_FILE.fullmatch(name)]
    found = single + _sets(store, "", names)
    if not found:
        raise StorageNotFound(f"{store.uri} contains no {SUFFIX} file")
    if len(found) > 1:
        raise CheckpointError(
            f"{store.uri} contains {len(found)} models: {found[0][0]}, {found[1][0]} …",
            hint="pass one of its files",
        )
    return found[0]


def _sets(store: BlobStore, base: str, names: Sequence[str] | None = None) -> list[list[str]]:
    """Return the existing sets of this name, or of any (``""``)."""
    if names is None:
        names = [entry.name for entry in store.list(f"{base}-")]
    found: dict[tuple[str, str], list[str]] = {}
    for name in names:
        match = _NUMBERED_FILE.fullmatch(name)
        if match and base in ("", match["name"]):
            found.setdefault((match["name"], match["count"]), _complete_set(match))
    return list(found.values())


def _complete_set(match: re.Match[str]) -> list[str]:
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count:
        raise CheckpointError(f"{match[0]!r} has an invalid number in its set")
    return set_names(match["name"], count)
