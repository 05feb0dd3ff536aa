"""Sources that give nothing while others do: their chunks are read from the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import cast

from rfork.errors import SourceUnreachable
from rfork.image.chunk_state import ChunkState
from rfork.peer.base import Peer
from rfork.receiver.active_sources import MOVE_AFTER_S, ActiveSources
from rfork.receiver.chunk_scheduler import ChunkRead, ChunkScheduler
from rfork.receiver.chunk_verifier import ChunkVerifier, ServingState
from rfork.receiver.deadline import Deadline
from rfork.receiver.peer_source import PeerSource
from rfork.receiver.source import SourceListener
from rfork.receiver.storage_source import StorageSource
from rfork.schema import Route, StorageAssignment
from rfork.testing.peers import InMemoryPeer
from rfork.transport.base import CONNECT_TIMEOUT_S, Endpoint, TokenSource
from tests.unit.receiver.fleet import (
    CHUNKS,
    NEVER_S,
    Fleet,
    Target,
    content_hash,
    image,
    plan,
    route,
    settings,
)

Window = Callable[[str], int]


def shared_scheduler(late: str | None = None) -> ChunkScheduler:
    """Half of four chunks from each of two sources; both hold all, but only `a` says so."""
    scheduler = ChunkScheduler(4)
    scheduler.assign({"a": [(0, 2)], "b": [(2, 4)]})
    scheduler.mark_available("a", [(0, 4)])
    scheduler.late = frozenset() if late is None else frozenset({late})
    return scheduler


def test_chunks_of_a_late_source_are_taken_by_one_that_is_done() -> None:
    """First its own, then those that nobody else gives."""
    scheduler = shared_scheduler(late="b")
    assert [0, 1, 2, 3] == [read.chunk for read in (scheduler.next_read() for _ in range(4)) if read is not None]


def test_a_source_that_is_not_late_keeps_its_chunks() -> None:
    """A relay that has not got them yet is waited for: that is its plan."""
    scheduler = shared_scheduler()
    assert [ChunkRead("a", 0), ChunkRead("a", 1), None] == [scheduler.next_read() for _ in range(3)]


def test_a_source_takes_no_more_than_its_window() -> None:
    """The window bounds what is read from one source, whoever it was planned for."""
    scheduler = shared_scheduler(late="b")
    next_reads = [scheduler.next_read(lambda _: 2) for _ in range(3)]
    assert [ChunkRead("a", 0), ChunkRead("a", 1), None] == next_reads


def test_a_late_source_takes_nothing_from_another_late_one() -> None:
    """Neither has given a byte."""
    scheduler = ChunkScheduler(2)
    scheduler.assign({"a": [(0, 1)], "b": [(1, 2)]})
    scheduler.mark_available("a", [(0, 2)])
    scheduler.late = frozenset({"a", "b"})
    assert [ChunkRead("a", 0), None] == [scheduler.next_read() for _ in range(2)]


class SilentPeer(InMemoryPeer):
    """A peer service that never answers, and whose connection can be closed."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._closed = threading.Event()

    def open(self, layout_id: str, transports: tuple[str, ...], deadline: float) -> tuple[str, Endpoint]:
        self._closed.wait(NEVER_S)
        return super().open(layout_id, transports, deadline)

    def close(self) -> None:
        self._closed.set()
        super().close()


def test_the_share_of_a_silent_source_is_read_from_others(fleet: Fleet) -> None:
    """The fork is done without a word of that source."""
    source_image = image(1)
    good, silent = fleet.source("good", source_image), fleet.source("silent", source_image)
    dial = fleet.peers.dial
    fleet.peers.dial = (  # type: ignore[method-assign]
        lambda address, token: (
            SilentPeer(fleet.peers, address, token) if address == silent.report().address else dial(address, token)
        )
    )
    target = Target(fleet, lambda *_: plan(route(good, (0, 3)), route(silent, (3, CHUNKS))))
    stats = target.run()
    assert content_hash(source_image) == content_hash(target.image)
    assert ["good"] == [share.source_id for share in stats.sources]


class UnconnectedSource(PeerSource):
    """A feed that never connects."""

    answered = False

    def start(self) -> None:
        return

    @property
    def has_no_bytes(self) -> bool:
        return not self.answered


def no_dial(address: str, token: TokenSource) -> Peer:
    raise NotImplementedError


class UnconnectedSourceFactory:
    """Makes feeds that never connect; see `rfork.receiver.active_sources.SourceFactoryProtocol`."""

    def open_peer(self, route: Route, listener: SourceListener) -> PeerSource:
        return UnconnectedSource(
            route, image(), {}, no_dial, settings(), listener, Deadline(time.monotonic() + NEVER_S)
        )

    def open_storage(self, read: StorageAssignment, listener: SourceListener) -> StorageSource:
        raise NotImplementedError

    def exclude(self, name: str) -> None:
        raise NotImplementedError


def test_a_source_that_is_read_from_and_gives_no_byte_is_given_up_after_the_time_to_connect(
    fleet: Fleet,
) -> None:
    """What is lost on the way is large packets, for instance: connections are made, and nothing comes."""
    source_image = image()
    scheduler = ChunkScheduler(2)
    digests = ChunkVerifier(source_image, ChunkState(source_image.layout.chunks), scheduler, cast(ServingState, None))
    sources = ActiveSources(scheduler, digests, UnconnectedSourceFactory(), cast(SourceListener, None))
    good, silent = fleet.source("good", source_image), fleet.source("silent", source_image)
    sources.apply_plan([route(good, (0, 1)), route(silent, (1, 2))], ())
    for name, chunk in (("good", 0), ("silent", 1)):
        scheduler.mark_available(name, [(chunk, chunk + 1)])
        assert ChunkRead(name, chunk) == scheduler.next_read()
    scheduler.verified(ChunkRead("good", 0))
    good_source = sources.find("good")
    assert isinstance(good_source, UnconnectedSource)
    good_source.answered = True
    sources.record_verified("good", "node", "memory", 1, 1)
    began_at = good_source.began_at
    assert not sources.find_stragglers(began_at)
    assert sources.find_stragglers(began_at + 2 * MOVE_AFTER_S)
    assert [] == sources.reasons
    sources.find_stragglers(began_at + 2 * CONNECT_TIMEOUT_S)
    assert [SourceUnreachable] == [type(reason) for reason in sources.reasons]
    assert [("silent", "network")] == [(each.instance_id, each.fault) for each in sources.faults]
