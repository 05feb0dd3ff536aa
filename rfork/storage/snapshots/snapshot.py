"""A snapshot: one safetensors file whose data section is an image, and its manifest beside it.

Chunk ``[a, b)`` of the image is file range ``[header + a, header + b)``. The manifest lies in
``FILE.manifest.json``, so the weights_id is known, and each chunk can be told right from wrong, before
anything is read. In the shared form the file is put together from chunks that other snapshots have too
(`rfork.storage.snapshots.files`). Runs on the target; `rfork.storage.snapshots.writer` writes them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Self

from rfork import settings as options
from rfork.errors import CheckpointError, StorageCorrupt
from rfork.image.layout import Layout
from rfork.image.memory import Image
from rfork.image.safetensors_header import layout_of
from rfork.schema import Rank
from rfork.schema.types import StorageKind
from rfork.settings import StorageSettings
from rfork.storage.io.reader import Extent, fill
from rfork.storage.snapshots.chunked_blob import MAX_OPEN, ChunkedBlob
from rfork.storage.snapshots.files import SnapshotFiles, open_files, snapshot_location


class Snapshot:
    """A snapshot of a layout, in either form; see `rfork.storage.base.ImageStorage`."""

    storage_kind: StorageKind = "snapshot"

    def __init__(self, files: SnapshotFiles, layout: Layout, settings: StorageSettings) -> None:
        """Takes over `files`; raises StorageCorrupt where their manifest does not fit itself."""
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
        """Open the snapshot for images of `layout`: the file that `uri` names, or the rank's in that folder.

        Raises SettingsError (no such kind of URI), CheckpointError (a snapshot of something else, or a file
        without a manifest), StorageNotFound, StorageCorrupt (cut short, damaged, half replaced) and other
        StorageErrors.
        """
        chosen = settings or options.load(StorageSettings)
        folder, name = snapshot_location(uri, rank)
        files = open_files(folder, name, chosen)
        try:
            if files.manifest_file.layout_id != layout.layout_id:
                difference = layout.first_difference(layout_of(files.head))
                problem_text = f"first difference: {difference}" if difference else "its manifest is of another still"
                raise CheckpointError(f"{files.uri} is of another layout; {problem_text}")
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
        """Fill the whole image, each chunk verified as soon as it is there.

        `progress` is told bytes as they come, one call at a time. `on_chunk` is told each chunk that is
        verified, on the reading threads, several at once. A chunk that does not match its digest is read
        once more; StorageCorrupt names it then. Raises other StorageErrors, and ValueError for an image of
        another layout; the image's content is then undefined.
        """
        if image.layout.layout_id != self.manifest.layout.layout_id:
            raise ValueError("the image is of another layout than the snapshot")
        chunks = len(image.layout.chunks)
        # As many at once as may be open: all of them but for a shared snapshot of a very large image.
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
        """The extents of these chunks, each with its chunk. In the shared form each chunk is a blob of its
        own, so that the engine sees files and objects as they are."""
        with ExitStack() as open_parts:
            chunk_extents: list[tuple[int, Extent]] = []
            if not isinstance(self._data, ChunkedBlob):
                blobs = [(self._data, self._begin + image.layout.chunks[chunk][0]) for chunk in chunks]
            else:
                part_numbers = [chunk + 1 for chunk in chunks]  # the first is the header
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
        # What was wrong on its way is right the second time.
        begin, end = image.layout.chunks[chunk]
        with image.writable(begin, end) as views:
            self.read(begin, end, views)
        if image.digest(chunk) != expected:
            span = f"bytes {self._begin + begin}-{self._begin + end}"
            raise StorageCorrupt(
                f"{self.uri}: chunk {chunk} ({span}) does not match its digest",
                hint="`rfork snapshot verify` names all that is damaged; write the snapshot again",
            )
