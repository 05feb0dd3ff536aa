"""Opens the tensors at a URI, whose format is detected from its name and content.

Safetensors may be a single file, the shards of an index, or all files of a folder. Runs wherever weights are loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from pathlib import Path, PurePath

from pydantic import BaseModel, ConfigDict, ValidationError

from rfork import settings as options
from rfork.errors import CheckpointError, SettingsError, StorageAccessDenied, StorageError, StorageNotFound
from rfork.schema import Rank
from rfork.settings import StorageSettings
from rfork.storage import registry
from rfork.storage.blob import HEAD_BYTES, BlobStore, read_range
from rfork.storage.formats.safetensors_file import Shard, read_shard
from rfork.storage.formats.safetensors_source import SafetensorsSource
from rfork.storage.io.parallel_map import parallel_map
from rfork.storage.location import Location
from rfork.storage.snapshots.entry import manifest_name, open_safetensors, snapshot_name
from rfork.storage.tensorizer.file_set import resolve_template
from rfork.storage.tensors import TensorSource

SUFFIX = ".safetensors"
MAX_INDEX_BYTES = 256 << 20
MAX_LISTED = 10_000
"""Limit for folder listings: the user may pass a complete bucket, or the root of a disk."""
MAX_SERIAL_SHARDS = 8
"""Local files up to this number are opened one after the other, in less time than threads start."""
_RANK_FILE = re.compile(r"(model|speculative)-rank-\d+.*")
_SHARD_FILE = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")

SINGLE = "model.safetensors"
INDEX_SUFFIX, INDEX = ".safetensors.index.json", "model.safetensors.index.json"
TENSORIZER_SUFFIX, TENSORIZER_MAGIC = ".tensors", b"|TZR|"
FolderFormat = tuple[Collection[str], Callable[[], TensorSource]]
"""File names of which one must exist (empty: no check), and the function that opens the folder."""


class _Index(BaseModel):
    """Content of an index file: the file of each tensor."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    weight_map: dict[str, str]


def reject_other_ranks(folder: Location, names: Collection[str]) -> None:
    """Raise CheckpointError if any of the names is a rank's snapshot: the requested rank is not among them."""
    if ranks := sorted(name for name in names if _RANK_FILE.fullmatch(name)):
        raise CheckpointError(f"{folder.uri} contains {ranks[0]} ({len(ranks)} in total), but not the requested rank")


def open_single(location: Location, settings: StorageSettings) -> TensorSource:
    """Open one file. Raises CheckpointError, and the store's errors."""
    with ExitStack() as opened:
        blob = open_safetensors(location, settings)
        opened.callback(blob.close)
        return SafetensorsSource(location.uri, [read_shard(location.name, blob)], settings).adopt(opened)


def open_indexed(location: Location, settings: StorageSettings) -> TensorSource:
    """Open the shards of an index. Raises CheckpointError if a shard or a tensor is missing."""
    folder = location.parent
    with ExitStack() as opened:
        store = registry.open_store(folder, settings)
        opened.callback(store.close)
        text = _read(store, location.name)
        files = _files(text, f"{folder.uri}{location.name}")
        shards = _shards(store, sorted(set(files.values())), settings, opened, of_index=True)
        locations_by_shard = {shard.name: shard.locations for shard in shards}
        listed = {} if len(shards) == 1 and files.keys() <= shards[0].locations.keys() else files
        for name, file in listed.items():
            if name not in locations_by_shard[file]:
                raise CheckpointError(f"{folder.uri}{file} does not contain {name}, although the index lists it there")
        return SafetensorsSource(folder.uri, shards, settings, index=text, files=files).adopt(opened)


def open_folder(folder: Location, settings: StorageSettings) -> TensorSource:
    """Open all safetensors files of a folder.

    Raises StorageNotFound if there are none, CheckpointError if there are shards without an index.
    """
    with ExitStack() as opened:
        store = registry.open_store(folder, settings)
        opened.callback(store.close)
        try:
            listed = [entry.name for entry in islice(store.list(), MAX_LISTED)]
        except SettingsError:  # web server
            listed = []
        names = [name for name in listed if name.endswith(SUFFIX) and "/" not in name]
        if not names:
            raise StorageNotFound(f"{folder.uri} contains no {SUFFIX} file")
        reject_other_ranks(folder, names)
        if lost := [name for name in names if _SHARD_FILE.fullmatch(name)]:
            raise CheckpointError(
                f"{folder.uri} contains {lost[0]} ({len(lost)} in total), but no index",
                hint="it is still being written, or the writer was interrupted: write it again",
            )
        shards = _shards(store, names, settings, opened, of_index=False)
        return SafetensorsSource(folder.uri, shards, settings).adopt(opened)


def _shards(
    store: BlobStore, names: Sequence[str], settings: StorageSettings, opened: ExitStack, *, of_index: bool
) -> list[Shard]:
    def shard(name: str) -> Shard:
        try:
            blob = store.open(name, front=HEAD_BYTES)
        except StorageNotFound:
            if not of_index:
                raise
            raise CheckpointError(
                f"{store.uri} lacks the shard {name} that its index lists",
                hint="download the checkpoint again",
            ) from None
        opened.callback(blob.close)
        return read_shard(name, blob)

    few = len(names) <= MAX_SERIAL_SHARDS and store.uri.startswith("file:")
    return parallel_map(store.uri, shard, names, 1 if few else settings.concurrency)


def _read(store: BlobStore, name: str) -> bytes:
    with closing(store.open(name, front=HEAD_BYTES)) as blob:
        if blob.size > MAX_INDEX_BYTES:
            raise CheckpointError(f"{blob.uri} is too large for an index")
        return read_range(blob, 0, blob.size)


def _files(index: bytes, uri: str) -> dict[str, str]:
    """Return the file of each tensor from the index at `uri`."""
    try:
        files = _Index.model_validate_json(index).weight_map
    except ValidationError as error:
        raise CheckpointError(f"{uri} is not a safetensors index: {error.errors()[0]['msg']}") from None
    for file in set(files.values()):
        if "/" in file or "\\" in file or file in ("", ".", ".."):
            raise CheckpointError(f"{uri} refers to {file!r}, which is outside of the folder")
    return files


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
    snapshot of `rank` (see `rfork.storage.snapshots.entry.snapshot_name`), ``model-rank-%03d.tensors``, a
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
    with closing(registry.open_store(folder, settings)) as store:
        try:
            return {entry.name for entry in islice(store.list(role), MAX_LISTED)}
        except (SettingsError, StorageAccessDenied):
            return None
        except StorageNotFound:
            return set()


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
