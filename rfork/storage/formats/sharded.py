"""Opens safetensors files at a URI: a single file, the shards of an index, or all files of a folder."""

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
"""Limit for folder listings: the user may pass a complete bucket, or the root of a disk."""
_RANK_FILE = re.compile(r"(model|speculative)-rank-\d+.*")
_SHARD_FILE = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")


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
        for name, file in files.items():
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

    return parallel_map(store.uri, shard, names, settings.concurrency)


def _read(store: BlobStore, name: str) -> bytes:
    blob = store.open(name, front=HEAD_BYTES)
    try:
        if blob.size > MAX_INDEX_BYTES:
            raise CheckpointError(f"{blob.uri} is too large for an index")
        return read_range(blob, 0, blob.size)
    finally:
        blob.close()


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
