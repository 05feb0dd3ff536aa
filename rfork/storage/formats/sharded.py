"""Safetensors files at a URI as one source: a file, the shards of an index, or all that lie in a folder."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from itertools import islice

from pydantic import BaseModel, ConfigDict, ValidationError

from rfork.errors import CheckpointError, SettingsError, StorageNotFound
from rfork.settings import StorageSettings
from rfork.storage import registry
from rfork.storage.blob import HEAD_BYTES, BlobStore, read_range
from rfork.storage.formats.safetensors_file import Shard, read_shard
from rfork.storage.formats.safetensors_source import SafetensorsSource
from rfork.storage.io.parallel_map import parallel_map
from rfork.storage.location import Location
from rfork.storage.snapshots.files import open_safetensors
from rfork.storage.tensors import TensorSource

SUFFIX = ".safetensors"
MAX_INDEX_BYTES = 256 << 20
MAX_LISTED = 10_000
"""Names of a folder that are looked at: somebody may name a bucket, or the root of a disk."""
_of_a_rank = re.compile(r"(model|draft)-rank-\d+.*")
_of_an_index = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")


class _Index(BaseModel):
    """What an index file says: which tensor is in which file."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    weight_map: dict[str, str]


def reject_other_ranks(folder: Location, names: Collection[str]) -> None:
    """Raises CheckpointError where names are of a snapshot's ranks: the one asked for is not among them."""
    if ranks := sorted(name for name in names if _of_a_rank.fullmatch(name)):
        raise CheckpointError(f"{folder.uri} holds {ranks[0]} ({len(ranks)} such), but none of the rank asked for")


def open_single(location: Location, settings: StorageSettings) -> TensorSource:
    """One file. Raises CheckpointError, and what the store raises."""
    with ExitStack() as opened:
        blob = open_safetensors(location, settings)
        opened.callback(blob.close)
        return SafetensorsSource(location.uri, [read_shard(location.name, blob)], settings).take_ownership(opened)


def open_indexed(location: Location, settings: StorageSettings) -> TensorSource:
    """The shards that an index names. Raises CheckpointError where one, or a tensor of it, is not there."""
    folder = location.parent
    with ExitStack() as opened:
        store = registry.open_store(folder, settings)
        opened.callback(store.close)
        text = _read(store, location.name)
        files = _files(text, f"{folder.uri}{location.name}")
        shards = _shards(store, sorted(set(files.values())), settings, opened, of_index=True)
        locations_by_shard = {shard.name: shard.locations for shard in shards}
        for name, file in files.items():
            if name not in locations_by_shard[file]:
                raise CheckpointError(f"{folder.uri}{file} lacks {name}, which the index says it holds")
        return SafetensorsSource(folder.uri, shards, settings, index=text, files=files).take_ownership(opened)


def open_folder(folder: Location, settings: StorageSettings) -> TensorSource:
    """All safetensors files of a folder. Raises StorageNotFound for none, CheckpointError for leftovers."""
    with ExitStack() as opened:
        store = registry.open_store(folder, settings)
        opened.callback(store.close)
        try:
            listed = [entry.name for entry in islice(store.list(), MAX_LISTED)]
        except SettingsError:  # a web server
            listed = []
        names = [name for name in listed if name.endswith(SUFFIX) and "/" not in name]
        if not names:
            raise StorageNotFound(f"{folder.uri} holds no {SUFFIX} file")
        reject_other_ranks(folder, names)
        if lost := [name for name in names if _of_an_index.fullmatch(name)]:
            raise CheckpointError(
                f"{folder.uri} holds {lost[0]} ({len(lost)} such), but no index of them",
                hint="it is written now, or its writer ended early: write it again",
            )
        shards = _shards(store, names, settings, opened, of_index=False)
        return SafetensorsSource(folder.uri, shards, settings).take_ownership(opened)


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
                f"{store.uri} lacks the shard {name}, which its index names",
                hint="download the checkpoint again",
            ) from None
        opened.callback(blob.close)
        return read_shard(name, blob)

    return parallel_map(store.uri, shard, names, settings.concurrency)


def _read(store: BlobStore, name: str) -> bytes:
    blob = store.open(name, front=HEAD_BYTES)
    try:
        if blob.size > MAX_INDEX_BYTES:
            raise CheckpointError(f"{blob.uri} is too long for an index")
        return read_range(blob, 0, blob.size)
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
