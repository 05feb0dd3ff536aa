"""Listener and reader used by the tests of sources."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from rfork.errors import RforkError, TransportUnavailable
from rfork.image.manifest import Manifest
from rfork.image.ranges import Range
from rfork.receiver.source import ChunkSource
from tests.unit.receiver.fleet import (
    CHUNKS,
)

ALL = (0, CHUNKS)


class RecordingListener:
    """Listener that records every callback of a source."""

    def __init__(self) -> None:
        self.manifests: list[Manifest] = []
        self.provisional_digests: list[tuple[str, dict[int, bytes]]] = []
        self.offers: list[tuple[Range, ...]] = []
        self.transport_errors: list[str] = []
        self.failures: list[RforkError] = []
        self.offered = threading.Event()
        self.failed = threading.Event()

    def on_manifest(self, source: ChunkSource, manifest: Manifest) -> None:
        self.manifests.append(manifest)

    def on_provisional_digests(self, source: ChunkSource, provisional_id: str, digests: Mapping[int, bytes]) -> None:
        self.provisional_digests.append((provisional_id, dict(digests)))

    def digests_to_compare(self) -> Mapping[int, bytes]:
        return {}

    def on_local_files(
        self, source: ChunkSource, origin: str, compared: Mapping[int, bytes], *, agrees: bool
    ) -> Mapping[int, bytes]:
        self.provisional_digests.append((origin, {}))
        return {}

    def on_chunks_available(self, source: ChunkSource, chunks: tuple[Range, ...]) -> None:
        self.offers.append(chunks)
        self.offered.set()

    def next_chunks(self, source: ChunkSource, count: int) -> tuple[Sequence[int], Sequence[int]]:
        return (), ()

    def on_transport_unavailable(self, source: ChunkSource, error: TransportUnavailable) -> None:
        self.transport_errors.append(error.kind)

    def on_failure(self, source: ChunkSource, error: RforkError) -> None:
        self.failures.append(error)
        self.failed.set()
