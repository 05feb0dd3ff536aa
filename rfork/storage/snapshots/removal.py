"""Removing snapshots, and what writers that died left behind. Runs where `rfork snapshot rm` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rfork.errors import StorageMissing
from rfork.settings import StorageSettings
from rfork.storage.location import Location
from rfork.storage.snapshots.files import chunks_at, manifest_name, stored
from rfork.storage.snapshots.found import Found
from rfork.storage.snapshots.repository import OBJECT, Repository
from rfork.storage.snapshots.shared_chunks import removing


@dataclass(frozen=True, slots=True)
class Removed:
    """Snapshots or leftovers that are gone, and their bytes; `kept` are of chunks that others need."""

    count: int
    freed: int
    kept: int = 0

    def and_(self, other: Removed) -> Removed:
        """Both together."""
        return Removed(self.count + other.count, self.freed + other.freed, self.kept + other.kept)


def remove_snapshots(snapshots: Sequence[Found], settings: StorageSettings | None = None) -> Removed:
    """Remove these: each manifest first, then the data; of shared chunks those that no other snapshot names.

    Raises StorageCorrupt where a manifest that may name the same chunks cannot be read (nothing of these
    chunks' snapshots is removed then), SettingsError for storage that can only be read, and StorageErrors.
    """
    removed = Removed(len(snapshots), 0)
    shared: dict[Location, list[Found]] = {}
    for found in snapshots:
        if found.told is not None and found.told.chunks is not None:
            shared.setdefault(chunks_at(found.folder, found.told.chunks), []).append(found)
        else:
            removed = removed.and_(_remove_file(found, settings))
    for chunks, group in shared.items():
        removed = removed.and_(_remove_shared(chunks, group, settings))
    return removed


def remove_leftovers(repository: Repository) -> Removed:
    """Remove what no snapshot needs. A writer that is at work there then fails, and has to begin again."""
    count = freed = 0
    with repository.store() as store:
        for leftover in repository.contents().leftovers:
            if not OBJECT.fullmatch(leftover.name):
                store.remove(leftover.name)
                count, freed = count + 1, freed + leftover.size
        # Seen anew: without the notes that are gone now, more chunks may have become nobody's.
        folders = {
            leftover.name.rpartition("/")[0].rpartition("/")[0]
            for leftover in repository.contents().leftovers
            if OBJECT.fullmatch(leftover.name)
        }
        for folder in sorted(folders):
            chunks = repository.folder.child(f"{folder}/")
            with stored(chunks, repository.settings) as objects, removing(objects):
                for leftover in repository.contents(strict=True).leftovers:
                    if OBJECT.fullmatch(leftover.name) and leftover.name.startswith(f"{folder}/"):
                        store.remove(leftover.name)
                        count, freed = count + 1, freed + leftover.size
    return Removed(count, freed)


def _remove_file(found: Found, settings: StorageSettings | None) -> Removed:
    with stored(found.folder, settings) as store:
        store.remove(manifest_name(found.name))
        try:
            blob = store.open(found.name)
        except StorageMissing:
            return Removed(0, 0)
        blob.close()
        store.remove(found.name)
        return Removed(0, blob.size)


def _remove_shared(chunks: Location, group: Sequence[Found], settings: StorageSettings | None) -> Removed:
    going = {found.uri for found in group}
    above = Location(chunks.scheme, chunks.host, chunks.path.rstrip("/").rpartition("/")[0]).folder
    with stored(chunks, settings) as objects, removing(objects):
        # All who may name these chunks lie below the folder that theirs lies in.
        contents = Repository(above, settings).contents(strict=True)
        others = [found for found in contents.snapshots if found.uri not in going]
        needed = contents.pending.union(*(found.objects for found in others))
        for found in group:
            with stored(found.folder, settings) as store:
                store.remove(manifest_name(found.name))
        freed = kept = 0
        for path, length in {path: size for found in group for path, size in found.objects.items()}.items():
            if path in needed:
                kept += length
            else:
                objects.remove(path.removeprefix(chunks.path))
                freed += length
    return Removed(0, freed, kept)
