"""Verifies a snapshot's bytes against its manifest, as a stream. Runs in `rfork snapshot verify`."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from rfork import settings as options
from rfork.errors import CheckpointError, StorageCorrupt, StorageNotFound
from rfork.image.chunks import Chunks
from rfork.image.digest import LEAF_BYTES, RunningDigest
from rfork.image.safetensors_header import layout_of
from rfork.settings import StorageSettings
from rfork.storage.location import Location
from rfork.storage.snapshots.entry import SnapshotEntry
from rfork.storage.snapshots.files import ManifestFile, SnapshotFiles, chunk_folder, open_files

MAX_READ_BYTES = 8 << 20
"""Bytes per read of one thread."""


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Result of verifying a snapshot: `mismatches` has a line for each damaged chunk, in order."""

    uri: str
    weights_id: str | None
    chunks: int
    nbytes: int
    mismatches: tuple[str, ...]


@dataclass
class Verifier:
    """Verifies snapshots one after the other; shared chunks are read once. Use from one thread.

    `progress` receives byte counts, one call at a time.
    """

    settings: StorageSettings = field(default_factory=lambda: options.load(StorageSettings))
    progress: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, str | None] = {}
        threads = self.settings.concurrency
        piece = min(MAX_READ_BYTES, self.settings.staging_bytes // threads)
        self._piece = max(LEAF_BYTES, piece - piece % LEAF_BYTES)

    def verify(self, found: SnapshotEntry) -> VerifyResult:
        """Digest every chunk. Damage is reported in the result; raises StorageErrors if storage is
        unreachable.
        """
        try:
            files = open_files(found.folder, found.name, self.settings)
        except (StorageCorrupt, StorageNotFound) as error:
            return VerifyResult(
                found.uri,
                found.manifest_file.weights_id if found.manifest_file else None,
                0,
                0,
                (str(error),),
            )
        try:
            if misfit := _manifest_mismatch(files):
                return VerifyResult(found.uri, files.manifest_file.weights_id, 0, 0, (misfit,))
            cut = Chunks.of(files.manifest_file.image_bytes)
            objects = _objects(found.folder, files.manifest_file)
            buffers: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
            for _ in range(min(self.settings.concurrency, len(cut))):
                buffers.put(bytearray(self._piece))

            def check(chunk: int) -> str | None:
                buffer = buffers.get()
                try:
                    return self._check(files, chunk, memoryview(buffer), objects[chunk] if objects else None)
                finally:
                    buffers.put(buffer)

            pool = ThreadPoolExecutor(max(1, buffers.qsize()), thread_name_prefix="rfork-verify")
            try:
                results = list(pool.map(check, range(len(cut))))
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
        finally:
            files.data.close()
        mismatches = tuple(line for line in results if line is not None)
        return VerifyResult(
            found.uri, files.manifest_file.weights_id, len(cut), files.manifest_file.image_bytes, mismatches
        )

    def _check(self, files: SnapshotFiles, chunk: int, buffer: memoryview, path: str | None) -> str | None:
        """Return what is wrong with a chunk, or None. `path` is the path of its object if it may be shared."""
        begin, end = Chunks.of(files.manifest_file.image_bytes)[chunk]
        with self._lock:
            known = path is not None and path in self._known
            wrong = self._known.get(path) if path is not None else None
        if known:
            self._report_progress(end - begin)
        else:
            wrong = self._read(files, begin, end, files.manifest_file.digests[chunk], buffer)
            if path is not None:
                with self._lock:
                    self._known[path] = wrong
        if wrong is None:
            return None
        where = path or f"bytes {files.manifest_file.header_bytes + begin}-{files.manifest_file.header_bytes + end}"
        return f"{files.data.uri}: chunk {chunk} ({where}) {wrong}"

    def _read(self, files: SnapshotFiles, begin: int, end: int, expected: str, buffer: memoryview) -> str | None:
        state = RunningDigest()
        for low in range(begin, end, len(buffer)):
            piece = buffer[: min(len(buffer), end - low)]
            try:
                files.data.read(files.manifest_file.header_bytes + low, [piece])
            except StorageCorrupt as error:
                return f"cannot be read: {error}"
            state.update(piece)
            self._report_progress(len(piece))
        return None if state.digest().hex() == expected else "does not match its digest"

    def _report_progress(self, count: int) -> None:
        if self.progress is not None:
            with self._lock:
                self.progress(count)


def _objects(folder: Location, manifest_file: ManifestFile) -> list[str]:
    """Return the path of each chunk's object; empty for a single file."""
    if manifest_file.chunks is None:
        return []
    within = chunk_folder(folder, manifest_file.chunks).path
    return [within + name for name, _ in manifest_file.objects[1:]]  # without the header, which was already verified


def _manifest_mismatch(files: SnapshotFiles) -> str | None:
    """Return why the manifest does not match the file or itself, or None."""
    try:
        files.manifest_file.manifest(layout_of(files.head))
    except (StorageCorrupt, CheckpointError) as error:
        return f"{files.uri}: {error}"
    return None
