"""Moves an image's verified chunks into sealed memory files, in place. Runs on a source whose weights never change.

A source usually copies a chunk to a file when the first target of its host requests it, and keeps its own pages too,
because its engine may write to them. A holder's image changes only while it is received. So each verified chunk is
copied once, and the file's pages replace the image's own: the bytes are in memory once, and targets map them at once.

What cannot be replaced (short tensors) is in memory twice. If memory files cannot be created, the image stays as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from rfork.errors import SourceWeightsChanged
from rfork.image.chunks import ChunkState
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.transport.same_host import memory_file
from rfork.transport.shared_memory.file_layout import FileLayout, MappedRun, alignment_request, split_mappable
from rfork.transport.shared_memory.page_remapper import PageRemapper, ReplaceableMemory
from rfork.transport.shared_memory.sealed_chunk import SealedChunk, SealedChunkCache, write

log = logger(__name__)


class SealableSource(Protocol):
    """A source that writes to its image only while it receives it."""

    @property
    def image(self) -> Image:
        """The image."""
        ...

    @property
    def generation(self) -> int:
        """Number of the generation: increased whenever the bytes change."""
        ...

    def version_tag(self) -> str:
        """See `AccessGate.version_tag`."""
        ...

    def local_read(self, generation: int) -> AbstractContextManager[Image]:
        """Keep the bytes of this generation unchanged within the context. Raises SourceWeightsChanged."""
        ...


class ImageSealer:
    """Seals the chunks of one image on a thread of its own, from `start` to `close`."""

    def __init__(self, source: SealableSource, chunk_state: ChunkState, chunk_cache: SealedChunkCache) -> None:
        self._source = source
        self._chunk_state = chunk_state
        self._chunk_cache = chunk_cache
        self._memory = ReplaceableMemory(source.image)
        self._remapper = PageRemapper()
        self._sealed_tags: dict[int, str] = {}
        """Version tag of the bytes with which each chunk was sealed."""
        self._changed = threading.Event()
        self._closing = False
        self._unsubscribe: Callable[[], None] = _noop
        self._thread = threading.Thread(target=self._run, name="rfork-seal", daemon=True)

    def start(self) -> None:
        """Seal the verified chunks, and each further one as soon as it is verified."""
        self._unsubscribe = self._chunk_state.subscribe(self._changed.set)
        self._changed.set()
        self._thread.start()

    def close(self) -> None:
        """Stop sealing. Sealed chunks stay sealed."""
        self._closing = True
        self._unsubscribe()
        self._changed.set()
        self._thread.join()

    def is_sealed(self, chunk: int) -> bool:
        """Return True if the chunk is in a sealed file with its current bytes."""
        return self._sealed_tags.get(chunk) == self._source.version_tag()

    def seal_verified(self) -> None:
        """Seal the chunks that are verified now. Raises OSError."""
        for chunk in range(len(self._chunk_state.chunks)):
            if self._is_closing():
                return
            if chunk in self._chunk_state and not self.is_sealed(chunk):
                try:
                    self._seal(chunk)
                except SourceWeightsChanged:
                    self._changed.set()  # the chunk may be verified again already

    def _run(self) -> None:
        while not self._is_closing():
            self._changed.wait()
            self._changed.clear()
            try:
                self.seal_verified()
            except OSError as error:
                log.warning("chunks are not shared in place", reason=str(error))
                return

    def _is_closing(self) -> bool:
        return self._closing

    def _seal(self, chunk: int) -> None:
        generation, tag = self._source.generation, self._source.version_tag()
        # A change of the bytes waits for the end of the block.
        with self._chunk_cache.building(chunk, _noop), self._source.local_read(generation) as image:
            if chunk not in self._chunk_state:
                return
            begin, end = image.layout.chunks[chunk]
            mappable = self._memory.remappable_ranges(begin, end)
            sealed = self._chunk_cache.find(chunk)
            # Received from a source on this host, or sealed before other chunks were found to be wrong.
            if sealed is None or (sealed.verified_etag != tag and not sealed.content_equals(image, begin, end)):
                layout = FileLayout.requested(begin, end, alignment_request(begin, mappable))
                file = memory_file.memory_file()
                with image.readable(begin, end) as views:
                    write(file, layout, begin, views)
                sealed = SealedChunk.create(file, layout)
            sealed.verified_etag = tag
            sealed.backs_image = True
            self._chunk_cache.put(chunk, sealed)
            self._sealed_tags[chunk] = tag
            pages, _ = split_mappable(mappable, list(sealed.layout.runs(begin, end)))
            for part in pages:
                self._map(part, sealed, image)

    def _map(self, part: MappedRun, sealed: SealedChunk, image: Image) -> None:
        try:
            self._remapper.replace(part.address, part.length, sealed.descriptor.number, part.file_offset)
        except OSError:
            # The memory may have been zeroed.
            with image.writable(part.begin, part.begin + part.length) as views:
                memory_file.read(sealed.descriptor.number, part.file_offset, views)
            raise


def _noop() -> None:
    """Wait for an exporter that seals the same chunk."""
