"""One snapshot in storage, as it is seen without reading its data. Runs where `rfork snapshot ls` does."""

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

OWN_NAME: Final = re.compile(r"(.*/)?(model|draft)-rank-[0-9]{3,}(-ep-[0-9]{3,})?\.safetensors")
FORMAT: Final = str(ManifestFile.model_fields["format"].default).encode()


@dataclass(frozen=True, slots=True)
class SnapshotEntry:
    """One snapshot in `folder`. `manifest_file` is None where its manifest cannot be read.

    `problem` says what is wrong at first sight. `shared` are bytes of its objects that others found with it
    have too.
    """

    folder: Location
    name: str
    manifest_file: ManifestFile | None
    problem: str | None = None
    shared: int = 0

    @property
    def uri(self) -> str:
        """Where its safetensors file lies, or would."""
        return self.folder.child(self.name).uri

    @property
    def size(self) -> int:
        """Bytes of that file."""
        return self.manifest_file.header_bytes + self.manifest_file.image_bytes if self.manifest_file is not None else 0

    @property
    def objects(self) -> dict[str, int]:
        """Path and bytes of each object that it shares or could share; none in the file form."""
        if self.manifest_file is None or self.manifest_file.chunks is None:
            return {}
        within = chunk_folder(self.folder, self.manifest_file.chunks).path
        return {within + name: length for name, length in self.manifest_file.objects}


def read_entry(folder: Location, name: str, settings: StorageSettings | None = None) -> SnapshotEntry:
    """The one snapshot of that name; its `problem` too, but of shared chunks where storage lists nothing.

    Raises StorageNotFound where there is none, StorageCorrupt where what has its manifest's name is another
    program's, and other StorageErrors.
    """
    manifest = manifest_name(name)
    with folder_store(folder, settings) as store:
        try:
            manifest_file = read_manifest(store, manifest)
        except StorageNotFound as missing:
            raise _no_snapshot(store, folder, name, missing) from None
        except StorageCorrupt as error:
            if is_not_ours(store, manifest, strict=False):
                raise
            return SnapshotEntry(folder, name, None, str(error))
        found = SnapshotEntry(folder, name, manifest_file)
        sizes: dict[str, int] = {}
        if manifest_file.chunks is None:
            try:
                with closing(store.open(name)) as blob:
                    sizes[folder.path + name] = blob.size
            except StorageNotFound:
                pass
            return checked(found, sizes, {})
    try:
        chunks = chunk_folder(folder, manifest_file.chunks)
        with folder_store(chunks, settings) as objects:
            sizes = {chunks.path + entry.name: entry.size for entry in objects.list()}
    except StorageCorrupt as error:
        return SnapshotEntry(folder, name, None, str(error))
    except StorageNotFound:
        pass
    except (SettingsError, StorageAccessDenied):
        return found
    return checked(found, sizes, Counter(found.objects))


def _no_snapshot(store: BlobStore, folder: Location, name: str, missing: StorageNotFound) -> StorageNotFound:
    try:
        store.open(name).close()
        hint = "that file has no manifest beside it: a plain safetensors file, or half a snapshot"
    except StorageNotFound:
        hint = missing.hint
    return StorageNotFound(f"there is no snapshot at {folder.child(name).uri.partition('?')[0]}", hint=hint)


def is_not_ours(store: BlobStore, manifest: str, *, strict: bool) -> bool:
    """Whether a file that cannot be read as a manifest is no damaged one of ours, but another program's.

    With `strict`, what is no JSON at all may be ours too.
    """
    if OWN_NAME.fullmatch(manifest.removesuffix(MANIFEST_SUFFIX)):
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


def checked(found: SnapshotEntry, there: Mapping[str, int], users: Mapping[str, int]) -> SnapshotEntry:
    """With what the sizes alone tell, and what it shares."""
    if found.manifest_file is None:
        return found
    problem = None
    if found.manifest_file.chunks is None:
        size = there.get(found.folder.path + found.name)
        if size is None:
            problem = "its data is missing"
        elif size != found.size:
            problem = f"its data has {size} bytes instead of {found.size}"
        return SnapshotEntry(found.folder, found.name, found.manifest_file, problem)
    objects = found.objects
    wrong = [path for path, length in objects.items() if there.get(path) != length]
    if wrong:
        first = wrong[0].rpartition("/")[2]
        problem = f"{len(wrong)} of {len(objects)} chunks are missing or cut short, {first} first"
    shared = sum(length for path, length in objects.items() if users[path] > 1)
    return SnapshotEntry(found.folder, found.name, found.manifest_file, problem, shared)
