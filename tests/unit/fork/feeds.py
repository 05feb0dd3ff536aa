"""What tests of feeds read with, and who listens."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from rfork.errors import RforkError, TransportUnusable
from rfork.fork.giver import Giver
from rfork.image.manifest import Manifest
from rfork.image.ranges import Range
from tests.unit.fork.fleet import (
    CHUNKS,
)

ALL = (0, CHUNKS)


class Heard:
    """Keeps what a feed told."""

    def __init__(self) -> None:
        self.manifests: list[Manifest] = []
        self.drafts: list[tuple[str, dict[int, bytes]]] = []
        self.offers: list[tuple[Range, ...]] = []
        self.detours: list[str] = []
        self.failures: list[RforkError] = []
        self.offered = threading.Event()
        self.failed = threading.Event()

    def on_manifest(self, feed: Giver, manifest: Manifest) -> None:
        self.manifests.append(manifest)

    def on_draft(self, feed: Giver, draft: str, digests: Mapping[int, bytes]) -> None:
        self.drafts.append((draft, dict(digests)))

    def held(self) -> Mapping[int, bytes]:
        return {}

    def on_files(
        self, feed: Giver, origin: str, compared: Mapping[int, bytes], *, agrees: bool
    ) -> Mapping[int, bytes]:
        self.drafts.append((origin, {}))
        return {}

    def on_offer(self, feed: Giver, chunks: tuple[Range, ...]) -> None:
        self.offers.append(chunks)
        self.offered.set()

    def upcoming(self, feed: Giver, count: int) -> tuple[Sequence[int], Sequence[int]]:
        return (), ()

    def on_detour(self, feed: Giver, error: TransportUnusable) -> None:
        self.detours.append(error.kind)

    def on_failure(self, feed: Giver, error: RforkError) -> None:
        self.failures.append(error)
        self.failed.set()
