"""Lists and removes snapshots below a folder, and the leftovers of dead writers.

Writers and deleters of shared chunks coordinate with two types of marker files, so that no referenced chunk is lost:
a writer marks the chunks it references before it checks which exist; a deleter marks that it is deleting before it
checks which chunks are referenced. Each then checks for the other's marker, so that at least one of two concurrent
processes sees the other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import uuid4

from rfork import settings as options
from rfork.errors import StorageCorrupt, StorageError, StorageNotFound
from rfork.logs import logger
from rfork.settings import StorageSettings
from rfork.storage import registry
from rfork.storage.blob import BlobStore, size_of
from rfork.storage.local import TEMPORARY
from rfork.storage.location import Location
from rfork.storage.snapshots.entry import (
    DATA_SUFFIX,
    MANIFEST_SUFFIX,
    RANK_FILE_PATTERN,
    ManifestFile,
    SnapshotEntry,
    chunk_folder,
    is_foreign_manifest,
    manifest_name,
    read_manifest,
    with_problems,
)

log = logger(__name__)

WRITE_MARKER_PATTERN = re.compile(rf"(?P<name>.+){re.escape(MANIFEST_SUFFIX)}\.[0-9a-f]{{32}}\.pending")
"""Writer's marker, stored next to the future manifest with the same content."""
DELETE_MARKER_PREFIX = "removing-"
"""Name prefix of a deleter's marker in the folder of chunks."""
DELETE_MARKER_PATTERN = re.compile(rf"(.*/)?{DELETE_MARKER_PREFIX}[0-9a-f]{{32}}")

OBJECT: Final = re.compile(r"(.*/)?(?P<two>[0-9a-f]{2})/(?P=two)[0-9a-f]{30}-[0-9]+")


@contextmanager
def pending_write(
    store: BlobStore, name: str, manifest_file: ManifestFile, chunks: BlobStore
) -> Iterator[Callable[[], None]]:
    """Reference the shared chunks of `manifest_file`, whose manifest is written to `store` within the block.

    The block must call the yielded function just before it writes the manifest. The function raises
    StorageError if the marker was removed as a leftover meanwhile, possibly with chunks. Entering the block
    raises StorageError while another process is deleting chunks.
    """
    marker = f"{manifest_name(name)}.{uuid4().hex}.pending"
    write_blob(store, marker, manifest_file.model_dump_json().encode())
    try:
        if active_deletes(chunks):
            raise StorageError(
                f"{chunks.uri}: another process is deleting chunks here",
                hint="try again; if that process died, clean up with `rfork snapshot rm --leftovers`",
            )
        yield lambda: _check_marker(store, marker)
    except BaseException:
        best_effort_remove(store, marker)
        raise
    store.remove(marker)


@contextmanager
def pending_delete(chunks: BlobStore) -> Iterator[None]:
    """Mark that unreferenced chunks are deleted within the block."""
    marker = f"{DELETE_MARKER_PREFIX}{uuid4().hex}"
    write_blob(chunks, marker, b"")
    try:
        yield
    finally:
        chunks.remove(marker)


def active_deletes(chunks: BlobStore) -> list[str]:
    """Return the markers of processes that delete chunks, or died doing so."""
    try:
        return [entry.name for entry in chunks.list(DELETE_MARKER_PREFIX)]
    except StorageNotFound:  # the folder does not exist yet
        return []


def best_effort_remove(store: BlobStore, name: str) -> None:
    """Remove a file after an error. Failures are only logged: the original error counts, and `ls` lists
    leftovers.
    """
    try:
        store.remove(name)
    except StorageError as error:
        log.warning("failed to remove a leftover file", name=f"{store.uri}{name}", reason=str(error))


def write_blob(store: BlobStore, name: str, content: bytes) -> None:
    """Write one small blob."""
    with store.write(name) as writer:
        writer.write([memoryview(content)])


def _check_marker(store: BlobStore, marker: str) -> None:
    if size_of(store, marker) is None:
        raise StorageError(
            f"{store.uri}: another process removed leftovers during the write, including the marker of this writer",
            hint="write the snapshot again",
        )


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

    def contents(self, *, strict: bool = False) -> Listing:
        """Return all snapshots and leftovers, sorted by name.

        `strict` is for deleting chunks: an unreadable manifest raises StorageCorrupt, and snapshots of
        writers that finish during the listing are included.
        """
        with closing(registry.open_store(self.folder, self.settings)) as store:
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
                with closing(registry.open_store(chunks, self.settings)) as store:
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
    with closing(registry.open_store(repository.folder, repository.settings)) as store:
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
            with closing(registry.open_store(chunks, repository.settings)) as objects, pending_delete(objects):
                for leftover in repository.contents(strict=True).leftovers:
                    if OBJECT.fullmatch(leftover.name) and leftover.name.startswith(f"{folder}/"):
                        store.remove(leftover.name)
                        count, freed = count + 1, freed + leftover.size
    return DeleteResult(count, freed)


def _remove_file(entry: SnapshotEntry, settings: StorageSettings | None) -> DeleteResult:
    with closing(registry.open_store(entry.folder, settings)) as store:
        store.remove(manifest_name(entry.name))
        size = size_of(store, entry.name)
        if size is not None:
            store.remove(entry.name)
        return DeleteResult(0, size or 0)


def _remove_shared(chunks: Location, group: Sequence[SnapshotEntry], settings: StorageSettings | None) -> DeleteResult:
    deleted = {entry.uri for entry in group}
    above = Location(chunks.scheme, chunks.host, chunks.path.rstrip("/").rpartition("/")[0]).folder
    with closing(registry.open_store(chunks, settings)) as objects, pending_delete(objects):
        # All snapshots that may reference these chunks are below the parent of the chunk folder.
        contents = Repository(above, settings).contents(strict=True)
        remaining = [entry for entry in contents.snapshots if entry.uri not in deleted]
        needed = contents.pending.union(*(entry.objects for entry in remaining))
        for entry in group:
            with closing(registry.open_store(entry.folder, settings)) as store:
                store.remove(manifest_name(entry.name))
        freed = retained_bytes = 0
        for path, length in {path: size for entry in group for path, size in entry.objects.items()}.items():
            if path in needed:
                retained_bytes += length
            else:
                objects.remove(path.removeprefix(chunks.path))
                freed += length
    return DeleteResult(0, freed, retained_bytes)
