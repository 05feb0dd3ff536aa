"""Writes snapshots: an image as one safetensors file, or as chunks shared with other snapshots, and its
manifest.

The manifest is written last and atomically: before that, no reader accepts the files as a snapshot of these
weights. Runs wherever the weights are.
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
from rfork.errors import SettingsError, SourceWeightsChanged, StorageCorrupt
from rfork.image.digest import RunningDigest, digest_bytes
from rfork.image.layout import Layout, Manifest
from rfork.image.safetensors_header import header
from rfork.schema import Rank
from rfork.settings import StorageSettings
from rfork.storage import registry
from rfork.storage.blob import BlobStore, BlobWriter, size_of
from rfork.storage.location import Location
from rfork.storage.snapshots.entry import (
    CHUNKS_FOLDER,
    SHARED_CHUNKS_PATH,
    ManifestFile,
    chunk_folder,
    manifest_name,
    snapshot_location,
)
from rfork.storage.snapshots.repository import best_effort_remove, pending_write, write_blob
from rfork.storage.versions.version import checked_version

OTHER_FORMATS = (".bin", ".ckpt", ".gguf", ".h5", ".npz", ".onnx", ".pt", ".pth")
"""Suffixes of other formats; used as a snapshot's name, one would become a folder."""

PIECE_BYTES = 16 << 20
"""Bytes passed to a store at a time; for GPU memory, bytes copied to the host at a time."""
MAX_PENDING_DIGESTS = 2
"""Chunks that may be written before the digest of an earlier one is known."""


def validate_destination(uri: str | Path, settings: StorageSettings | None = None) -> None:
    """Raise SettingsError for read-only storage or the suffix of another format; MissingExtra."""
    location = Location.parse(uri)
    if location.scheme in ("http", "https"):
        raise SettingsError(f"{location.uri} is read-only: it is a web server", hint="write to s3:// or a path")
    if location.name.endswith((*OTHER_FORMATS, ".tensors")):
        raise SettingsError(
            f"{location.uri} is not a valid name for a snapshot", hint="use a .safetensors file, or a folder"
        )
    registry.open_store(location.folder, settings).close()


@dataclass(frozen=True, slots=True)
class WriteReport:
    """Bytes written by a snapshot; `reused_bytes` already existed, from other ranks and revisions."""

    uri: str
    weights_id: str
    written: int
    reused_bytes: int


class ImageReader(Protocol):
    """Source of a snapshot: an `EngineImage` or a reader of one; see there."""

    @property
    def layout(self) -> Layout:
        """See `EngineImage`."""
        ...

    def readable(self, begin: int, end: int) -> AbstractContextManager[Sequence[memoryview]]:
        """See `EngineImage.readable`."""
        ...

    def digest(self, chunk: int) -> bytes:
        """See `EngineImage.digest`."""
        ...


def write_snapshot(
    image: ImageReader,
    manifest: Manifest,
    uri: str | Path,
    *,
    rank: Rank | None = None,
    model: str | None = None,
    version: str | None = None,
    shared: bool = False,
    chunks: str = SHARED_CHUNKS_PATH,
    check: bool = False,
    progress: Callable[[int], None] | None = None,
    settings: StorageSettings | None = None,
) -> WriteReport:
    """Write an image and its manifest to the file at `uri`, or to the rank's file in that folder.

    `version` is recorded in the manifest: that of the weights, the same for all ranks. With `shared`, the
    header and each chunk become objects in the folder `chunks` (relative to the snapshot's folder), so that
    equal ones are stored once; with `check`, existing ones are read, and written again if they do not match.
    An existing snapshot of this name is replaced. `progress` receives byte counts, one call at a time.

    Raises SourceWeightsChanged if the bytes no longer match the manifest, SettingsError if the destination is
    read-only, and StorageErrors. The destination then still contains the previous snapshot, or nothing that
    readers accept as one.
    """
    folder, name = snapshot_location(uri, rank)
    validate_destination(uri, settings)
    if version is not None:
        checked_version(version)
    job = _WriteJob(image, manifest, check, progress, settings or options.load(StorageSettings))
    head = header(image.layout, manifest.weights_id)
    manifest_file = ManifestFile(
        model=model,
        version=version,
        rank=rank or Rank(),
        layout_id=image.layout.layout_id,
        weights_id=manifest.weights_id,
        image_bytes=image.layout.image_bytes,
        header_bytes=len(head),
        header=digest_bytes([memoryview(head)]).hex(),
        digests=tuple(digest.hex() for digest in manifest.digests),
        chunks=_recorded_folder(folder, chunks) if shared else None,
    )
    with closing(registry.open_store(folder, job.settings)) as store:
        if manifest_file.chunks is not None:
            with closing(registry.open_store(chunk_folder(folder, manifest_file.chunks), job.settings)) as objects:
                job.share(store, name, objects, manifest_file, head)
        else:
            with store.write(name) as writer:
                writer.write([memoryview(head)])
                job.stream(writer)
            job.written += len(head) + image.layout.image_bytes
            try:
                _commit(store, name, manifest_file)
            except BaseException:
                best_effort_remove(store, name)
                raise
    return WriteReport(folder.child(name).uri, manifest.weights_id, job.written, job.reused_bytes)


@dataclass(slots=True)
class _WriteJob:
    """State of writing one image to storage."""

    image: ImageReader
    manifest: Manifest
    check: bool
    progress: Callable[[int], None] | None
    settings: StorageSettings
    written: int = 0
    reused_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def stream(self, writer: BlobWriter) -> None:
        """Write all chunks, and check each right after it was written: a concurrent change is an error."""
        pending_digests: deque[Future[None]] = deque()
        with ThreadPoolExecutor(MAX_PENDING_DIGESTS, thread_name_prefix="rfork-digest") as pool:
            for chunk in range(len(self.image.layout.chunks)):
                self._write(writer, chunk)
                pending_digests.append(pool.submit(self._check, chunk))
                if len(pending_digests) > MAX_PENDING_DIGESTS:
                    pending_digests.popleft().result()
            for check in pending_digests:
                check.result()

    def share(self, store: BlobStore, name: str, chunks: BlobStore, manifest_file: ManifestFile, head: bytes) -> None:
        """Write the missing header and chunks, then the manifest."""
        (header_object, _), *chunk_objects = manifest_file.objects
        with pending_write(store, name, manifest_file, chunks) as confirm:
            self._write_shared(chunks, header_object, head)
            chunk_by_object: dict[str, int] = {}
            for index, (object_, length) in enumerate(chunk_objects):
                if chunk_by_object.setdefault(object_, index) != index:  # write equal chunks once
                    self._report_progress(length)
                    self._count_bytes(length, written=False)
            # Each writer may buffer its chunk; a chunk larger than the memory is uploaded in parts.
            size, storage_settings = self.image.layout.chunks.chunk_size, self.settings
            writers = max(1, min(storage_settings.concurrency, storage_settings.staging_bytes // size))
            with ThreadPoolExecutor(writers, thread_name_prefix="rfork-write") as pool:
                futures = [
                    pool.submit(self._write_shared, chunks, object_, index)
                    for object_, index in chunk_by_object.items()
                ]
                try:
                    for done in futures:
                        done.result()
                except BaseException:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise
            # Remove it before the new manifest refers to shared chunks instead: it may contain other weights.
            store.remove(name)
            confirm()
            _commit(store, name, manifest_file)

    def _write_shared(self, chunks: BlobStore, name: str, what: int | bytes) -> None:
        """Write an object, a chunk or the header, unless it exists (and matches, with `check`)."""
        length = len(what) if isinstance(what, bytes) else _length(self.image, what)
        size = size_of(chunks, name)
        new = size != length or (self.check and _digest(chunks, name) != name.rpartition("/")[2].partition("-")[0])
        if new:
            with chunks.write(name, replace=size is not None) as writer:
                if isinstance(what, bytes):
                    writer.write([memoryview(what)])
                else:
                    self._write(writer, what)
                    self._check(what)
        elif not isinstance(what, bytes):
            self._report_progress(length)
        self._count_bytes(length, written=new)

    def _write(self, writer: BlobWriter, chunk: int) -> None:
        begin, end = self.image.layout.chunks[chunk]
        for offset in range(begin, end, PIECE_BYTES):
            piece_end = min(offset + PIECE_BYTES, end)
            with self.image.readable(offset, piece_end) as views:
                writer.write(views)
            self._report_progress(piece_end - offset)

    def _check(self, chunk: int) -> None:
        if self.image.digest(chunk) != self.manifest.digests[chunk]:
            raise SourceWeightsChanged(
                f"the weights changed while their snapshot was written: chunk {chunk} differs",
                hint="write it again when the weights no longer change",
            )

    def _report_progress(self, count: int) -> None:
        if self.progress is not None:
            with self._lock:
                self.progress(count)

    def _count_bytes(self, length: int, *, written: bool) -> None:
        with self._lock:
            self.written += length if written else 0
            self.reused_bytes += 0 if written else length


def _commit(store: BlobStore, name: str, manifest_file: ManifestFile) -> None:
    write_blob(store, manifest_name(name), manifest_file.model_dump_json(exclude_none=True).encode())


def _recorded_folder(folder: Location, chunks: str) -> str:
    """Return the chunk folder as recorded in the manifest; the root of a bucket has no parent."""
    if not CHUNKS_FOLDER.fullmatch(chunks):
        raise SettingsError(
            f"{chunks!r} is not a valid folder for shared chunks",
            hint=f"use a name next to the snapshot's folder or one of its parents, e.g. {SHARED_CHUNKS_PATH}",
        )
    recorded = chunks if folder.path.strip("/") else chunks.removeprefix("../")
    try:
        chunk_folder(folder, recorded)
    except StorageCorrupt as error:
        raise SettingsError(str(error)) from None
    return recorded


def _length(image: ImageReader, chunk: int) -> int:
    begin, end = image.layout.chunks[chunk]
    return end - begin


def _digest(store: BlobStore, name: str) -> str | None:
    """Return the digest of a blob, or None if it cannot be read completely."""
    digest = RunningDigest()
    with closing(store.open(name)) as blob:
        buffer = memoryview(bytearray(min(PIECE_BYTES, blob.size)))
        for offset in range(0, blob.size, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, blob.size - offset)]
            try:
                blob.read(offset, [piece])
            except StorageCorrupt:
                return None
            digest.update(piece)
    return digest.digest().hex()
