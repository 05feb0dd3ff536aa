"""A snapshot of what a seed holds, written by its own process while it serves. Runs on the source."""

from __future__ import annotations

from collections.abc import Callable

from rfork.errors import SourceChanged
from rfork.seed.seed import Seed
from rfork.settings import StorageSettings
from rfork.storage.snapshots.writer import Written, write_snapshot


def snapshot_of(
    seed: Seed,
    uri: str,
    *,
    shared: bool = False,
    progress: Callable[[int], None] | None = None,
    settings: StorageSettings | None = None,
) -> Written:
    """Write the seed's image to `uri`, a file or the rank's place in a folder; see `write_snapshot`.

    It digests nothing beforehand and stops nobody from reading. Raises SourceChanged where the seed holds no
    whole image, or begins to change it (`Seed.updating`) meanwhile: there is then no new snapshot.
    """
    generation, manifest = seed.generation, seed.manifest
    if manifest is None or not seed.board.complete:
        raise SourceChanged("there is no whole image to write: the seed receives it still, or changes it")

    def check(count: int) -> None:
        if seed.generation != generation:
            raise SourceChanged("the seed changes its weights: the snapshot of those before is given up")
        if progress is not None:
            progress(count)

    check(0)
    return write_snapshot(
        seed.image,
        manifest,
        uri,
        rank=seed.identity.rank,
        model=seed.identity.model,
        shared=shared,
        progress=check,
        settings=settings,
    )
