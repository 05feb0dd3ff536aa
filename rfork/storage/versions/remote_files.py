"""Weight files in an object store or on a web server, for fingerprints: uses entity tags and sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Final

from rfork.errors import SettingsError, StorageAccessDenied, StorageCorrupt, StorageError, StorageNotFound
from rfork.settings import StorageSettings
from rfork.storage import registry
from rfork.storage.blob import Blob, BlobStore, read_range
from rfork.storage.io.parallel_map import parallel_map
from rfork.storage.location import Location
from rfork.storage.versions.weight_files import (
    MAX_INDEX_BYTES,
    WeightFiles,
    has_weight_suffix,
    is_set,
    missing_shard,
    sampled_digest,
    select_named,
    select_weight_files,
)

MAX_LISTED: Final = 10_000
UNTAGGED_SAMPLES: Final = 8
"""Blocks to read from a file whose server sends neither an entity tag nor a date."""
KNOWN_NAMES: Final = (
    "model.safetensors.index.json",
    "model.safetensors",
    "model.safetensors.manifest.json",
    "model-rank-000.safetensors.manifest.json",
    "config.json",
)
"""Names to try in a folder that cannot be listed."""


@dataclass(frozen=True, slots=True)
class RemoteFiles:
    """Files in a store's folder; see `Files`. `query` is that of a presigned URL, which refers to one file."""

    store: BlobStore
    folder: Location
    found: WeightFiles
    is_listed: bool
    is_partial: bool
    streams: int
    query: str

    def text(self, name: str) -> bytes:
        """See `Files`."""
        with closing(self.store.open(name + self.query)) as blob:
            if blob.size > MAX_INDEX_BYTES:
                raise StorageCorrupt(f"{blob.uri} is too large for an index: {blob.size} bytes")
            return read_range(blob, 0, blob.size)

    def digests(self, names: Sequence[str]) -> Sequence[bytes]:
        """See `Files`."""

        def digest(name: str) -> bytes:
            try:
                blob = self.store.open(name + self.query)
            except StorageNotFound:
                if name in self.found.weights:
                    raise
                raise missing_shard(self.folder.uri, name) from None
            with closing(blob):
                return _digest(blob)

        return parallel_map(self.folder.uri, digest, names, self.streams)

    def close(self) -> None:
        """Close the store."""
        self.store.close()


def open_remote_files(location: Location, settings: StorageSettings) -> RemoteFiles:
    """Find the files of a URI. Raises StorageNotFound if there are none, and other StorageErrors."""
    is_folder = not location.query and not has_weight_suffix(location.name)
    folder = (location if is_folder else location.parent).folder
    store = registry.open_store(folder, settings)
    try:
        if is_folder:
            names, is_listed = _names(store)
            found = select_weight_files(names)
        else:
            names, is_listed = _names_of_file(store, location), False
            found = select_named(location.name, names)
        if not names:
            raise StorageNotFound(f"{location.uri} has no files", hint="check its name")
    except BaseException:
        store.close()
        raise
    return RemoteFiles(
        store,
        folder,
        found,
        is_listed=is_listed,
        is_partial=is_folder and not is_listed,
        streams=settings.concurrency,
        query=f"?{location.query}" if location.query else "",
    )


def _names(store: BlobStore) -> tuple[Sequence[str], bool]:
    """Return the names in a folder, and whether they are complete."""
    try:
        return _listed(store, ""), True
    except (SettingsError, StorageAccessDenied):  # a web server, or no permission to list
        return _existing(store, KNOWN_NAMES), False


def _names_of_file(store: BlobStore, location: Location) -> Sequence[str]:
    name = location.name
    if location.query:
        return (name,)
    if is_set(name):
        try:
            return _listed(store, name.partition("%")[0].partition(".")[0])
        except (SettingsError, StorageAccessDenied):
            pass
    return _existing(store, (name, f"{name}.manifest.json"))


def _listed(store: BlobStore, prefix: str) -> Sequence[str]:
    names = [entry.name for entry in islice(store.list(prefix), MAX_LISTED + 1)]
    if len(names) > MAX_LISTED:
        raise StorageError(
            f"{store.uri} contains more than {MAX_LISTED} files", hint="pass the folder of one checkpoint"
        )
    return names


def _existing(store: BlobStore, names: Sequence[str]) -> Sequence[str]:
    """Return the names that exist. Raises StorageAccessDenied if access to all of them is denied."""
    found: list[str] = []
    denied: list[StorageAccessDenied] = []
    for name in names:
        try:
            store.open(name).close()
        except StorageNotFound:
            continue
        except StorageAccessDenied as error:  # S3's response for missing names if listing is not allowed
            denied.append(error)
        else:
            found.append(name)
    if denied and not found:
        raise denied[0]
    return found


def _digest(blob: Blob) -> bytes:
    if blob.version is not None:
        return hashlib.sha256(f"{blob.size}\n{blob.version}".encode()).digest()
    return sampled_digest(
        blob.uri, blob.size, lambda offset, length: read_range(blob, offset, length), UNTAGGED_SAMPLES
    )
