"""Snapshot of a seed's image, written by its own process while it serves. Runs on the source."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rfork.image.layout import Layout
from rfork.settings import StorageSettings
from rfork.source.seed import Seed
from rfork.storage.snapshots.writer import WriteReport, write_snapshot


class GenerationReader:
    """Bytes of one generation of a seed's image, while the seed has that generation. Thread-safe.

    It keeps no reference to the memory between reads. Suspending the seed or changing its weights waits for
    the current read, never for storage: a read returns a copy. Afterwards it raises SourceWeightsChanged.
    """

    def __init__(self, seed: Seed, generation: int) -> None:
        self._seed = seed
        self._generation = generation
        self._spare: deque[bytearray] = deque()  # allocating memory costs more than copying into it

    @property
    def layout(self) -> Layout:
        """Layout of its bytes."""
        return self._seed.image.layout

    @contextmanager
    def readable(self, begin: int, end: int) -> Iterator[Sequence[memoryview]]:
        """Return a copy of `[begin, end)`, valid inside the block only."""
        spare = self._spare.pop() if self._spare else bytearray()
        copy = spare if len(spare) >= end - begin else bytearray(end - begin)
        with memoryview(copy) as buffer, buffer[: end - begin] as view:
            with self._seed.local_read(self._generation) as image, image.readable(begin, end) as parts:
                at = 0
                for part in parts:
                    view[at : at + part.nbytes] = part
                    at += part.nbytes
            yield [view]
        self._spare.append(copy)

    def digest(self, chunk: int) -> bytes:
        """Return the digest of chunk `chunk`'s current bytes; see `EngineImage.digest`."""
        with self._seed.local_read(self._generation) as image:
            return image.digest(chunk)


def snapshot_seed(
    seed: Seed,
    uri: str,
    *,
    shared: bool = False,
    progress: Callable[[int], None] | None = None,
    settings: StorageSettings | None = None,
) -> WriteReport:
    """Write the seed's image to `uri`, a file or the rank's file in a folder; see `write_snapshot`.

    It computes no digests in advance and does not disturb readers. Raises SourceWeightsChanged if the seed
    has no complete image, or starts to change it (`Seed.updating`) or suspends it (`Seed.suspend`) meanwhile;
    no new snapshot exists then.
    """
    generation, manifest = seed.manifest_snapshot()
    return write_snapshot(
        GenerationReader(seed, generation),
        manifest,
        uri,
        rank=seed.identity.rank,
        model=seed.identity.model,
        version=seed.version,
        shared=shared,
        progress=progress,
        settings=settings,
    )
