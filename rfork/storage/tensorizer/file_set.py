"""Which files a name stands for: one ``.tensors`` file, or a set of them that reads as one."""

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
from rfork.storage.snapshots.files import DATA_SUFFIX, snapshot_name
from rfork.storage.tensorizer.format import FRONT

SUFFIX = ".tensors"

# Not what a URI escapes: "%20d" is a space and a letter, "%d0" a part of one.
_template = re.compile(r"%(?:0\d)?d(?![0-9a-fA-F])")
_of_a_rank = re.compile(r"(model|draft)-rank-\d+.*")
_numbered = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.tensors")


def set_names(name: str, count: int) -> list[str]:
    """The files of a set: ``NAME-00001-of-00008.tensors`` and so on, for ``NAME.tensors``."""
    base = name.removesuffix(SUFFIX)
    return [f"{base}-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]


def existing_files(store: BlobStore, name: str) -> list[str]:
    """Every file there is that ``NAME.tensors`` stands for: that one, and those of sets, whole or not."""
    base = name.removesuffix(SUFFIX)
    try:
        names = [entry.name for entry in store.list(base)]
    except StorageNotFound:  # a folder that is not there yet
        return []
    return [
        found for found in names if found == name or ((match := _numbered.fullmatch(found)) and match["name"] == base)
    ]


def of_rank(uri: str, rank: Rank) -> str:
    """The name of a rank's file, where `uri` is a template as ``model-rank-%03d.tensors``; else `uri`.

    The number is ``pp * tp_size + tp``, followed by ``-ep-%03d`` where a snapshot's is (see `snapshot_name`).
    Raises SettingsError for more than one number, and for a draft's rank where the name says no ``draft``.
    """
    head, slash, name = uri.rpartition("/")
    if not is_template(uri):
        return uri
    found = _template.findall(name)
    if len(found) != 1:
        raise SettingsError(f"{name!r} has more than one place for the number of the rank")
    if rank.role != "main" and rank.role not in name:
        raise SettingsError(
            f"{name!r} names files of the model itself, and the rank is a {rank.role}'s",
            hint=f"a name with {rank.role!r} in it, as {rank.role}-rank-%03d{SUFFIX}",
        )
    expert = snapshot_name(rank).removesuffix(DATA_SUFFIX).partition("-ep-")
    number = found[0] % (rank.pp * rank.tp_size + rank.tp) + expert[1] + expert[2]
    return head + slash + name.replace(found[0], number)


def is_template(uri: str) -> bool:
    """Whether a URI names a file of each rank: ``….tensors`` or ``….safetensors``, with ``%03d`` in it."""
    name = uri.rpartition("/")[2]
    return name.endswith((SUFFIX, DATA_SUFFIX)) and _template.search(name) is not None


def opened_files(uri: str, settings: StorageSettings, resources: ExitStack) -> list[Blob]:
    """The blobs that `uri` stands for, in order; they and their store are closed with `resources`.

    A file is itself; one of a numbered set is the whole set. A name that is not there, but a set of that name
    is, is the set; a folder is what it holds, where that is one file or one set. A name without the suffix
    may be either.

    Raises StorageNotFound where nothing is there, or a file of a set is not; CheckpointError where a folder
    holds more than one, or files of ranks.
    """
    location = Location.parse(uri)
    requested_name = location.name + (f"?{location.query}" if location.query else "")
    if not location.name.endswith(SUFFIX) and not location.query:
        folder = registry.open_store(location.folder, settings)
        resources.callback(folder.close)
        try:
            return _opened(folder, _in_folder(folder), resources)
        except (StorageNotFound, SettingsError):  # no folder, or one of a web server, which lists none
            if not location.name:
                raise
    store = registry.open_store(location.parent, settings)
    resources.callback(store.close)
    if (match := _numbered.fullmatch(location.name)) and not location.query:
        return _opened(store, _complete_set(match), resources)
    try:
        return _opened(store, [requested_name], resources)
    except StorageNotFound:
        if location.scheme in ("http", "https"):
            raise  # a web server does not tell what else it has
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
    if ranks := [name for name in names if _of_a_rank.fullmatch(name)]:
        # That of the rank asked for would have been named: another's has other weights.
        raise CheckpointError(
            f"{store.uri} holds {ranks[0]} ({len(ranks)} such), but none of the rank asked for",
            hint="name the rank, or one of these files",
        )
    single = [[name] for name in names if not _numbered.fullmatch(name)]
    found = single + _sets(store, "", names)
    if not found:
        raise StorageNotFound(f"{store.uri} holds no {SUFFIX} file")
    if len(found) > 1:
        raise CheckpointError(
            f"{store.uri} holds {len(found)} models: {found[0][0]}, {found[1][0]} …",
            hint="name one of its files",
        )
    return found[0]


def _sets(store: BlobStore, base: str, names: Sequence[str] | None = None) -> list[list[str]]:
    """The sets there are, of that name or of any (``""``), by one file of each."""
    if names is None:
        names = [entry.name for entry in store.list(f"{base}-")]
    found: dict[tuple[str, str], list[str]] = {}
    for name in names:
        match = _numbered.fullmatch(name)
        if match and base in ("", match["name"]):
            found.setdefault((match["name"], match["count"]), _complete_set(match))
    return list(found.values())


def _complete_set(match: re.Match[str]) -> list[str]:
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count:
        raise CheckpointError(f"{match[0]!r} is no number of its set")
    return set_names(match["name"], count)
