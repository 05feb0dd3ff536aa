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
from rfork.storage.snapshots.entry import ManifestFile, SnapshotEntry, SnapshotFiles, chunk_folder, open_files

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
class SnapshotVerifier:
    """Verifies snapshots one after the other; shared chunks are read once. Use from one thread.

    `progress` receives byte counts, one call at a time.
    """

    settings: StorageSettings = field(default_factory=lambda: options.load(StorageSettings))
    progress: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._shared_results: dict[str, str | None] = {}
        """Mismatch of each shared chunk that was read, or None, by the path of its object."""
        read_bytes = min(MAX_READ_BYTES, self.settings.staging_bytes // self.settings.concurrency)
        self._read_bytes = max(LEAF_BYTES, read_bytes - read_bytes % LEAF_BYTES)

    def verify(self, entry: SnapshotEntry) -> VerifyResult:
        """Digest every chunk. Damage is reported in the result; raises StorageErrors if storage is
        unreachable.
        """
        try:
            files = open_files(entry.folder, entry.name, self.settings)
        except (StorageCorrupt, StorageNotFound) as error:
            weights_id = entry.manifest_file.weights_id if entry.manifest_file else None
            return VerifyResult(entry.uri, weights_id, chunks=0, nbytes=0, mismatches=(str(error),))
        manifest_file = files.manifest_file
        try:
            mismatch = _manifest_mismatch(files)
            if mismatch is not None:
                return VerifyResult(entry.uri, manifest_file.weights_id, chunks=0, nbytes=0, mismatches=(mismatch,))
            results = self._verify_chunks(files, _shared_paths(entry.folder, manifest_file))
        finally:
            files.data.close()
        return VerifyResult(
            entry.uri,
            manifest_file.weights_id,
            chunks=len(results),
            nbytes=manifest_file.image_bytes,
            mismatches=tuple(mismatch for mismatch in results if mismatch is not None),
        )

    def _verify_chunks(self, files: SnapshotFiles, shared_paths: list[str]) -> list[str | None]:
        """Return the mismatch of each chunk, or None. `shared_paths` is empty for a single file."""
        chunk_count = len(Chunks.of(files.manifest_file.image_bytes))
        buffers: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        for _ in range(min(self.settings.concurrency, chunk_count)):
            buffers.put(bytearray(self._read_bytes))

        def verify_chunk(chunk: int) -> str | None:
            buffer = buffers.get()
            try:
                shared_path = shared_paths[chunk] if shared_paths else None
                return self._verify_chunk(files, chunk, memoryview(buffer), shared_path)
            finally:
                buffers.put(buffer)

        pool = ThreadPoolExecutor(max(1, buffers.qsize()), thread_name_prefix="rfork-verify")
        try:
            return list(pool.map(verify_chunk, range(chunk_count)))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _verify_chunk(
        self, files: SnapshotFiles, chunk: int, buffer: memoryview, shared_path: str | None
    ) -> str | None:
        manifest_file = files.manifest_file
        begin, end = Chunks.of(manifest_file.image_bytes)[chunk]
        with self._lock:
            is_known = shared_path is not None and shared_path in self._shared_results
            mismatch = self._shared_results[shared_path] if shared_path is not None and is_known else None
        if is_known:
            self._report_progress(end - begin)
        else:
            mismatch = self._compare_digest(files, begin, end, manifest_file.digests[chunk], buffer)
            if shared_path is not None:
                with self._lock:
                    self._shared_results[shared_path] = mismatch
        if mismatch is None:
            return None
        location = shared_path or f"bytes {manifest_file.header_bytes + begin}-{manifest_file.header_bytes + end}"
        return f"{files.data.uri}: chunk {chunk} ({location}) {mismatch}"

    def _compare_digest(
        self, files: SnapshotFiles, begin: int, end: int, expected: str, buffer: memoryview
    ) -> str | None:
        """Return why image range `[begin, end)` does not have the expected digest, or None."""
        digest = RunningDigest()
        for offset in range(begin, end, len(buffer)):
            view = buffer[: min(len(buffer), end - offset)]
            try:
                files.data.read(files.manifest_file.header_bytes + offset, [view])
            except StorageCorrupt as error:
                return f"cannot be read: {error}"
            digest.update(view)
            self._report_progress(len(view))
        return None if digest.digest().hex() == expected else "does not match its digest"

    def _report_progress(self, count: int) -> None:
        if self.progress is not None:
            with self._lock:
                self.progress(count)


def _shared_paths(folder: Location, manifest_file: ManifestFile) -> list[str]:
    """Return the path of each chunk's object; empty for a single file."""
    if manifest_file.chunks is None:
        return []
    chunks_path = chunk_folder(folder, manifest_file.chunks).path
    _, *chunk_objects = manifest_file.objects  # the header was verified when the files were opened
    return [chunks_path + name for name, _ in chunk_objects]


def _manifest_mismatch(files: SnapshotFiles) -> str | None:
    """Return why the manifest does not match the file or itself, or None."""
    try:
        files.manifest_file.manifest(layout_of(files.head))
    except (StorageCorrupt, CheckpointError) as error:
        return f"{files.uri}: {error}"
    return None
