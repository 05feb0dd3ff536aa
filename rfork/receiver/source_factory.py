"""Creates the sources of a plan. Runs on the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rfork import settings as options
from rfork.image.memory import Image
from rfork.image.ranges import count
from rfork.peer.base import Dial
from rfork.receiver.cold_start import StorageCandidates
from rfork.receiver.deadline import Deadline
from rfork.receiver.peer_source import PeerSource
from rfork.receiver.source import SourceListener
from rfork.receiver.source_span import SourceSpan
from rfork.receiver.storage_source import StorageSource
from rfork.schema import Route, StorageAssignment
from rfork.settings import InstanceSettings, StorageSettings
from rfork.storage.base import storage_name
from rfork.tracing import NOOP_TRACER, Tracer
from rfork.transport.base import Transport


@dataclass(frozen=True)
class SourceFactory:
    """Creates the sources of one fork; see `rfork.receiver.active_sources.SourceFactoryProtocol`.

    `deadline` is the fork's.
    """

    image: Image
    transports: Mapping[str, Transport]
    dial: Dial
    settings: InstanceSettings
    candidates: StorageCandidates
    instance_id: str
    deadline: Deadline
    tracer: Tracer = NOOP_TRACER

    def open_peer(self, route: Route, listener: SourceListener) -> PeerSource:
        """Return the source for one route."""
        source_span = SourceSpan(
            self.tracer.start_span(
                "read from peer",
                kind="client",
                source=route.source_id,
                source_host=route.placement.host,
                server=route.address,
                planned_chunks=count(route.chunks),
            )
        )
        return PeerSource(
            route, self.image, self.transports, self.dial, self.settings, listener, self.deadline, source_span
        )

    def open_storage(self, read: StorageAssignment, listener: SourceListener) -> StorageSource:
        """Return the source for this instance's own storage."""
        name, chunks = storage_name(read.kind, read.uri), count(read.chunks)
        source_span = SourceSpan(self.tracer.start_span("read from storage", source=name, planned_chunks=chunks))
        return StorageSource(
            read,
            self.candidates.storage_for,
            self.image,
            listener,
            self.settings.storage_idle_timeout_s,
            options.load(StorageSettings),
            instance_id=self.instance_id,
            host=self.settings.node_name,
            source_span=source_span,
        )

    def exclude(self, name: str) -> None:
        """Do not offer the storage of this name to the planner again: it failed."""
        self.candidates.remove(name)
