"""Sources that give nothing while others do: their chunks are read from the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import cast

from rfork.errors import SourceUnreachable
from rfork.fork.deadline import Deadline
from rfork.fork.digests import Digests, Giving
from rfork.fork.feed import Feed
from rfork.fork.giver import Listener
from rfork.fork.schedule import Read, Schedule
from rfork.fork.sources import MOVE_AFTER_S, Sources
from rfork.fork.storage_feed import StorageFeed
from rfork.image.board import ChunkBoard
from rfork.peer.base import Peer
from rfork.peer.memory import MemoryPeer
from rfork.transport.base import CONNECT_S, Endpoint, TokenSource
from rfork.wire import Route, StorageRead
from tests.unit.fork.fleet import CHUNKS, NEVER_S, Fleet, Target, content, image, plan, route, settings

Window = Callable[[str], int]


def shared(late: str | None = None) -> Schedule:
    """Half of four chunks from each of two sources; both hold all, but only `a` says so."""
    schedule = Schedule(4)
    schedule.adopt({"a": [(0, 2)], "b": [(2, 4)]})
    schedule.offer("a", [(0, 4)])
    schedule.late = frozenset() if late is None else frozenset({late})
    return schedule


def test_chunks_of_a_late_source_are_taken_by_one_that_is_done() -> None:
    """First its own, then those that nobody else gives."""
    schedule = shared(late="b")
    assert [0, 1, 2, 3] == [read.chunk for read in (schedule.take() for _ in range(4)) if read is not None]


def test_a_source_that_is_not_late_keeps_its_chunks() -> None:
    """A relay that has not got them yet is waited for: that is its plan."""
    schedule = shared()
    assert [Read("a", 0), Read("a", 1), None] == [schedule.take() for _ in range(3)]


def test_a_source_takes_no_more_than_its_window() -> None:
    """The window bounds what is read from one source, whoever it was planned for."""
    schedule = shared(late="b")
    taken = [schedule.take(lambda _: 2) for _ in range(3)]
    assert [Read("a", 0), Read("a", 1), None] == taken


def test_a_late_source_takes_nothing_from_another_late_one() -> None:
    """Neither has given a byte."""
    schedule = Schedule(2)
    schedule.adopt({"a": [(0, 1)], "b": [(1, 2)]})
    schedule.offer("a", [(0, 2)])
    schedule.late = frozenset({"a", "b"})
    assert [Read("a", 0), None] == [schedule.take() for _ in range(2)]


class SilentPeer(MemoryPeer):
    """A peer service that never answers, and whose connection can be closed."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._hung_up = threading.Event()

    def open(self, layout_id: str, transports: tuple[str, ...], deadline: float) -> tuple[str, Endpoint]:
        self._hung_up.wait(NEVER_S)
        return super().open(layout_id, transports, deadline)

    def close(self) -> None:
        self._hung_up.set()
        super().close()


def test_the_share_of_a_silent_source_is_read_from_others(fleet: Fleet) -> None:
    """The fork is done without a word of that source."""
    held = image(1)
    good, silent = fleet.source("good", held), fleet.source("silent", held)
    dial = fleet.peers.dial
    fleet.peers.dial = (  # type: ignore[method-assign]
        lambda address, token: (
            SilentPeer(fleet.peers, address, token)
            if address == silent.report().address
            else dial(address, token)
        )
    )
    target = Target(fleet, lambda *_: plan(route(good, (0, 3)), route(silent, (3, CHUNKS))))
    pulled = target.run()
    assert content(held) == content(target.image)
    assert ["good"] == [share.source_id for share in pulled.sources]


class UnopenedFeed(Feed):
    """A feed that never connects."""

    answered = False

    def start(self) -> None:
        return

    @property
    def unanswered(self) -> bool:
        return not self.answered


def no_dial(address: str, token: TokenSource) -> Peer:
    raise NotImplementedError


class Unopened:
    """Makes feeds that never connect; see `rfork.fork.sources.Open`."""

    def peer(self, route: Route, listener: Listener) -> Feed:
        return UnopenedFeed(
            route, image(), {}, no_dial, settings(), listener, Deadline(time.monotonic() + NEVER_S)
        )

    def storage(self, read: StorageRead, listener: Listener) -> StorageFeed:
        raise NotImplementedError

    def give_up(self, name: str) -> None:
        raise NotImplementedError


def test_a_source_that_is_read_from_and_gives_no_byte_is_given_up_after_the_time_to_connect(
    fleet: Fleet,
) -> None:
    """What is lost on the way is large packets, for instance: connections are made, and nothing comes."""
    held = image()
    schedule = Schedule(2)
    digests = Digests(held, ChunkBoard(held.layout.chunks), schedule, cast(Giving, None))
    sources = Sources(schedule, digests, Unopened(), cast(Listener, None))
    good, silent = fleet.source("good", held), fleet.source("silent", held)
    sources.adopt([route(good, (0, 1)), route(silent, (1, 2))], ())
    for name, chunk in (("good", 0), ("silent", 1)):
        schedule.offer(name, [(chunk, chunk + 1)])
        assert Read(name, chunk) == schedule.take()
    schedule.verified(Read("good", 0))
    good_feed = sources.find("good")
    assert isinstance(good_feed, UnopenedFeed)
    good_feed.answered = True
    sources.credit("good", "node", "memory", 1, 1)
    began_at = good_feed.began_at
    assert not sources.look_for_late(began_at)
    assert sources.look_for_late(began_at + 2 * MOVE_AFTER_S)
    assert [] == sources.reasons
    sources.look_for_late(began_at + 2 * CONNECT_S)
    assert [SourceUnreachable] == [type(reason) for reason in sources.reasons]
    assert [("silent", "network")] == [(each.instance_id, each.fault) for each in sources.faults]
