"""Description of a stored snapshot without reading its data. Runs in `rfork snapshot ls`."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from rfork.errors import SettingsError, StorageAccessDenied, StorageCorrupt, StorageNotFound
from rfork.settings import StorageSettings
from rfork.storage.blob import BlobStore, read_range
from rfork.storage.location import Location
from rfork.storage.snapshots.files import (
    MANIFEST_SUFFIX,
    MAX_MANIFEST_BYTES,
    ManifestFile,
    chunk_folder,
    folder_store,
    manifest_name,
    read_manifest,
)

RANK_FILE_PATTERN: Final = re.compile(r"(.*/)?(model|speculative)-rank-[0-9]{3,}(-ep-[0-9]{3,})?\.safetensors")
FORMAT: Final = str(ManifestFile.model_fields["format"].default).encode()


@dataclass(frozen=True, slots=True)
class SnapshotEntry:
    """One snapshot in `folder`. `manifest_file` is None if the manifest cannot be read.

    `problem` describes damage that is visible without reading the data. `shared` are the bytes of its objects
    that other listed snapshots use too.
    """

    folder: Location
    name: str
    manifest_file: ManifestFile | None
    problem: str | None = None
    shared: int = 0

    @property
    def uri(self) -> str:
        """Location of its safetensors file, even if it only exists as shared chunks."""
        return self.folder.child(self.name).uri

    @property
    def size(self) -> int:
        """Size of that file in bytes."""
        return self.manifest_file.header_bytes + self.manifest_file.image_bytes if self.manifest_file is not None else 0

    @property
    def objects(self) -> dict[str, int]:
        """Path and size of each object in the shared form; empty for a single file."""
        if self.manifest_file is None or self.manifest_file.chunks is None:
            return {}
        chunks_path = chunk_folder(self.folder, self.manifest_file.chunks).path
        return {chunks_path + name: length for name, length in self.manifest_file.objects}


def read_entry(folder: Location, name: str, settings: StorageSettings | None = None) -> SnapshotEntry:
    """Return the snapshot of this name, with its `problem` (except missing shared chunks if storage cannot be
    listed).

    Raises StorageNotFound if there is none, StorageCorrupt if the file with its manifest's name belongs to
    another program, and other StorageErrors.
    """
    manifest = manifest_name(name)
    with folder_store(folder, settings) as store:
        try:
            manifest_file = read_manifest(store, manifest)
        except StorageNotFound as missing:
            raise _no_snapshot(store, folder, name, missing) from None
        except StorageCorrupt as error:
            if is_foreign_manifest(store, manifest, strict=False):
                raise
            return SnapshotEntry(folder, name, None, str(error))
        entry = SnapshotEntry(folder, name, manifest_file)
        sizes: dict[str, int] = {}
        if manifest_file.chunks is None:
            try:
                with closing(store.open(name)) as blob:
                    sizes[folder.path + name] = blob.size
            except StorageNotFound:
                pass
            return with_problems(entry, sizes, {})
    try:
        chunks = chunk_folder(folder, manifest_file.chunks)
        with folder_store(chunks, settings) as objects:
            sizes = {chunks.path + blob.name: blob.size for blob in objects.list()}
    except StorageCorrupt as error:
        return SnapshotEntry(folder, name, None, str(error))
    except StorageNotFound:
        pass
    except (SettingsError, StorageAccessDenied):
        return entry
    return with_problems(entry, sizes, Counter(entry.objects))


def _no_snapshot(store: BlobStore, folder: Location, name: str, missing: StorageNotFound) -> StorageNotFound:
    try:
        store.open(name).close()
        hint = "this file has no manifest: it is a plain safetensors file, or an incomplete snapshot"
    except StorageNotFound:
        hint = missing.hint
    return StorageNotFound(f"no snapshot at {folder.child(name).uri.partition('?')[0]}", hint=hint)


def is_foreign_manifest(store: BlobStore, manifest: str, *, strict: bool) -> bool:
    """Return True if an unreadable manifest belongs to another program, rather than being damaged.

    With `strict`, a file that is not JSON counts as damaged.
    """
    if RANK_FILE_PATTERN.fullmatch(manifest.removesuffix(MANIFEST_SUFFIX)):
        return False
    with closing(store.open(manifest)) as blob:
        text = read_range(blob, 0, min(blob.size, MAX_MANIFEST_BYTES))
    if FORMAT in text:
        return False
    if strict:
        try:
            json.loads(text)
        except ValueError:
            return False
    return True


def with_problems(entry: SnapshotEntry, sizes: Mapping[str, int], users: Mapping[str, int]) -> SnapshotEntry:
    """Return the entry with the problems that sizes reveal, and its shared bytes."""
    if entry.manifest_file is None:
        return entry
    problem = None
    if entry.manifest_file.chunks is None:
        size = sizes.get(entry.folder.path + entry.name)
        if size is None:
            problem = "the data is missing"
        elif size != entry.size:
            problem = f"the data has {size} bytes instead of {entry.size}"
        return SnapshotEntry(entry.folder, entry.name, entry.manifest_file, problem)
    objects = entry.objects
    damaged = [path for path, length in objects.items() if sizes.get(path) != length]
    if damaged:
        first = damaged[0].rpartition("/")[2]
        problem = f"{len(damaged)} of {len(objects)} chunks are missing or truncated, first {first}"
    shared = sum(length for path, length in objects.items() if users[path] > 1)
    return SnapshotEntry(entry.folder, entry.name, entry.manifest_file, problem, shared)
