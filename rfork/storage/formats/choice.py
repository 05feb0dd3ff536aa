"""Which format a URI is of, by its name and by what lies there. Runs wherever weights are loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path, PurePath

from pydantic import BaseModel, ConfigDict, ValidationError

from rfork import settings as options
from rfork.errors import CheckpointError, SettingsError, StorageDenied, StorageError, StorageMissing
from rfork.settings import StorageSettings
from rfork.storage import stores
from rfork.storage.blob import FRONT, Store, part
from rfork.storage.formats.safetensors_file import Shard, read_shard
from rfork.storage.formats.safetensors_source import SafetensorsSource
from rfork.storage.location import Location
from rfork.storage.reading.side_by_side import side_by_side
from rfork.storage.snapshots.files import manifest_name, open_safetensors, snapshot_name
from rfork.storage.tensorizer.names import of_rank
from rfork.storage.tensors import TensorSource
from rfork.wire import Rank

SUFFIX, SINGLE = ".safetensors", "model.safetensors"
INDEX_SUFFIX, INDEX = ".safetensors.index.json", "model.safetensors.index.json"
TENSORIZER_SUFFIX, TENSORIZER_MAGIC = ".tensors", b"|TZR|"
LONGEST_INDEX = 256 << 20
MOST_LISTED = 10_000
"""Names of a folder that are looked at: somebody may name a bucket, or the root of a disk."""

_of_a_rank = re.compile(r"(model|draft)-rank-\d+.*")
_of_an_index = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")
Way = tuple[Collection[str], Callable[[], TensorSource]]
"""Names of which one has to be there, or none, and how such a folder is opened."""


class _Index(BaseModel):
    """What an index file says: which tensor is in which file."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    weight_map: dict[str, str]


def open_source(
    uri: str | Path,
    settings: StorageSettings | None = None,
    rank: Rank | None = None,
    *,
    key: bytes | None = None,
    password: str | None = None,
) -> TensorSource:
    """Open what lies at a URI: a ``.safetensors`` or ``.tensors`` file, an index, or a folder of such.

    In a folder, the first of these that is there: ``model.safetensors.index.json``, ``model.safetensors``,
    the snapshot of `rank` (see `rfork.storage.snapshots.files.snapshot_name`), ``model-rank-%03d.tensors``, a
    ``.tensors`` file or set, and all ``*.safetensors`` together; of a draft's rank, its own files before all
    others. In a name as ``model-rank-%03d.safetensors`` the number is that of `rank`. `key` or `password`
    open an encrypted ``.tensors``. A name without one of these endings is taken for a folder, and then for a
    file.

    Raises CheckpointError where none of these is there, or one contradicts itself, or is not encrypted though
    `key` or `password` is given; SettingsError, StorageCorrupt, and what the store raises.
    """
    if not issubclass(type(uri), (str, PurePath)):
        raise SettingsError(f"{uri!r} is neither a URI nor a path")
    source = _found(uri, settings or options.load(StorageSettings), rank, key, password)
    if isinstance(source, SafetensorsSource) and (key is not None or password is not None):
        source.close()
        raise CheckpointError(f"{source.uri} is not encrypted, and a key or password was given")
    return source


def _found(
    uri: str | Path, chosen: StorageSettings, rank: Rank | None, key: bytes | None, password: str | None
) -> TensorSource:
    uri = of_rank(str(uri), rank or Rank())
    location = Location.parse(uri)
    if location.name.endswith(TENSORIZER_SUFFIX):
        return _tensorizer(str(uri), chosen, rank, key, password)
    if location.name.endswith(SUFFIX):
        return _single(location, chosen)
    if location.name.endswith(INDEX_SUFFIX):
        return _indexed(location, chosen)
    if not location.query:
        source = _folder(location.folder, chosen, rank or Rank(), key, password)
        if source is not None:
            return source
    if location.name:
        source = _by_content(location, str(uri), chosen, rank, key, password)
        if source is not None:
            return source
    looked = f"{INDEX}, {SINGLE}, {snapshot_name(rank or Rank())} and *{TENSORIZER_SUFFIX}"
    raise CheckpointError(
        f"{location.uri} holds nothing to load: looked for {looked}",
        hint="name a folder of a Hugging Face checkpoint, a snapshot, or a file of either",
    )


def open_checkpoint(uri: str | Path, settings: StorageSettings | None = None) -> SafetensorsSource:
    """As `open_source`; raises CheckpointError for what is not safetensors."""
    source = open_source(uri, settings)
    if isinstance(source, SafetensorsSource):
        return source
    source.close()
    raise CheckpointError(f"{source.uri} is no safetensors checkpoint")


def _folder(
    folder: Location, settings: StorageSettings, rank: Rank, key: bytes | None, password: str | None
) -> TensorSource | None:
    own = snapshot_name(rank)
    name = own.removesuffix(SUFFIX)
    role = name.partition("-")[0]
    denied: list[StorageDenied] = []

    def first(ways: Sequence[Way], there: Collection[str] | None = None) -> TensorSource | None:
        for names, way in ways:
            if names and there is not None and not any(each in there for each in names):
                continue
            try:
                return way()
            except StorageMissing:
                continue
            except StorageDenied as error:  # what S3 says of missing names to who may not list them
                denied.append(error)
        return None

    def of_this_rank(there: Collection[str] | None) -> Sequence[Way]:
        sets = [each for each in there or () if each.startswith(name) and each.endswith(TENSORIZER_SUFFIX)]
        tensorizer = f"{name}{TENSORIZER_SUFFIX}"
        open_it = partial(_tensorizer, folder.child(tensorizer).uri, settings, rank, key, password)
        return (
            ((own, manifest_name(own)), partial(_single, folder.child(own), settings)),
            ((tensorizer, *sets), open_it),
        )

    index: Way = ((), partial(_indexed, folder.child(INDEX), settings))
    single: Way = ((SINGLE, manifest_name(SINGLE)), partial(_single, folder.child(SINGLE), settings))
    if rank.role == "target":
        found = first([index])
        if found is None:
            there = _listed(folder, settings, role)
            found = first([single, *of_this_rank(there)], there)
    else:
        # What lies beside a draft's file is another model: its target.
        there = _listed(folder, settings, role)
        found = first(of_this_rank(there), there)
        if found is None:
            _refuse_other_ranks(folder, there or ())
            found = first([index, single])
    if found is None:
        any_tensorizer = partial(_tensorizer, folder.uri, settings, rank, key, password)
        found = first([((), any_tensorizer), ((), partial(_together, folder, settings))])
    if found is None and denied:
        raise denied[0]
    return found


def _listed(folder: Location, settings: StorageSettings, role: str) -> set[str] | None:
    """The names in a folder that begin as that, by one request; None where it cannot be listed."""
    store = stores.open_store(folder, settings)
    try:
        return {entry.name for entry in islice(store.list(role), MOST_LISTED)}
    except (SettingsError, StorageDenied):
        return None
    except StorageMissing:
        return set()
    finally:
        store.close()


def _refuse_other_ranks(folder: Location, names: Collection[str]) -> None:
    if ranks := sorted(name for name in names if _of_a_rank.fullmatch(name)):
        raise CheckpointError(
            f"{folder.uri} holds {ranks[0]} ({len(ranks)} such), but none of the rank asked for"
        )


def _single(location: Location, settings: StorageSettings) -> TensorSource:
    with ExitStack() as opened:
        blob = open_safetensors(location, settings)
        opened.callback(blob.close)
        return SafetensorsSource(location.uri, [read_shard(location.name, blob)], settings).owning(opened)


def _by_content(
    location: Location,
    uri: str,
    settings: StorageSettings,
    rank: Rank | None,
    key: bytes | None,
    password: str | None,
) -> TensorSource | None:
    try:
        with stores.opened(location, settings) as blob:
            begins = part(blob, 0, min(blob.size, 9))
    except StorageDenied:
        raise
    except StorageError:  # nothing there, or a folder
        return None
    if begins.startswith(TENSORIZER_MAGIC):
        return _tensorizer(uri, settings, rank, key, password)
    return _single(location, settings) if begins[8:] == b"{" else None


def _tensorizer(
    uri: str, settings: StorageSettings, rank: Rank | None, key: bytes | None, password: str | None
) -> TensorSource:
    from rfork.storage.tensorizer.source import TensorizerSource

    try:
        return TensorizerSource.open(uri, key=key, password=password, rank=rank, settings=settings)
    except SettingsError:
        if not uri.endswith("/"):
            raise
        raise StorageMissing(f"{uri} cannot be listed") from None


def _indexed(location: Location, settings: StorageSettings) -> TensorSource:
    folder = location.parent
    with ExitStack() as opened:
        store = stores.open_store(folder, settings)
        opened.callback(store.close)
        text = _read(store, location.name)
        files = _files(text, f"{folder.uri}{location.name}")
        shards = _shards(store, sorted(set(files.values())), settings, opened, of_index=True)
        held = {shard.name: shard.places for shard in shards}
        for name, file in files.items():
            if name not in held[file]:
                raise CheckpointError(f"{folder.uri}{file} lacks {name}, which the index says it holds")
        return SafetensorsSource(folder.uri, shards, settings, index=text, files=files).owning(opened)


def _together(folder: Location, settings: StorageSettings) -> TensorSource:
    with ExitStack() as opened:
        store = stores.open_store(folder, settings)
        opened.callback(store.close)
        try:
            listed = [entry.name for entry in islice(store.list(), MOST_LISTED)]
        except SettingsError:  # a web server
            listed = []
        names = [name for name in listed if name.endswith(SUFFIX) and "/" not in name]
        if not names:
            raise StorageMissing(f"{folder.uri} holds no {SUFFIX} file")
        _refuse_other_ranks(folder, names)
        if lost := [name for name in names if _of_an_index.fullmatch(name)]:
            raise CheckpointError(
                f"{folder.uri} holds {lost[0]} ({len(lost)} such), but no index of them",
                hint="it is written now, or its writer ended early: write it again",
            )
        shards = _shards(store, names, settings, opened, of_index=False)
        return SafetensorsSource(folder.uri, shards, settings).owning(opened)


def _shards(
    store: Store, names: Sequence[str], settings: StorageSettings, opened: ExitStack, *, of_index: bool
) -> list[Shard]:
    def shard(name: str) -> Shard:
        try:
            blob = store.open(name, front=FRONT)
        except StorageMissing:
            if not of_index:
                raise
            raise CheckpointError(
                f"{store.uri} lacks the shard {name}, which its index names",
                hint="download the checkpoint again",
            ) from None
        opened.callback(blob.close)
        return read_shard(name, blob)

    return side_by_side(store.uri, shard, names, settings.streams)


def _read(store: Store, name: str) -> bytes:
    blob = store.open(name, front=FRONT)
    try:
        if blob.size > LONGEST_INDEX:
            raise CheckpointError(f"{blob.uri} is too long for an index")
        return part(blob, 0, blob.size)
    finally:
        blob.close()


def _files(index: bytes, uri: str) -> dict[str, str]:
    """The file of each tensor, as the index at `uri` says."""
    try:
        files = _Index.model_validate_json(index).weight_map
    except ValidationError as error:
        raise CheckpointError(f"{uri} is not a safetensors index: {error.errors()[0]['msg']}") from None
    for file in set(files.values()):
        if "/" in file or "\\" in file or file in ("", ".", ".."):
            raise CheckpointError(f"{uri} names {file!r}, which is outside the folder")
    return files
