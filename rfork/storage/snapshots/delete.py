"""Removes snapshots and the leftovers of dead writers. Runs in `rfork snapshot rm`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rfork.errors import StorageNotFound
from rfork.settings import StorageSettings
from rfork.storage.location import Location
from rfork.storage.snapshots.chunk_refs import pending_delete
from rfork.storage.snapshots.entry import SnapshotEntry
from rfork.storage.snapshots.files import chunk_folder, folder_store, manifest_name
from rfork.storage.snapshots.repository import OBJECT, Repository


@dataclass(frozen=True, slots=True)
class DeleteResult:
    """Number and size of removed snapshots or leftovers; `retained_bytes` are chunks that other snapshots
    need.
    """

    count: int
    freed: int
    retained_bytes: int = 0

    def merge(self, other: DeleteResult) -> DeleteResult:
        """Return the sum of both."""
        return DeleteResult(
            self.count + other.count, self.freed + other.freed, self.retained_bytes + other.retained_bytes
        )


def remove_snapshots(snapshots: Sequence[SnapshotEntry], settings: StorageSettings | None = None) -> DeleteResult:
    """Remove snapshots: each manifest first, then the data, or the shared chunks that no other snapshot
    references.

    Raises StorageCorrupt if a manifest that may reference the same chunks cannot be read (then no snapshot
    that uses these chunks is removed), SettingsError for read-only storage, and StorageErrors.
    """
    removed = DeleteResult(len(snapshots), 0)
    shared: dict[Location, list[SnapshotEntry]] = {}
    for entry in snapshots:
        if entry.manifest_file is not None and entry.manifest_file.chunks is not None:
            shared.setdefault(chunk_folder(entry.folder, entry.manifest_file.chunks), []).append(entry)
        else:
            removed = removed.merge(_remove_file(entry, settings))
    for chunks, group in shared.items():
        removed = removed.merge(_remove_shared(chunks, group, settings))
    return removed


def remove_leftovers(repository: Repository) -> DeleteResult:
    """Remove everything that no snapshot needs. Writers that are active there fail and must start again."""
    count = freed = 0
    with repository.store() as store:
        for leftover in repository.contents().leftovers:
            if not OBJECT.fullmatch(leftover.name):
                store.remove(leftover.name)
                count, freed = count + 1, freed + leftover.size
        # List again: without the removed markers, more chunks may be unreferenced.
        folders = {
            leftover.name.rpartition("/")[0].rpartition("/")[0]
            for leftover in repository.contents().leftovers
            if OBJECT.fullmatch(leftover.name)
        }
        for folder in sorted(folders):
            chunks = repository.folder.child(f"{folder}/")
            with folder_store(chunks, repository.settings) as objects, pending_delete(objects):
                for leftover in repository.contents(strict=True).leftovers:
                    if OBJECT.fullmatch(leftover.name) and leftover.name.startswith(f"{folder}/"):
                        store.remove(leftover.name)
                        count, freed = count + 1, freed + leftover.size
    return DeleteResult(count, freed)


def _remove_file(entry: SnapshotEntry, settings: StorageSettings | None) -> DeleteResult:
    with folder_store(entry.folder, settings) as store:
        store.remove(manifest_name(entry.name))
        try:
            blob = store.open(entry.name)
        except StorageNotFound:
            return DeleteResult(0, 0)
        blob.close()
        store.remove(entry.name)
        return DeleteResult(0, blob.size)


def _remove_shared(chunks: Location, group: Sequence[SnapshotEntry], settings: StorageSettings | None) -> DeleteResult:
    deleted = {entry.uri for entry in group}
    above = Location(chunks.scheme, chunks.host, chunks.path.rstrip("/").rpartition("/")[0]).folder
    with folder_store(chunks, settings) as objects, pending_delete(objects):
        # All snapshots that may reference these chunks are below the parent of the chunk folder.
        contents = Repository(above, settings).contents(strict=True)
        remaining = [entry for entry in contents.snapshots if entry.uri not in deleted]
        needed = contents.pending.union(*(entry.objects for entry in remaining))
        for entry in group:
            with folder_store(entry.folder, settings) as store:
                store.remove(manifest_name(entry.name))
        freed = retained_bytes = 0
        for path, length in {path: size for entry in group for path, size in entry.objects.items()}.items():
            if path in needed:
                retained_bytes += length
            else:
                objects.remove(path.removeprefix(chunks.path))
                freed += length
    return DeleteResult(0, freed, retained_bytes)
