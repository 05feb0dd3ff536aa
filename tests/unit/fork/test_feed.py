"""A feed: one source as the target sees it."""

from __future__ import annotations

import threading
import time
from itertools import count
from types import SimpleNamespace

import pytest

from rfork.control.lease import derive_key
from rfork.errors import SourceGone, SourceStalled
from rfork.fork.deadline import Deadline
from rfork.fork.feed import Feed
from rfork.image.board import ChunkBoard
from rfork.peer.base import Dial, Peer
from rfork.peer.memory import MemoryPeer
from rfork.seed.seed import Identity, Seed
from rfork.transport import memory
from rfork.transport.base import TokenSource
from rfork.transport.memory import MemoryTransport
from tests.unit.fork.feeds import ALL, Heard
from tests.unit.fork.fleet import (
    NEVER_S,
    SECRET,
    Fleet,
    image,
    lease,
    route,
    settings,
)


def feed_of(
    fleet: Fleet, seed: Seed, heard: Heard, *, dial: Dial | None = None, stall_s: float = NEVER_S
) -> Feed:
    return Feed(
        route(seed, ALL),
        image(),
        {"memory": MemoryTransport(fleet.network)},
        dial or fleet.peers.dial,
        settings(stall_s=stall_s),
        heard,
        Deadline(time.monotonic() + NEVER_S),
    )


def test_the_manifest_comes_before_the_first_offer(fleet: Fleet) -> None:
    """A seed's feed tells its manifest once, then all its chunks, over the transport both have."""
    seed, heard = fleet.source("a", image(1)), Heard()
    feed = feed_of(fleet, seed, heard)
    feed.start()
    assert heard.offered.wait(NEVER_S)
    assert ([seed.manifest], [(ALL,)], "memory") == (heard.manifests, heard.offers, feed.transport)
    feed.close()
    feed.join()
    assert [] == heard.failures


def test_a_feed_closed_while_it_dials_ends(fleet: Fleet) -> None:
    """A close that comes before there is a connection is kept: the feed never opens a channel."""
    seed, heard = fleet.source("a", image(1)), Heard()
    dialling, go_on = threading.Event(), threading.Event()

    def dial(address: str, token: TokenSource) -> Peer:
        dialling.set()
        go_on.wait(NEVER_S)
        return fleet.peers.dial(address, token)

    feed = feed_of(fleet, seed, heard, dial=dial)
    feed.start()
    dialling.wait(NEVER_S)
    feed.close()
    go_on.set()
    feed.join()
    assert ([], [], ()) == (heard.offers, heard.failures, seed.report().readers)


def test_a_feed_without_a_channel_reads_nothing(fleet: Fleet) -> None:
    """Reading from a feed that has not connected says that the source is gone."""
    feed = feed_of(fleet, fleet.source("a", image(1)), Heard())
    with pytest.raises(SourceGone):
        feed.read(0, 1, time.monotonic() + NEVER_S)


def test_a_transport_with_a_bug_ends_its_feed(fleet: Fleet) -> None:
    """An exception of any kind is told as a failure of the source, not lost on a thread."""

    def dial(address: str, token: TokenSource) -> Peer:
        raise ZeroDivisionError("a bug")

    heard = Heard()
    feed = feed_of(fleet, fleet.source("a", image(1)), heard, dial=dial)
    feed.start()
    feed.join()
    assert ["TargetError"] == [error.kind for error in heard.failures]
    assert "ZeroDivisionError: a bug" in str(heard.failures[0])


def test_a_source_that_closes_the_channel_is_gone(fleet: Fleet) -> None:
    """The end of the progress stream is the end of the source."""
    held = image(1)
    seed, heard = fleet.source("a", held, board=ChunkBoard(held.layout.chunks, [0])), Heard()
    feed = feed_of(fleet, seed, heard)
    feed.start()
    heard.offered.wait(NEVER_S)
    channels = seed._leases._channels
    seed.close_channel(next(iter(channels)))
    feed.join()
    assert ["SourceGone"] == [error.kind for error in heard.failures]


def test_a_waiting_reader_shows_its_newer_lease(fleet: Fleet) -> None:
    """A reader that waits for a slow relay, and reads nothing, shows the newer lease to keep its place."""
    held, heard = image(1), Heard()
    relay = fleet.source("a", held, board=ChunkBoard(held.layout.chunks), manifest=held.manifest())
    # It is told to show the next one soon, and keeps its place however late it does.
    first = lease(relay).model_copy(update={"expires_in_s": 0.3})
    newer, shown = lease(relay, lives_s=NEVER_S + 1), threading.Event()

    class Showing(MemoryPeer):
        def renew(self, deadline: float) -> None:
            super().renew(deadline)
            shown.set()

    feed = Feed(
        route(relay, ALL).model_copy(update={"lease": first}),
        image(),
        {"memory": MemoryTransport(fleet.network)},
        lambda address, token: Showing(fleet.peers, address, token),
        settings(stall_s=0.4),
        heard,
        Deadline(time.monotonic() + NEVER_S),
    )
    feed.start()
    feed.renew(newer)
    assert shown.wait(NEVER_S)
    feed.close()
    feed.join()
    assert [] == heard.failures


@pytest.mark.parametrize(
    ("silent_s", "idle_s", "starved", "expected"),
    [
        (0.0, 0.0, True, None),
        (9.0, 29.0, True, None),
        (11.0, 11.0, False, "silent for 11.0 s"),
        (0.0, 31.0, True, "offered no new chunk for 31.0 s"),
        (0.0, 31.0, False, None),
        (11.0, 5.0, True, None),
    ],
)
def test_when_a_source_counts_as_stalled(
    fleet: Fleet, silent_s: float, idle_s: float, starved: bool, expected: str | None
) -> None:
    """After `stall_s` (10 s) without a sign of life, or three times that without anything to read."""
    feed = feed_of(fleet, fleet.source("a", image(1)), Heard(), stall_s=10.0)
    feed.heard_at, feed.advanced_at = 100.0 - silent_s, 100.0 - idle_s
    stall = feed.check(100.0, starved=starved)
    assert expected == (None if stall is None else str(stall).partition(": ")[2])


def test_a_reader_keeps_to_the_rate_that_its_source_tells(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told a byte a second where no code of the source holds it back, it gets a slice and then waits."""
    fast = fleet.source("a", image(1))
    seed = Seed(
        fast.image,
        Identity("model", instance_id="slow"),
        settings(egress_rate=1),
        [MemoryTransport(fleet.network, one_sided=True)],
        manifest=fast.manifest,
        serve_peer=fleet.peers.service,
    )
    with seed:
        seed.learn_keys([derive_key(SECRET, "slow")])
        heard = Heard()
        feed = feed_of(fleet, seed, heard)
        feed.start()
        assert heard.offered.wait(NEVER_S)
        looks = count()  # a second passes with each look at the clock
        monkeypatch.setattr(memory, "time", SimpleNamespace(monotonic=lambda: next(looks)))
        with pytest.raises(SourceStalled, match="held back"):
            feed.read(0, 2 << 20, 3.0)
        feed.close()
        feed.join()
