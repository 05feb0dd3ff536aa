"""One snapshot in storage, as it is seen without reading its data. Runs where `rfork snapshot ls` does."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from rfork.errors import SettingsError, StorageCorrupt, StorageDenied, StorageMissing
from rfork.settings import StorageSettings
from rfork.storage.blob import Store, part
from rfork.storage.location import Location
from rfork.storage.snapshots.files import (
    LONGEST_MANIFEST,
    MANIFEST_SUFFIX,
    ManifestFile,
    chunks_at,
    manifest_name,
    read_manifest,
    stored,
)

OWN_NAME: Final = re.compile(r"(.*/)?(model|draft)-rank-[0-9]{3,}(-ep-[0-9]{3,})?\.safetensors")
FORMAT: Final = str(ManifestFile.model_fields["format"].default).encode()


@dataclass(frozen=True, slots=True)
class Found:
    """One snapshot in `folder`. `told` is None where its manifest cannot be read.

    `trouble` says what is wrong at first sight. `shared` are bytes of its objects that others found with it
    have too.
    """

    folder: Location
    name: str
    told: ManifestFile | None
    trouble: str | None = None
    shared: int = 0

    @property
    def uri(self) -> str:
        """Where its safetensors file lies, or would."""
        return self.folder.child(self.name).uri

    @property
    def size(self) -> int:
        """Bytes of that file."""
        return self.told.header_bytes + self.told.image_bytes if self.told is not None else 0

    @property
    def objects(self) -> dict[str, int]:
        """Path and bytes of each object that it shares or could share; none in the file form."""
        if self.told is None or self.told.chunks is None:
            return {}
        within = chunks_at(self.folder, self.told.chunks).path
        return {within + name: length for name, length in self.told.objects}


def found_at(folder: Location, name: str, settings: StorageSettings | None = None) -> Found:
    """The one snapshot of that name; its `trouble` too, but of shared chunks where storage lists nothing.

    Raises StorageMissing where there is none, StorageCorrupt where what has its manifest's name is another
    program's, and other StorageErrors.
    """
    manifest = manifest_name(name)
    with stored(folder, settings) as store:
        try:
            told = read_manifest(store, manifest)
        except StorageMissing as missing:
            raise _no_snapshot(store, folder, name, missing) from None
        except StorageCorrupt as error:
            if is_foreign(store, manifest, strict=False):
                raise
            return Found(folder, name, None, str(error))
        found = Found(folder, name, told)
        sizes: dict[str, int] = {}
        if told.chunks is None:
            try:
                with closing(store.open(name)) as blob:
                    sizes[folder.path + name] = blob.size
            except StorageMissing:
                pass
            return checked(found, sizes, {})
    try:
        chunks = chunks_at(folder, told.chunks)
        with stored(chunks, settings) as objects:
            sizes = {chunks.path + entry.name: entry.size for entry in objects.list()}
    except StorageCorrupt as error:
        return Found(folder, name, None, str(error))
    except StorageMissing:
        pass
    except (SettingsError, StorageDenied):
        return found
    return checked(found, sizes, Counter(found.objects))


def _no_snapshot(store: Store, folder: Location, name: str, missing: StorageMissing) -> StorageMissing:
    try:
        store.open(name).close()
        hint = "that file has no manifest beside it: a plain safetensors file, or half a snapshot"
    except StorageMissing:
        hint = missing.hint
    return StorageMissing(f"there is no snapshot at {folder.child(name).uri.partition('?')[0]}", hint=hint)


def is_foreign(store: Store, manifest: str, *, strict: bool) -> bool:
    """Whether a file that cannot be read as a manifest is no damaged one of ours, but another program's.

    With `strict`, what is no JSON at all may be ours too.
    """
    if OWN_NAME.fullmatch(manifest.removesuffix(MANIFEST_SUFFIX)):
        return False
    with closing(store.open(manifest)) as blob:
        text = part(blob, 0, min(blob.size, LONGEST_MANIFEST))
    if FORMAT in text:
        return False
    if strict:
        try:
            json.loads(text)
        except ValueError:
            return False
    return True


def checked(found: Found, there: Mapping[str, int], users: Mapping[str, int]) -> Found:
    """With what the sizes alone tell, and what it shares."""
    if found.told is None:
        return found
    trouble = None
    if found.told.chunks is None:
        size = there.get(found.folder.path + found.name)
        if size is None:
            trouble = "its data is missing"
        elif size != found.size:
            trouble = f"its data has {size} bytes instead of {found.size}"
        return Found(found.folder, found.name, found.told, trouble)
    objects = found.objects
    wrong = [path for path, length in objects.items() if there.get(path) != length]
    if wrong:
        first = wrong[0].rpartition("/")[2]
        trouble = f"{len(wrong)} of {len(objects)} chunks are missing or cut short, {first} first"
    shared = sum(length for path, length in objects.items() if users[path] > 1)
    return Found(found.folder, found.name, found.told, trouble, shared)
