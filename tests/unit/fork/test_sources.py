"""The sources of one fork: what failed, and whom that blames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from rfork.errors import NotOneHost, RforkError, SourceChanged, SourceGone, TransportUnusable
from rfork.fork.digests import Digests, Giving
from rfork.fork.feed import Feed
from rfork.fork.giver import Listener
from rfork.fork.reading import Reading
from rfork.fork.schedule import Schedule
from rfork.fork.sources import Sources
from rfork.fork.storage_feed import StorageFeed
from rfork.image.board import ChunkBoard
from rfork.wire import Lease, Placement, Route, StorageRead
from tests.unit.fork.fleet import image


class Still:
    """A feed that does nothing."""

    def __init__(self, source_id: str) -> None:
        self.source_id = self.instance_id = source_id
        self.reading = Reading()

    def start(self) -> None:
        return


class Stills:
    """Opens feeds that do nothing."""

    def peer(self, route: Route, listener: Listener) -> Feed:
        return cast(Feed, Still(route.source_id))

    def storage(self, read: StorageRead, listener: Listener) -> StorageFeed:
        raise NotImplementedError

    def give_up(self, name: str) -> None:
        raise NotImplementedError


def reading_from(*names: str) -> Sources:
    """The sources of a fork that reads a chunk from each of these."""
    held = image()
    board, schedule = ChunkBoard(held.layout.chunks), Schedule(len(held.layout.chunks))
    digests = Digests(held, board, schedule, cast(Giving, None))
    sources = Sources(schedule, digests, Stills(), cast(Listener, None))
    routes = [
        Route(
            source_id=name,
            address=f"{name}:1",
            placement=Placement(host=name),
            transports=("memory",),
            generation=0,
            chunks=((chunk, chunk + 1),),
            lease=Lease(token="token", expires_in_s=60.0),
        )
        for chunk, name in enumerate(names)
    ]
    sources.adopt(routes, ())
    return sources


def fail(sources: Sources, name: str, error: RforkError) -> None:
    feed = sources.find(name)
    assert feed is not None
    sources.fail(feed, error)


def test_a_transport_passed_over_is_said_once() -> None:
    """Each reason of its own, however many sources it holds for; the planner hears of none."""
    sources = reading_from("a", "b")
    for error in (NotOneHost("two hosts"), NotOneHost("two hosts"), TransportUnusable("no device")):
        sources.note(error)
    assert (["two hosts", "no device"], ()) == ([str(each) for each in sources.reasons], sources.faults)


CHANGED, GONE, UNUSABLE = SourceChanged("changed"), SourceGone("gone"), NotOneHost("two hosts")


@pytest.mark.parametrize(
    ("errors", "noted", "changing"),
    [
        ((), False, False),
        ((), True, False),
        ((CHANGED,), False, True),
        ((CHANGED,), True, True),
        ((CHANGED, GONE), True, False),
        ((GONE, CHANGED), True, True),
        ((CHANGED, UNUSABLE), False, True),
    ],
)
def test_whether_other_weights_may_come(errors: Sequence[RforkError], noted: bool, changing: bool) -> None:
    """The last source that failed changed its weights: what was said of transports since is no failure."""
    sources = reading_from("a", "b")
    for name, error in zip("ab", errors, strict=False):
        fail(sources, name, error)
    if noted:
        sources.note(UNUSABLE)
    assert changing == sources.changing
