"""A snapshot: a safetensors file whose data section is an image, and its manifest.

Chunk ``[a, b)`` of the image is file range ``[header + a, header + b)``. The manifest is in
``FILE.manifest.json``, so that the weights_id is known, and each chunk can be verified, before anything is
read. In the shared form, the file is composed of chunks that other snapshots may use too
(`rfork.storage.snapshots.entry`). Runs on the target; written by `rfork.storage.snapshots.writer`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from typing_extensions import Self

from rfork import settings as options
from rfork.errors import CheckpointError, StorageCorrupt
from rfork.image.layout import Layout
from rfork.image.memory import Image
from rfork.image.safetensors_header import layout_of
from rfork.schema import Rank, StorageType
from rfork.settings import StorageSettings
from rfork.storage.io.reader import Extent, fill
from rfork.storage.snapshots.chunked_blob import MAX_OPEN, ChunkedBlob
from rfork.storage.snapshots.entry import SnapshotFiles, open_files, snapshot_location


class Snapshot:
    """A snapshot with a layout, in either form; see `rfork.storage.base.ImageStorage`."""

    storage_type: StorageType = "snapshot"

    def __init__(self, files: SnapshotFiles, layout: Layout, settings: StorageSettings) -> None:
        """Take ownership of `files`; raises StorageCorrupt if their manifest is inconsistent."""
        self.uri = files.uri
        self.manifest_file = files.manifest_file
        self.manifest = files.manifest_file.manifest(layout)
        self.origin = self.manifest.weights_id
        self._data = files.data
        self._begin = files.manifest_file.header_bytes
        self._settings = settings

    @classmethod
    def open(
        cls, uri: str, layout: Layout, *, rank: Rank | None = None, settings: StorageSettings | None = None
    ) -> Self:
        """Open the snapshot for images with `layout`: the file at `uri`, or the rank's file in that folder.

        Raises SettingsError (unsupported URI), CheckpointError (another layout, or a file without a
        manifest), StorageNotFound, StorageCorrupt (truncated, damaged, partly replaced) and other
        StorageErrors.
        """
        chosen = settings or options.load(StorageSettings)
        folder, name = snapshot_location(uri, rank)
        files = open_files(folder, name, chosen)
        try:
            if files.manifest_file.layout_id != layout.layout_id:
                difference = layout.first_difference(layout_of(files.head))
                problem_text = (
                    f"first difference: {difference}" if difference else "its manifest has yet another layout"
                )
                raise CheckpointError(
                    f"{files.uri} has another layout than the model; {problem_text}",
                    hint="build the model exactly as when the snapshot was written, or write the snapshot again",
                )
            return cls(files, layout, chosen)
        except BaseException:
            files.data.close()
            raise

    def read(self, begin: int, end: int, into: Sequence[memoryview]) -> None:
        """See `ImageStorage.read`."""
        self._data.read(self._begin + begin, into)

    def fill(
        self,
        image: Image,
        *,
        progress: Callable[[int], None] | None = None,
        on_chunk: Callable[[int], None] | None = None,
    ) -> None:
        """Fill the complete image, verifying each chunk as it arrives.

        `progress` receives byte counts, one call at a time. `on_chunk` is called for each verified chunk,
        concurrently on the reading threads. A chunk that does not match its digest is read once more, then
        StorageCorrupt names it. Raises other StorageErrors, and ValueError for an image with another layout;
        the content of the image is then undefined.
        """
        if image.layout.layout_id != self.manifest.layout.layout_id:
            raise ValueError("the image has another layout than the snapshot")
        chunks = len(image.layout.chunks)
        # As many as may be open together: all, except for a shared snapshot of a very large image.
        step = MAX_OPEN if isinstance(self._data, ChunkedBlob) else max(1, chunks)
        for first in range(0, chunks, step):
            self._fill(image, range(first, min(first + step, chunks)), progress, on_chunk)

    def close(self) -> None:
        """See `ImageStorage.close`."""
        self._data.close()

    def _fill(
        self,
        image: Image,
        chunks: range,
        progress: Callable[[int], None] | None,
        on_chunk: Callable[[int], None] | None,
    ) -> None:
        with self._extents(image, chunks) as chunk_extents:
            owners = [chunk for chunk, _ in chunk_extents]
            missing = Counter(owners)
            lock = threading.Lock()

            def filled(index: int) -> None:
                chunk = owners[index]
                with lock:
                    missing[chunk] -= 1
                    if missing[chunk]:
                        return
                self._verify(image, chunk)
                if on_chunk is not None:
                    on_chunk(chunk)

            extents = [extent for _, extent in chunk_extents]
            fill(extents, self._settings, on_filled=filled, progress=progress)

    @contextmanager
    def _extents(self, image: Image, chunks: range) -> Iterator[list[tuple[int, Extent]]]:
        """Yield the extents of these chunks, each with its chunk. In the shared form each chunk is a separate
        blob, so that the reader sees the actual files and objects.
        """
        with ExitStack() as open_parts:
            chunk_extents: list[tuple[int, Extent]] = []
            if not isinstance(self._data, ChunkedBlob):
                blobs = [(self._data, self._begin + image.layout.chunks[chunk][0]) for chunk in chunks]
            else:
                part_numbers = [chunk + 1 for chunk in chunks]  # part 0 is the header
                self._data.prepare(part_numbers, self._settings.concurrency)
                blobs = [(open_parts.enter_context(self._data.part(part_number)), 0) for part_number in part_numbers]
            for chunk, (blob, at) in zip(chunks, blobs, strict=True):
                for into in image.tensor_slices(*image.layout.chunks[chunk]):
                    chunk_extents.append((chunk, Extent(blob, at, into)))
                    at += into.numel()
            yield chunk_extents

    def _verify(self, image: Image, chunk: int) -> None:
        expected = self.manifest.digests[chunk]
        if image.digest(chunk) == expected:
            return
        # Retry once, in case the data was corrupted in transit.
        begin, end = image.layout.chunks[chunk]
        with image.writable(begin, end) as views:
            self.read(begin, end, views)
        if image.digest(chunk) != expected:
            span = f"bytes {self._begin + begin}-{self._begin + end}"
            raise StorageCorrupt(
                f"{self.uri}: chunk {chunk} ({span}) does not match its digest",
                hint="run `rfork snapshot verify` to list all damage; write the snapshot again",
            )
