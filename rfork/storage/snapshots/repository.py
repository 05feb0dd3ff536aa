"""The snapshots that lie below a place, and what writers that died left there.

Runs where `rfork snapshot ls` and `rm` do.
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
from rfork.errors import StorageCorrupt, StorageMissing
from rfork.settings import StorageSettings
from rfork.storage.blob import Store
from rfork.storage.local.files import TEMPORARY
from rfork.storage.location import Location
from rfork.storage.snapshots.files import (
    MANIFEST_SUFFIX,
    ManifestFile,
    chunks_at,
    manifest_name,
    read_manifest,
    stored,
)
from rfork.storage.snapshots.shared_chunks import NOTE_OF_REMOVAL, PENDING

OWN_NAME: Final = re.compile(r"(.*/)?(model|draft)-rank-[0-9]{3,}(-ep-[0-9]{3,})?\.safetensors")
OBJECT: Final = re.compile(r"(.*/)?(?P<two>[0-9a-f]{2})/(?P=two)[0-9a-f]{30}-[0-9]+")


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


@dataclass(frozen=True, slots=True)
class Leftover:
    """What no snapshot needs: of a writer that died, or is at work now. `name`: as seen from there."""

    name: str
    size: int
    why: str


@dataclass(frozen=True, slots=True)
class Contents:
    """What lies in a repository. `pending` are the objects that writers at work count on."""

    snapshots: tuple[Found, ...]
    leftovers: tuple[Leftover, ...]
    pending: frozenset[str]


class Repository:
    """A folder with snapshots in it and in folders below it.

    Raises StorageErrors, and SettingsError where the kind of storage cannot be listed.
    """

    def __init__(self, folder: Location, settings: StorageSettings | None = None) -> None:
        self.folder = folder.folder
        self.settings = settings or options.load(StorageSettings)

    @contextmanager
    def store(self) -> Iterator[Store]:
        """The store at the folder."""
        with stored(self.folder, self.settings) as store:
            yield store

    def contents(self, *, strict: bool = False) -> Contents:
        """All snapshots and leftovers, by name.

        `strict` is for who removes chunks: a manifest that cannot be read raises StorageCorrupt, and a
        writer that ends its work meanwhile is not overlooked.
        """
        with self.store() as store:
            sizes = {entry.name: entry.size for entry in store.list()}
            notes = self._read(store, [name for name in sizes if PENDING.fullmatch(name)], strict)
            if strict:
                # A note that vanished since was of a snapshot that is there by now.
                sizes = {entry.name: entry.size for entry in store.list()}
            manifests = self._read(store, [name for name in sizes if name.endswith(MANIFEST_SUFFIX)], strict)
        found = [
            self._found(name.removesuffix(MANIFEST_SUFFIX), told, strict) for name, told in manifests.items()
        ]
        noted = [self._found(name, told, strict) for name, told in notes.items()]
        pending = frozenset(path for each in noted for path in each.objects)
        there = self._with_objects(found, sizes)
        users = Counter(path for each in found for path in each.objects)
        snapshots = tuple(_checked(each, there, users) for each in found)
        leftovers = (*self._leftovers(sizes, manifests, users, pending), *_unfinished(self.folder))
        return Contents(snapshots, leftovers, pending)

    def inside(self, contents: Contents) -> list[Found]:
        """The snapshots that lie in the folder itself."""
        return [each for each in contents.snapshots if each.folder == self.folder]

    def _found(self, name: str, told: ManifestFile | str, strict: bool) -> Found:
        head, slash, last = name.rpartition("/")
        folder = self.folder.child(head + slash) if slash else self.folder
        if isinstance(told, str):
            return Found(folder, last, None, told)
        if told.chunks is not None:
            try:
                chunks_at(folder, told.chunks)
            except StorageCorrupt as error:
                if strict:
                    raise
                return Found(folder, last, None, str(error))
        return Found(folder, last, told)

    def _read(self, store: Store, names: Sequence[str], strict: bool) -> dict[str, ManifestFile | str]:
        """The manifests of these names that are still there; of a broken one what is wrong with it."""

        def read(name: str) -> ManifestFile | str | None:
            try:
                return read_manifest(store, name)
            except StorageMissing:
                return None
            except StorageCorrupt as error:
                if strict:
                    raise
                return str(error)

        with ThreadPoolExecutor(self.settings.streams, thread_name_prefix="rfork-list") as pool:
            told = list(pool.map(read, names))
        return {name: each for name, each in zip(names, told, strict=True) if each is not None}

    def _with_objects(self, found: Sequence[Found], sizes: Mapping[str, int]) -> dict[str, int]:
        """Bytes by path of all that was listed, and of the folders of chunks that lie elsewhere."""
        there = {self.folder.path + name: size for name, size in sizes.items()}
        elsewhere = {
            chunks_at(each.folder, each.told.chunks)
            for each in found
            if each.told is not None and each.told.chunks is not None
        }
        for chunks in elsewhere:
            if not chunks.path.startswith(self.folder.path):
                with stored(chunks, self.settings) as store:
                    try:
                        there |= {chunks.path + entry.name: entry.size for entry in store.list()}
                    except StorageMissing:  # each of its objects is missing, then
                        continue
        return there

    def _leftovers(
        self,
        sizes: Mapping[str, int],
        manifests: Mapping[str, ManifestFile | str],
        users: Mapping[str, int],
        pending: frozenset[str],
    ) -> Iterator[Leftover]:
        for name, size in sizes.items():
            path = self.folder.path + name
            chunk = OBJECT.fullmatch(name)
            if PENDING.fullmatch(name):
                yield Leftover(name, size, "note of a snapshot that is written now, or whose writer died")
            elif NOTE_OF_REMOVAL.fullmatch(name):
                yield Leftover(name, size, "note of somebody who removes chunks now, or died at it")
            elif OWN_NAME.fullmatch(name) and manifest_name(name) not in manifests:
                yield Leftover(name, size, "data without a manifest")
            # Who uses chunks lies below the folder that theirs lies in: only seen from there.
            elif chunk and chunk[1] and path not in users and path not in pending:
                yield Leftover(name, size, "chunk that no snapshot names")


def found_at(folder: Location, name: str, settings: StorageSettings | None = None) -> Found:
    """The one snapshot of that name, without listing anything. Raises as `read_manifest`."""
    with stored(folder, settings) as store:
        return Found(folder, name, read_manifest(store, manifest_name(name)))


def _unfinished(folder: Location) -> Iterator[Leftover]:
    """Files that are still written, which no listing shows, or whose writer was killed."""
    if folder.scheme != "file":
        return
    top = Path(folder.path)
    for path in sorted(top.rglob(".*.tmp")):
        if TEMPORARY.fullmatch(path.name):
            try:
                size = path.stat().st_size
            except FileNotFoundError:  # whole by now
                continue
            yield Leftover(
                path.relative_to(top).as_posix(), size, "file that is written now, or half-written"
            )


def _checked(found: Found, there: Mapping[str, int], users: Mapping[str, int]) -> Found:
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
