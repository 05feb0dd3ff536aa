"""Lists snapshots below a folder, and the leftovers of dead writers.

Runs in `rfork snapshot ls` and `rm`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rfork import settings as options
from rfork.errors import StorageCorrupt, StorageNotFound
from rfork.settings import StorageSettings
from rfork.storage.blob import BlobStore
from rfork.storage.local.files import TEMPORARY
from rfork.storage.location import Location
from rfork.storage.snapshots.chunk_refs import DELETE_MARKER_PATTERN, WRITE_MARKER_PATTERN
from rfork.storage.snapshots.entry import RANK_FILE_PATTERN, SnapshotEntry, is_foreign_manifest, with_problems
from rfork.storage.snapshots.files import (
    DATA_SUFFIX,
    MANIFEST_SUFFIX,
    ManifestFile,
    chunk_folder,
    folder_store,
    manifest_name,
    read_manifest,
)

OBJECT: Final = re.compile(r"(.*/)?(?P<two>[0-9a-f]{2})/(?P=two)[0-9a-f]{30}-[0-9]+")


@dataclass(frozen=True, slots=True)
class OrphanedObject:
    """A file that no snapshot needs, of a dead or active writer. `name` is relative to the repository."""

    name: str
    size: int
    why: str


@dataclass(frozen=True, slots=True)
class Listing:
    """Content of a repository. `pending` are the objects that active writers reference."""

    snapshots: tuple[SnapshotEntry, ...]
    leftovers: tuple[OrphanedObject, ...]
    pending: frozenset[str]


class Repository:
    """A folder with snapshots in it and in its subfolders.

    Raises StorageErrors, and SettingsError if the storage cannot be listed.
    """

    def __init__(self, folder: Location, settings: StorageSettings | None = None) -> None:
        self.folder = folder.folder
        self.settings = settings or options.load(StorageSettings)

    @contextmanager
    def store(self) -> Iterator[BlobStore]:
        """Yield the store of the folder."""
        with folder_store(self.folder, self.settings) as store:
            yield store

    def contents(self, *, strict: bool = False) -> Listing:
        """Return all snapshots and leftovers, sorted by name.

        `strict` is for deleting chunks: an unreadable manifest raises StorageCorrupt, and snapshots of
        writers that finish during the listing are included.
        """
        with self.store() as store:
            sizes = {entry.name: entry.size for entry in store.list()}
            markers = self._read(store, [name for name in sizes if WRITE_MARKER_PATTERN.fullmatch(name)], strict)
            if strict:
                # A marker that disappeared belonged to a snapshot that exists by now.
                sizes = {entry.name: entry.size for entry in store.list()}
            manifest_names = [name for name in sizes if name.endswith(DATA_SUFFIX + MANIFEST_SUFFIX)]
            manifests = self._read(store, manifest_names, strict)
        entries = [
            self._entry(name.removesuffix(MANIFEST_SUFFIX), manifest_file, strict)
            for name, manifest_file in manifests.items()
        ]
        pending_entries = [self._entry(name, manifest_file, strict) for name, manifest_file in markers.items()]
        pending = frozenset(path for each in pending_entries for path in each.objects)
        object_sizes = self._object_sizes(entries, sizes)
        users = Counter(path for each in entries for path in each.objects)
        snapshots = tuple(with_problems(each, object_sizes, users) for each in entries)
        leftovers = (*self._leftovers(sizes, manifests, users, pending), *_unfinished(self.folder))
        return Listing(snapshots, leftovers, pending)

    def entries_in(self, contents: Listing) -> list[SnapshotEntry]:
        """Return the snapshots in the folder itself."""
        return [each for each in contents.snapshots if each.folder == self.folder]

    def _entry(self, name: str, manifest_file: ManifestFile | str, strict: bool) -> SnapshotEntry:
        head, slash, last = name.rpartition("/")
        folder = self.folder.child(head + slash) if slash else self.folder
        if isinstance(manifest_file, str):
            return SnapshotEntry(folder, last, None, manifest_file)
        if manifest_file.chunks is not None:
            try:
                chunk_folder(folder, manifest_file.chunks)
            except StorageCorrupt as error:
                if strict:
                    raise
                return SnapshotEntry(folder, last, None, str(error))
        return SnapshotEntry(folder, last, manifest_file)

    def _read(self, store: BlobStore, names: Sequence[str], strict: bool) -> dict[str, ManifestFile | str]:
        """Return these manifests, if they still exist; for a damaged one, a description of the damage.

        Other programs may use the same file names: files without our format marker are omitted.
        """

        def read(name: str) -> ManifestFile | str | None:
            try:
                return read_manifest(store, name)
            except StorageNotFound:
                return None
            except StorageCorrupt as error:
                if is_foreign_manifest(store, name, strict=strict):
                    return None
                if strict:
                    raise
                return str(error)

        with ThreadPoolExecutor(self.settings.concurrency, thread_name_prefix="rfork-list") as pool:
            results = list(pool.map(read, names))
        return {name: each for name, each in zip(names, results, strict=True) if each is not None}

    def _object_sizes(self, entries: Sequence[SnapshotEntry], sizes: Mapping[str, int]) -> dict[str, int]:
        """Return sizes by path of all listed objects, and of those in chunk folders elsewhere."""
        object_sizes = {self.folder.path + name: size for name, size in sizes.items()}
        elsewhere = {
            chunk_folder(each.folder, each.manifest_file.chunks)
            for each in entries
            if each.manifest_file is not None and each.manifest_file.chunks is not None
        }
        for chunks in elsewhere:
            if not chunks.path.startswith(self.folder.path):
                with folder_store(chunks, self.settings) as store:
                    try:
                        object_sizes |= {chunks.path + entry.name: entry.size for entry in store.list()}
                    except StorageNotFound:  # then all of its objects are missing
                        continue
        return object_sizes

    def _leftovers(
        self,
        sizes: Mapping[str, int],
        manifests: Mapping[str, ManifestFile | str],
        users: Mapping[str, int],
        pending: frozenset[str],
    ) -> Iterator[OrphanedObject]:
        for name, size in sizes.items():
            path = self.folder.path + name
            chunk = OBJECT.fullmatch(name)
            if WRITE_MARKER_PATTERN.fullmatch(name):
                yield OrphanedObject(name, size, "marker of a snapshot that is being written, or whose writer died")
            elif DELETE_MARKER_PATTERN.fullmatch(name):
                yield OrphanedObject(name, size, "marker of a process that is deleting chunks, or died doing so")
            elif RANK_FILE_PATTERN.fullmatch(name) and manifest_name(name) not in manifests:
                yield OrphanedObject(name, size, "data without a manifest")
            # References to a chunk are below the parent of its folder, so they are only known if the listing
            # starts there.
            elif chunk and chunk[1] and path not in users and path not in pending:
                yield OrphanedObject(name, size, "chunk without a snapshot")


def _unfinished(folder: Location) -> Iterator[OrphanedObject]:
    """Iterate over temporary files, which listings omit: being written, or of killed writers."""
    if folder.scheme != "file":
        return
    top = Path(folder.path)
    for path in sorted(top.rglob(".*.tmp")):
        if TEMPORARY.fullmatch(path.name):
            try:
                size = path.stat().st_size
            except FileNotFoundError:  # complete by now
                continue
            yield OrphanedObject(path.relative_to(top).as_posix(), size, "file that is being written, or incomplete")
