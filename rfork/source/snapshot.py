"""A snapshot of what a seed holds, written by its own process while it serves. Runs on the source."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rfork.image.layout import Layout
from rfork.settings import StorageSettings
from rfork.source.seed import Seed
from rfork.storage.snapshots.writer import WriteReport, write_snapshot


class GenerationReader:
    """The bytes of one generation of a seed's image, for as long as the seed holds that. Thread-safe.

    It keeps no reference to the memory between two reads. Whoever suspends the seed or changes its weights
    waits for the one under way, never for storage: what is read is a copy. Raises SourceWeightsChanged afterwards.
    """

    def __init__(self, seed: Seed, generation: int) -> None:
        self._seed = seed
        self._generation = generation
        self._spare: deque[bytearray] = deque()  # fresh memory costs more than to copy into it

    @property
    def layout(self) -> Layout:
        """Of what its bytes are."""
        return self._seed.image.layout

    @contextmanager
    def readable(self, begin: int, end: int) -> Iterator[Sequence[memoryview]]:
        """A copy of `[begin, end)`, to read inside the block only."""
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
        """The digest of the bytes that chunk `chunk` has now; see `EngineImage.digest`."""
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
    """Write the seed's image to `uri`, a file or the rank's place in a folder; see `write_snapshot`.

    It digests nothing beforehand and stops nobody from reading. Raises SourceWeightsChanged where the seed holds no
    whole image, or begins to change it (`Seed.updating`) or puts it away (`Seed.suspend`) meanwhile: there is
    then no new snapshot.
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
