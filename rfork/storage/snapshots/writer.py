"""Writing snapshots: an image as one safetensors file, or as chunks that snapshots share, and its manifest.

The manifest is written last, and whole or not at all: until then no reader takes what lies there for a
snapshot of these weights. Runs wherever the weights are.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rfork import settings as options
from rfork.errors import SettingsError, SourceChanged, StorageCorrupt, StorageMissing
from rfork.image.digest import RunningDigest, digest_bytes
from rfork.image.layout import Layout
from rfork.image.manifest import Manifest
from rfork.image.safetensors_header import header
from rfork.settings import StorageSettings
from rfork.storage.blob import Store, Writer
from rfork.storage.location import Location
from rfork.storage.snapshots.files import (
    CHUNKS_BESIDE,
    CHUNKS_FOLDER,
    ManifestFile,
    chunks_at,
    manifest_name,
    place_of,
    stored,
)
from rfork.storage.snapshots.shared_chunks import announced, clear_away, put
from rfork.storage.snapshots.target import check_target
from rfork.storage.versions.version import checked_version
from rfork.wire import Rank

PIECE_BYTES = 16 << 20
"""What is handed to a store at once; of a GPU's memory, what is brought to the host at once."""
DIGESTS_BEHIND = 2
"""Chunks that may be written before the digest of an earlier one is known."""


@dataclass(frozen=True, slots=True)
class Written:
    """What writing a snapshot did, in bytes; `already` were there, from other ranks and revisions."""

    uri: str
    weights_id: str
    written: int
    already: int


class Readable(Protocol):
    """What is written: an `Image`, or what reads one in its place; see there for what these do."""

    @property
    def layout(self) -> Layout:
        """See `Image`."""
        ...

    def readable(self, begin: int, end: int) -> AbstractContextManager[Sequence[memoryview]]:
        """See `Image.readable`."""
        ...

    def digest(self, chunk: int) -> bytes:
        """See `Image.digest`."""
        ...


def write_snapshot(
    image: Readable,
    manifest: Manifest,
    uri: str | Path,
    *,
    rank: Rank | None = None,
    model: str | None = None,
    version: str | None = None,
    shared: bool = False,
    chunks: str = CHUNKS_BESIDE,
    check: bool = False,
    progress: Callable[[int], None] | None = None,
    settings: StorageSettings | None = None,
) -> Written:
    """Write an image and its manifest to the file that `uri` names, or as the rank's in that folder.

    `version` is recorded in the manifest: that of the weights, the same for all ranks.
    With `shared` the header and each chunk become objects in the folder `chunks` (seen from the
    snapshot's own), so that equal ones are stored once; with `check` those that are there already are read,
    and written again where they do not match. What was there under this name is replaced.
    `progress` is told bytes, one call at a time. Raises SourceChanged where the bytes are not those of the
    manifest any more, SettingsError for a place that cannot be written to, and StorageErrors: what lies there
    is then the snapshot before, or nothing that passes for one.
    """
    folder, name = place_of(uri, rank)
    check_target(uri, settings)
    if version is not None:
        checked_version(version)
    job = _Job(image, manifest, check, progress, settings or options.load(StorageSettings))
    head = header(image.layout, manifest.weights_id)
    told = ManifestFile(
        model=model,
        version=version,
        rank=rank or Rank(),
        layout_id=image.layout.layout_id,
        weights_id=manifest.weights_id,
        image_bytes=image.layout.image_bytes,
        header_bytes=len(head),
        header=digest_bytes([memoryview(head)]).hex(),
        digests=tuple(digest.hex() for digest in manifest.digests),
        chunks=_within(folder, chunks) if shared else None,
    )
    with stored(folder, job.settings) as store:
        if told.chunks is not None:
            with stored(chunks_at(folder, told.chunks), job.settings) as objects:
                job.share(store, name, objects, told, head)
        else:
            with store.write(name) as writer:
                writer.write([memoryview(head)])
                job.stream(writer)
            job.written += len(head) + image.layout.image_bytes
            try:
                _commit(store, name, told)
            except BaseException:
                clear_away(store, name)
                raise
    return Written(folder.child(name).uri, manifest.weights_id, job.written, job.already)


@dataclass(slots=True)
class _Job:
    """One image on its way into storage."""

    image: Readable
    manifest: Manifest
    check: bool
    progress: Callable[[int], None] | None
    settings: StorageSettings
    written: int = 0
    already: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def stream(self, writer: Writer) -> None:
        """Write all chunks, and find each right after it was written: what changes meanwhile is an error."""
        behind: deque[Future[None]] = deque()
        with ThreadPoolExecutor(DIGESTS_BEHIND, thread_name_prefix="rfork-digest") as pool:
            for chunk in range(len(self.image.layout.chunks)):
                self._write(writer, chunk)
                behind.append(pool.submit(self._check, chunk))
                if len(behind) > DIGESTS_BEHIND:
                    behind.popleft().result()
            for check in behind:
                check.result()

    def share(self, store: Store, name: str, chunks: Store, told: ManifestFile, head: bytes) -> None:
        """Write what is not there yet of header and chunks, then the manifest."""
        (first, _), *others = told.objects
        with announced(store, name, told, chunks) as confirm:
            self._share(chunks, first, head)
            places: dict[str, int] = {}
            for index, (object_, length) in enumerate(others):
                if places.setdefault(object_, index) != index:  # of equal chunks one is enough
                    self._tell(length)
                    self._account(length, written=False)
            # Each may keep its chunk in memory; one that is larger than all of it goes out in parts.
            size, most = self.image.layout.chunks.chunk_size, self.settings
            writers = max(1, min(most.streams, most.memory // size))
            with ThreadPoolExecutor(writers, thread_name_prefix="rfork-write") as pool:
                given = [
                    pool.submit(self._share, chunks, object_, index) for object_, index in places.items()
                ]
                try:
                    for done in given:
                        done.result()
                except BaseException:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise
            # Gone before the manifest says that it does not count: it may be of other weights.
            store.remove(name)
            confirm()
            _commit(store, name, told)

    def _share(self, chunks: Store, name: str, what: int | bytes) -> None:
        """One object, a chunk or the header, unless it is there; where asked for, unless it is right."""
        length = len(what) if isinstance(what, bytes) else _length(self.image, what)
        size = _size(chunks, name)
        new = size != length or (
            self.check and _digest(chunks, name) != name.rpartition("/")[2].partition("-")[0]
        )
        if new:
            with chunks.write(name, replace=size is not None) as writer:
                if isinstance(what, bytes):
                    writer.write([memoryview(what)])
                else:
                    self._write(writer, what)
                    self._check(what)
        elif not isinstance(what, bytes):
            self._tell(length)
        self._account(length, written=new)

    def _write(self, writer: Writer, chunk: int) -> None:
        begin, end = self.image.layout.chunks[chunk]
        for low in range(begin, end, PIECE_BYTES):
            high = min(low + PIECE_BYTES, end)
            with self.image.readable(low, high) as views:
                writer.write(views)
            self._tell(high - low)

    def _check(self, chunk: int) -> None:
        if self.image.digest(chunk) != self.manifest.digests[chunk]:
            raise SourceChanged(
                f"the weights changed while their snapshot was written: chunk {chunk} is not what it was",
                hint="write it again once they are at rest",
            )

    def _tell(self, count: int) -> None:
        if self.progress is not None:
            with self._lock:
                self.progress(count)

    def _account(self, length: int, *, written: bool) -> None:
        with self._lock:
            self.written += length if written else 0
            self.already += 0 if written else length


def _commit(store: Store, name: str, told: ManifestFile) -> None:
    put(store, manifest_name(name), told.model_dump_json(exclude_none=True).encode())


def _within(folder: Location, chunks: str) -> str:
    """The folder of chunks as the manifest names it: a bucket's own top has nothing above it."""
    if not CHUNKS_FOLDER.fullmatch(chunks):
        raise SettingsError(
            f"{chunks!r} is no folder for shared chunks",
            hint=f"one name, beside the snapshot's folder or one above it, e.g. {CHUNKS_BESIDE}",
        )
    within = chunks if folder.path.strip("/") else chunks.removeprefix("../")
    try:
        chunks_at(folder, within)
    except StorageCorrupt as error:
        raise SettingsError(str(error)) from None
    return within


def _length(image: Readable, chunk: int) -> int:
    begin, end = image.layout.chunks[chunk]
    return end - begin


def _size(store: Store, name: str) -> int | None:
    """The bytes of a blob, or None where there is none."""
    try:
        blob = store.open(name)
    except StorageMissing:
        return None
    try:
        return blob.size
    finally:
        blob.close()


def _digest(store: Store, name: str) -> str | None:
    """What the bytes of a blob hash to, or None where they cannot be read whole."""
    state = RunningDigest()
    with closing(store.open(name)) as blob:
        buffer = memoryview(bytearray(min(PIECE_BYTES, blob.size)))
        for low in range(0, blob.size, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, blob.size - low)]
            try:
                blob.read(low, [piece])
            except StorageCorrupt:
                return None
            state.update(piece)
    return state.digest().hex()
