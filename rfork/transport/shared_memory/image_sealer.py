"""Moves an image's verified chunks into sealed memory files, in place. Runs on a source whose weights never change.

A source usually copies a chunk to a file when the first target of its host requests it, and keeps its own pages too,
because its engine may write to them. A holder's image changes only while it is received. So each verified chunk is
copied once, and the file's pages replace the image's own: the bytes are in memory once, and targets map them at once.

What cannot be replaced (short tensors) is in memory twice. If memory files cannot be created, the image stays as it is.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Protocol

from rfork.errors import SourceWeightsChanged
from rfork.image.chunks import ChunkState
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.transport.same_host.memory_file import memory_file
from rfork.transport.shared_memory.file_layout import FileLayout, alignment_request, split_mappable
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
        self._changed = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="rfork-seal", daemon=True)

    def start(self) -> None:
        """Seal the verified chunks, and each further one as soon as it is verified."""
        self._chunk_state.subscribe(self._changed.set)
        self._changed.set()
        self._thread.start()

    def close(self) -> None:
        """Stop sealing. Sealed chunks stay sealed."""
        self._closing = True
        self._changed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closing():
            self._changed.wait()
            self._changed.clear()
            for chunk in range(len(self._chunk_state.chunks)):
                if self._is_closing():
                    return
                if chunk in self._chunk_state and self._chunk_cache.find(chunk) is None:
                    try:
                        self._seal(chunk)
                    except SourceWeightsChanged:
                        continue  # it will be verified again
                    except OSError as error:
                        log.warning("chunks are not shared in place", reason=str(error))
                        return

    def _is_closing(self) -> bool:
        return self._closing

    def _seal(self, chunk: int) -> None:
        tag = self._source.version_tag()
        # A change of the bytes waits for the end of the block.
        with self._source.local_read(self._source.generation) as image:
            begin, end = image.layout.chunks[chunk]
            if chunk not in self._chunk_state:
                return
            mappable = self._memory.remappable_ranges(begin, end)
            layout = FileLayout.requested(begin, end, alignment_request(begin, mappable))
            file = memory_file()
            with image.readable(begin, end) as views:
                write(file, layout, begin, views)
            sealed = SealedChunk.create(file, layout)
            sealed.verified_etag = tag
            pages, _ = split_mappable(mappable, list(layout.runs(begin, end)))
            for part in pages:
                self._remapper.replace(part.address, part.length, sealed.descriptor.number, part.file_offset)
            self._chunk_cache.put(chunk, sealed)
