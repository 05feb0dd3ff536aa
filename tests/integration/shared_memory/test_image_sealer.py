"""Chunks of an image that are moved to sealed files in place, within this process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

import pytest

from rfork.errors import SourceWeightsChanged
from rfork.image.chunks import ChunkState
from rfork.image.memory import Image
from rfork.transport.same_host import memory_file
from rfork.transport.same_host.connection import Message, close_all
from rfork.transport.shared_memory import SharedMemoryTransport
from rfork.transport.shared_memory.exporter import SharedMemoryExporter
from rfork.transport.shared_memory.file_layout import PAGE
from rfork.transport.shared_memory.image_sealer import ImageSealer
from rfork.transport.shared_memory.page_remapper import PageRemapper
from tests.integration.shared_memory.pairs import (
    LARGE,
    fork_of,
    mapped_chunk_bytes,
    send_request,
    transport,
)
from tests.transport_contract import TOKEN, FakeGate, content, image_of, soon

SEED = 1


class FakeSource(FakeGate):
    """A source of one image, also for the sealer."""

    def __init__(self, image: Image) -> None:
        super().__init__()
        self.image = image
        self.before_read: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def local_read(self, generation: int) -> Iterator[Image]:
        """Raise SourceWeightsChanged if the generation has changed."""
        self.before_read()
        if generation != self.generation:
            raise SourceWeightsChanged("another generation")
        yield self.image


class SealedSource:
    """A source whose image is sealed as its chunks are verified."""

    def __init__(self, *, verified: bool = True, transport: SharedMemoryTransport, image: Image | None = None) -> None:
        self.image = image or image_of(LARGE, seed=SEED)
        self.chunks = self.image.layout.chunks
        self.chunk_state = ChunkState.full(self.chunks) if verified else ChunkState(self.chunks)
        self.source = FakeSource(self.image)
        self.exporter: SharedMemoryExporter = transport.export(self.image, self.source)
        self.sealer: ImageSealer = transport.sealer(self.source, self.chunk_state)

    def files(self) -> list[int]:
        """Return the inode of each chunk's file, as a reader receives it."""
        inodes: list[int] = []
        for begin, end in self.chunks:
            request: Message = {"token": TOKEN, "begin": begin, "end": end, "alignment": []}
            _, descriptors = send_request(self.exporter.endpoint(), request)
            inodes.append(os.fstat(descriptors[0]).st_ino)
            close_all(descriptors)
        return inodes


@contextlib.contextmanager
def source_of(image: Image | None = None, *, verified: bool = True, sealed: bool = True) -> Iterator[SealedSource]:
    """A source, closed at the end of the block."""
    made = SealedSource(verified=verified, transport=transport(), image=image)
    with contextlib.closing(made.exporter):
        if sealed:
            made.sealer.seal_verified()
        yield made


def test_a_sealed_image_is_in_memory_once() -> None:
    """Its pages are those of the files; only the edges of tensors are its own."""
    expected = content(image_of(LARGE, seed=SEED))
    with source_of() as made:
        size, found = made.image.layout.image_bytes, mapped_chunk_bytes()
        assert expected == content(made.image)
        assert found["Rss"] > size - 2 * PAGE * len(LARGE) - 2 * PAGE * len(made.chunks)
        assert 0 == found["Anonymous"]


def test_targets_map_the_files_of_a_sealed_image() -> None:
    """Source and targets together have the bytes in memory once."""
    with source_of() as made:
        targets = [fork_of(made.exporter.endpoint(), LARGE) for _ in range(2)]
        size, found = made.image.layout.image_bytes, mapped_chunk_bytes()
        assert [content(made.image)] * 2 == [content(target) for target in targets]
        assert found["Rss"] > 3 * 0.9 * size
        assert found["Pss"] < 1.1 * size
        assert 0 == found["Anonymous"]


def test_chunks_are_sealed_as_they_are_verified() -> None:
    """A relay's first chunk is in a file before its last one is received."""
    with source_of(verified=False) as made:
        made.sealer.start()
        with contextlib.closing(made.sealer):
            for chunk in (0, 1):
                made.chunk_state.mark_verified(chunk)
                until = soon()
                while not (sealed := made.sealer.is_sealed(chunk)) and time.monotonic() < until:
                    time.sleep(0.001)
                assert sealed
                assert not made.sealer.is_sealed(chunk + 1)
        assert content(image_of(LARGE, seed=SEED)) == content(made.image)


def test_a_file_that_a_reader_requested_first_becomes_the_images_memory() -> None:
    """The exporter's file is not created again."""
    with source_of(sealed=False) as made:
        target = fork_of(made.exporter.endpoint(), LARGE)
        files, before = made.files(), mapped_chunk_bytes()["Rss"]
        made.sealer.seal_verified()
        assert mapped_chunk_bytes()["Rss"] > before + 0.9 * made.image.layout.image_bytes
        assert files == made.files()
        assert content(target) == content(made.image)
        assert mapped_chunk_bytes()["Pss"] < 1.1 * made.image.layout.image_bytes


def test_a_received_file_becomes_the_images_memory() -> None:
    """A holder on the same host as its source adds no copy."""
    with source_of() as origin:
        shared = transport()
        image = image_of(LARGE)
        made = SealedSource(verified=False, transport=shared, image=image)
        with contextlib.closing(made.exporter):
            reader = shared.connect(origin.exporter.endpoint(), image, lambda: TOKEN, soon())
            with contextlib.closing(reader):
                reader.read(0, image.layout.image_bytes, soon())
            for chunk in range(len(made.chunks)):
                made.chunk_state.mark_verified(chunk)
            made.sealer.seal_verified()
            assert origin.files() == made.files()
        assert content(origin.image) == content(image)
        assert mapped_chunk_bytes()["Pss"] < 1.1 * image.layout.image_bytes


def test_changed_chunks_are_sealed_again() -> None:
    """Targets read the new bytes; unchanged chunks stay in their files."""
    with source_of() as made:
        files = made.files()
        made.source.generation += 1
        made.chunk_state.invalidate([0])
        made.image.regions[0][5000] ^= 0xFF
        made.chunk_state.mark_verified(0)
        made.sealer.seal_verified()
        assert files[0] != made.files()[0]
        assert files[1:] == made.files()[1:]
        assert content(made.image) == content(fork_of(made.exporter.endpoint(), LARGE))
        assert mapped_chunk_bytes()["Pss"] < 1.1 * made.image.layout.image_bytes


def test_a_change_before_a_chunk_is_sealed_is_noticed() -> None:
    """The chunk is sealed with its new bytes."""
    with source_of(sealed=False) as made:

        def change() -> None:
            made.source.before_read = lambda: None
            made.source.generation += 1
            made.image.regions[0][5000] ^= 0xFF

        made.source.before_read = change
        made.sealer.seal_verified()
        made.sealer.seal_verified()
        assert content(made.image) == content(fork_of(made.exporter.endpoint(), LARGE))


def test_sealed_chunks_stay_if_memory_is_short() -> None:
    """To drop them would free nothing, and readers would copy."""
    with source_of() as made:
        files = made.files()
        cache = made.exporter._chunk_cache
        assert not cache.drop_oldest()
        assert files == made.files()


def test_the_image_is_unchanged_if_files_cannot_be_created(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is served from its own memory, and the thread ends."""

    def refuse(**options: bool) -> None:
        raise OSError(24, "too many open files")

    with source_of(sealed=False) as made:
        monkeypatch.setattr(memory_file, "memory_file", refuse)
        with pytest.raises(OSError, match="too many"):
            made.sealer.seal_verified()
        assert 0 == mapped_chunk_bytes()["Rss"]
        assert content(image_of(LARGE, seed=SEED)) == content(made.image)
        made.sealer.start()
        made.sealer.close()


def test_memory_that_was_zeroed_by_a_failed_mapping_is_filled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may fail between the removal of the old pages and the new mapping."""

    def fail(self: PageRemapper, address: int, length: int, descriptor: int, offset: int) -> None:
        made.image.regions[0][:] = 0
        raise OSError(12, "no memory")

    with source_of(image_of((LARGE[0],), seed=SEED), sealed=False) as made:
        made.chunk_state.invalidate(range(1, len(made.chunks)))
        monkeypatch.setattr(PageRemapper, "replace", fail)
        with pytest.raises(OSError, match="no memory"):
            made.sealer.seal_verified()
        begin, end = PAGE, made.chunks.chunk_size - PAGE
        assert content(image_of((LARGE[0],), seed=SEED), begin, end) == content(made.image, begin, end)


def test_a_sealed_image_stays_readable_without_its_exporter() -> None:
    """Its mappings keep the files."""
    with source_of() as made:
        pass
    assert content(image_of(LARGE, seed=SEED)) == content(made.image)
