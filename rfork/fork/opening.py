"""How a fork reaches the sources that a plan names. Runs on the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rfork import settings as options
from rfork.fork.cold import Offers
from rfork.fork.deadline import Deadline
from rfork.fork.feed import Feed
from rfork.fork.giver import Listener
from rfork.fork.reading import Reading
from rfork.fork.storage_feed import StorageFeed
from rfork.image.memory import Image
from rfork.image.ranges import count
from rfork.peer.base import Dial
from rfork.settings import Settings, StorageSettings
from rfork.storage.base import name_of
from rfork.tracing import OFF, Tracer
from rfork.transport.base import Transport
from rfork.wire import Route, StorageRead


@dataclass(frozen=True)
class Opening:
    """Makes the feeds of one fork; see `rfork.fork.sources.Open`. `deadline` is the fork's own."""

    image: Image
    transports: Mapping[str, Transport]
    dial: Dial
    settings: Settings
    offers: Offers
    instance_id: str
    deadline: Deadline
    tracer: Tracer = OFF

    def peer(self, route: Route, listener: Listener) -> Feed:
        """The feed of one route."""
        reading = Reading(
            self.tracer.begin(
                "read from peer",
                kind="client",
                source=route.source_id,
                source_host=route.placement.host,
                server=route.address,
                planned_chunks=count(route.chunks),
            )
        )
        return Feed(
            route, self.image, self.transports, self.dial, self.settings, listener, self.deadline, reading
        )

    def storage(self, read: StorageRead, listener: Listener) -> StorageFeed:
        """The feed of this instance's own storage."""
        name, chunks = name_of(read.kind, read.uri), count(read.chunks)
        reading = Reading(self.tracer.begin("read from storage", source=name, planned_chunks=chunks))
        return StorageFeed(
            read,
            self.offers.find,
            self.image,
            listener,
            self.settings.storage_stall_s,
            options.load(StorageSettings),
            instance_id=self.instance_id,
            host=self.settings.host,
            reading=reading,
        )

    def give_up(self, name: str) -> None:
        """The storage of that name failed: the planner is not told of it again."""
        self.offers.drop(name)
