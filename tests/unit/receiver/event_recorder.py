"""Recorder of the events of one source."""

from __future__ import annotations

import threading

from rfork.errors import RforkError
from rfork.image.layout import Manifest
from rfork.image.ranges import Range
from rfork.receiver.events import (
    ChunksOffered,
    Event,
    ManifestReceived,
    ProvisionalDigests,
    SourceConnected,
    SourceFailed,
    TransportRefused,
)
from tests.unit.receiver.fleet import CHUNKS

ALL = (0, CHUNKS)


class EventRecorder:
    """Records the events that a source emits, by type."""

    def __init__(self) -> None:
        self.transports: list[str] = []
        self.manifests: list[Manifest] = []
        self.provisional_digests: list[tuple[str, dict[int, bytes]]] = []
        self.offers: list[tuple[Range, ...]] = []
        self.transport_errors: list[str] = []
        self.failures: list[RforkError] = []
        self.offered = threading.Event()
        self.failed = threading.Event()

    def __call__(self, event: Event) -> None:
        match event:
            case SourceConnected(_, transport):
                self.transports.append(transport)
            case ManifestReceived(_, manifest):
                self.manifests.append(manifest)
            case ProvisionalDigests(_, provisional_id, digests):
                self.provisional_digests.append((provisional_id, dict(digests)))
            case ChunksOffered(_, chunks):
                self.offers.append(chunks)
                self.offered.set()
            case TransportRefused(_, error):
                self.transport_errors.append(error.kind)
            case SourceFailed(_, error):
                self.failures.append(error)
                self.failed.set()
            case _:
                pass
