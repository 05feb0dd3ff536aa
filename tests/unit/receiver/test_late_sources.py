"""Late sources: their chunks are read from other sources."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rfork.receiver.chunk_scheduler import ChunkRead, ChunkScheduler
from rfork.testing.peers import InMemoryPeer
from rfork.transport.base import Endpoint
from tests.unit.receiver.fleet import (
    CHUNKS,
    NEVER_S,
    Fleet,
    Target,
    content_hash,
    image,
    plan,
    route,
)

Window = Callable[[str], int]


def shared_scheduler(late: str | None = None) -> ChunkScheduler:
    """Return a scheduler that assigns two of four chunks to each of two sources.

    Only `a` offers its chunks, and it offers all four.
    """
    scheduler = ChunkScheduler(4)
    scheduler.assign({"a": [(0, 2)], "b": [(2, 4)]})
    scheduler.mark_available("a", [(0, 4)])
    scheduler.late = frozenset() if late is None else frozenset({late})
    return scheduler


def test_chunks_of_a_late_source_are_read_from_an_idle_one() -> None:
    """The idle source first serves its own chunks."""
    scheduler = shared_scheduler(late="b")
    assert [0, 1, 2, 3] == [read.chunk for read in (scheduler.next_read() for _ in range(4)) if read is not None]


def test_a_source_that_is_not_late_keeps_its_chunks() -> None:
    """A relay that has not received its chunks yet is waited for, as planned."""
    scheduler = shared_scheduler()
    assert [ChunkRead("a", 0), ChunkRead("a", 1), None] == [scheduler.next_read() for _ in range(3)]


def test_reads_from_a_source_stay_within_its_window() -> None:
    """The window includes chunks that were assigned to another source."""
    scheduler = shared_scheduler(late="b")
    next_reads = [scheduler.next_read(lambda _: 2) for _ in range(3)]
    assert [ChunkRead("a", 0), ChunkRead("a", 1), None] == next_reads


def test_a_late_source_does_not_serve_chunks_of_another_late_source() -> None:
    """Neither has delivered a byte."""
    scheduler = ChunkScheduler(2)
    scheduler.assign({"a": [(0, 1)], "b": [(1, 2)]})
    scheduler.mark_available("a", [(0, 2)])
    scheduler.late = frozenset({"a", "b"})
    assert [ChunkRead("a", 0), None] == [scheduler.next_read() for _ in range(2)]


class SilentPeer(InMemoryPeer):
    """A peer that never responds and whose connection can be closed."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._closed = threading.Event()

    def open(self, layout_id: str, transports: tuple[str, ...], deadline: float) -> tuple[str, Endpoint]:
        self._closed.wait(NEVER_S)
        return super().open(layout_id, transports, deadline)

    def close(self) -> None:
        self._closed.set()
        super().close()


def test_chunks_of_a_silent_source_are_read_from_another(fleet: Fleet) -> None:
    """The fork completes without any message from the silent source."""
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
