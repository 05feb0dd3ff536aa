"""Detects the format of a URI from its name and content. Runs wherever weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import islice
from pathlib import Path, PurePath

from rfork import settings as options
from rfork.errors import CheckpointError, SettingsError, StorageAccessDenied, StorageError, StorageNotFound
from rfork.schema import Rank
from rfork.settings import StorageSettings
from rfork.storage import registry
from rfork.storage.blob import read_range
from rfork.storage.formats.safetensors_source import SafetensorsSource
from rfork.storage.formats.sharded import (
    MAX_LISTED,
    SUFFIX,
    open_folder,
    open_indexed,
    open_single,
    reject_other_ranks,
)
from rfork.storage.location import Location
from rfork.storage.snapshots.files import manifest_name, snapshot_name
from rfork.storage.tensorizer.file_set import resolve_template
from rfork.storage.tensors import TensorSource

SINGLE = "model.safetensors"
INDEX_SUFFIX, INDEX = ".safetensors.index.json", "model.safetensors.index.json"
TENSORIZER_SUFFIX, TENSORIZER_MAGIC = ".tensors", b"|TZR|"

FolderFormat = tuple[Collection[str], Callable[[], TensorSource]]
"""File names of which one must exist (empty: no check), and the function that opens the folder."""


def open_source(
    uri: str | Path,
    settings: StorageSettings | None = None,
    rank: Rank | None = None,
    *,
    key: bytes | None = None,
    password: str | None = None,
) -> TensorSource:
    """Open the tensors at a URI: a ``.safetensors`` or ``.tensors`` file, an index, or a folder of them.

    In a folder, the first of these that exists: ``model.safetensors.index.json``, ``model.safetensors``, the
    snapshot of `rank` (see `rfork.storage.snapshots.files.snapshot_name`), ``model-rank-%03d.tensors``, a
    ``.tensors`` file or set, and all ``*.safetensors`` together; for a speculative rank, its own files come
    first. In a template such as ``model-rank-%03d.safetensors`` the number is that of `rank`. `key` or
    `password` decrypt a ``.tensors`` file. A name without one of these suffixes is tried as a folder, then as
    a file.

    Raises CheckpointError if none of these exists, if one is inconsistent, or if it is not encrypted although
    `key` or `password` is given; SettingsError, StorageCorrupt, and the store's errors.
    """
    if not issubclass(type(uri), (str, PurePath)):
        raise SettingsError(f"{uri!r} is neither a URI nor a path")
    source = _open_by_name(uri, settings or options.load(StorageSettings), rank, key, password)
    if isinstance(source, SafetensorsSource) and (key is not None or password is not None):
        source.close()
        raise CheckpointError(f"{source.uri} is not encrypted, but a key or password was given")
    return source


def _open_by_name(
    uri: str | Path, chosen: StorageSettings, rank: Rank | None, key: bytes | None, password: str | None
) -> TensorSource:
    uri = resolve_template(str(uri), rank or Rank())
    location = Location.parse(uri)
    if location.name.endswith(TENSORIZER_SUFFIX):
        return _tensorizer(str(uri), chosen, rank, key, password)
    if location.name.endswith(SUFFIX):
        return open_single(location, chosen)
    if location.name.endswith(INDEX_SUFFIX):
        return open_indexed(location, chosen)
    if not location.query:
        source = _folder(location.folder, chosen, rank or Rank(), key, password)
        if source is not None:
            return source
    if location.name:
        source = _sniff(location, str(uri), chosen, rank, key, password)
        if source is not None:
            return source
    expected_names = f"{INDEX}, {SINGLE}, {snapshot_name(rank or Rank())} and *{TENSORIZER_SUFFIX}"
    raise CheckpointError(
        f"nothing to load at {location.uri}: expected {expected_names}",
        hint="pass the folder of a Hugging Face checkpoint, a snapshot, or a file of either",
    )


def open_checkpoint(uri: str | Path, settings: StorageSettings | None = None) -> SafetensorsSource:
    """Like `open_source`, but raises CheckpointError if the format is not safetensors."""
    source = open_source(uri, settings)
    if isinstance(source, SafetensorsSource):
        return source
    source.close()
    raise CheckpointError(f"{source.uri} is not a safetensors checkpoint")


def _folder(
    folder: Location, settings: StorageSettings, rank: Rank, key: bytes | None, password: str | None
) -> TensorSource | None:
    own = snapshot_name(rank)
    name = own.removesuffix(SUFFIX)
    role = name.partition("-")[0]
    denied: list[StorageAccessDenied] = []

    def first(formats: Sequence[FolderFormat], there: Collection[str] | None = None) -> TensorSource | None:
        for names, open_format in formats:
            if names and there is not None and not any(each in there for each in names):
                continue
            try:
                return open_format()
            except StorageNotFound:
                continue
            except StorageAccessDenied as error:  # S3 reports missing names like this if listing is not allowed
                denied.append(error)
        return None

    def of_this_rank(there: Collection[str] | None) -> Sequence[FolderFormat]:
        sets = [each for each in there or () if each.startswith(name) and each.endswith(TENSORIZER_SUFFIX)]
        tensorizer = f"{name}{TENSORIZER_SUFFIX}"
        open_it = partial(_tensorizer, folder.child(tensorizer).uri, settings, rank, key, password)
        return (
            ((own, manifest_name(own)), partial(open_single, folder.child(own), settings)),
            ((tensorizer, *sets), open_it),
        )

    index: FolderFormat = ((), partial(open_indexed, folder.child(INDEX), settings))
    single: FolderFormat = (
        (SINGLE, manifest_name(SINGLE)),
        partial(open_single, folder.child(SINGLE), settings),
    )
    if rank.role == "main":
        found = first([index])
        if found is None:
            there = _list_or_none(folder, settings, role)
            found = first([single, *of_this_rank(there)], there)
    else:
        # The other files in a speculative model's folder belong to the main model.
        there = _list_or_none(folder, settings, role)
        found = first(of_this_rank(there), there)
        if found is None:
            reject_other_ranks(folder, there or ())
            found = first([index, single])
    if found is None:
        any_tensorizer = partial(_tensorizer, folder.uri, settings, rank, key, password)
        found = first([((), any_tensorizer), ((), partial(open_folder, folder, settings))])
    if found is None and denied:
        raise denied[0]
    return found


def _list_or_none(folder: Location, settings: StorageSettings, role: str) -> set[str] | None:
    """Return the names in a folder that begin with `role`, in one request; None if it cannot be listed."""
    store = registry.open_store(folder, settings)
    try:
        return {entry.name for entry in islice(store.list(role), MAX_LISTED)}
    except (SettingsError, StorageAccessDenied):
        return None
    except StorageNotFound:
        return set()
    finally:
        store.close()


def _sniff(
    location: Location,
    uri: str,
    settings: StorageSettings,
    rank: Rank | None,
    key: bytes | None,
    password: str | None,
) -> TensorSource | None:
    try:
        with registry.open_blob(location, settings) as blob:
            begins = read_range(blob, 0, min(blob.size, 9))
    except StorageAccessDenied:
        raise
    except StorageError:  # missing, or a folder
        return None
    if begins.startswith(TENSORIZER_MAGIC):
        return _tensorizer(uri, settings, rank, key, password)
    return open_single(location, settings) if begins[8:] == b"{" else None


def _tensorizer(
    uri: str, settings: StorageSettings, rank: Rank | None, key: bytes | None, password: str | None
) -> TensorSource:
    from rfork.storage.tensorizer.source import TensorizerSource

    try:
        return TensorizerSource.open(uri, key=key, password=password, rank=rank, settings=settings)
    except SettingsError:
        if not uri.endswith("/"):
            raise
        raise StorageNotFound(f"{uri} cannot be listed") from None
