"""A feed: one source as the target sees it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from rfork.control.lease import derive_key
from rfork.errors import NotOneHost, RforkError, SourceGone, SourceStalled, TransportUnusable
from rfork.fork.deadline import Deadline
from rfork.fork.feed import Feed
from rfork.fork.giver import Giver
from rfork.image.board import ChunkBoard
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.image.ranges import Range
from rfork.peer.base import Dial, Peer
from rfork.peer.memory import MemoryPeer
from rfork.seed.seed import Identity, Seed
from rfork.transport.base import Endpoint, Gate, Talk, TokenSource, silent
from rfork.transport.memory import Faults, MemoryExporter, MemoryNetwork, MemoryReader, MemoryTransport
from tests.unit.fork.fleet import (
    CHUNKS,
    NEVER_S,
    SECRET,
    Fleet,
    Script,
    Target,
    image,
    lease,
    plan,
    route,
    settings,
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
    first, newer, shown = lease(relay, lives_s=0.3), lease(relay, lives_s=NEVER_S + 1), threading.Event()

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


def test_a_reader_keeps_to_the_rate_that_its_source_tells(fleet: Fleet) -> None:
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
        with pytest.raises(SourceStalled, match="held back"):
            feed.read(0, 2 << 20, time.monotonic() + 0.1)
        feed.close()
        feed.join()


class Elsewhere(MemoryTransport):
    """A transport of this name that finds out at `connect` that the two are not on one host."""

    def __init__(self, network: MemoryNetwork, name: str) -> None:
        super().__init__(network)
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    def export(self, image: Image, gate: Gate) -> MemoryExporter:
        return Named(self._network, image, gate, Faults(), name=self._name)

    def connect(
        self, endpoint: Endpoint, image: Image, token: TokenSource, deadline: float, talk: Talk = silent
    ) -> MemoryReader:
        raise NotOneHost(f"{self._name}: the source runs on another host")


class Named(MemoryExporter):
    """An exporter that says another transport's name."""

    def __init__(
        self, network: MemoryNetwork, image: Image, gate: Gate, faults: Faults, *, name: str
    ) -> None:
        super().__init__(network, image, gate, faults)
        self._transport = name

    def endpoint(self) -> Endpoint:
        return replace(super().endpoint(), transport=self._transport)


@contextmanager
def fed(
    fleet: Fleet,
    heard: Heard,
    transports: Sequence[MemoryTransport],
    *,
    max_readers: int = 4,
    dial: Dial | None = None,
    stall_s: float = NEVER_S,
) -> Iterator[tuple[Seed, Feed]]:
    """A source that offers these, best first, and a feed of it, which has them too and has begun."""
    held = image(1)
    seed = Seed(
        held,
        Identity("model", instance_id="a"),
        settings(max_readers=max_readers, drain_s=0),
        list(transports),
        manifest=held.manifest(),
        serve_peer=fleet.peers.service,
    )
    with seed:
        seed.learn_keys([derive_key(SECRET, "a")])
        names = tuple(transport.name for transport in transports)
        feed = Feed(
            route(seed, ALL).model_copy(update={"transports": names}),
            image(),
            {transport.name: transport for transport in transports},
            dial or fleet.peers.dial,
            settings(stall_s=stall_s),
            heard,
            Deadline(time.monotonic() + NEVER_S),
        )
        feed.start()
        try:
            yield seed, feed
        finally:
            feed.close()
            feed.join()


def test_a_transport_that_cannot_be_used_is_passed_over(fleet: Fleet) -> None:
    """The next one that both have is taken, over which the chunks arrive; nobody has failed."""
    heard, memory = Heard(), MemoryTransport(fleet.network)
    with fed(fleet, heard, [Elsewhere(fleet.network, "shared_memory"), memory]) as (_, feed):
        assert heard.offered.wait(NEVER_S)
        feed.read(0, 1 << 20, time.monotonic() + NEVER_S)
        assert (["NotOneHost"], [], "memory") == (heard.detours, heard.failures, feed.transport)


def test_a_detour_takes_one_readers_place(fleet: Fleet) -> None:
    """The channel of the transport that cannot be used is given back: a source with one place serves on."""
    heard, memory = Heard(), MemoryTransport(fleet.network)
    unusable = [Elsewhere(fleet.network, name) for name in ("cuda_ipc", "shared_memory")]
    with fed(fleet, heard, [*unusable, memory], max_readers=1) as (seed, _):
        assert heard.offered.wait(NEVER_S)
        assert (["NotOneHost"] * 2, 1) == (heard.detours, len(seed._leases._channels))


def test_a_source_that_no_transport_reaches_fails_without_blame(fleet: Fleet) -> None:
    """The last transport's error is the feed's end, a fault of the network; the place is free again."""
    heard = Heard()
    unusable = [Elsewhere(fleet.network, name) for name in ("cuda_ipc", "shared_memory")]
    with fed(fleet, heard, unusable) as (seed, feed):
        feed.join()
        assert (["NotOneHost"], [("NotOneHost", "network")], 0) == (
            heard.detours,
            [(error.kind, error.fault) for error in heard.failures],
            len(seed._leases._channels),
        )


class Slow(Elsewhere):
    """It finds out only when its time is up."""

    def connect(
        self, endpoint: Endpoint, image: Image, token: TokenSource, deadline: float, talk: Talk = silent
    ) -> MemoryReader:
        threading.Event().wait(max(0.0, deadline - time.monotonic()))
        raise TransportUnusable(f"{self._name}: took too long to register")


class Hurried(MemoryPeer):
    """A peer service that answers nothing of what comes too late."""

    def open(self, layout_id: str, transports: tuple[str, ...], deadline: float) -> tuple[str, Endpoint]:
        self._check(deadline)
        return super().open(layout_id, transports, deadline)

    def leave(self, channel_id: str, deadline: float) -> None:
        self._check(deadline)
        super().leave(channel_id, deadline)

    def _check(self, deadline: float) -> None:
        if time.monotonic() >= deadline:
            raise SourceStalled("no answer in time")


def test_a_slow_detour_leaves_the_next_transport_its_time(fleet: Fleet) -> None:
    """One that used up all of its time is passed over, not the source; its place is given back."""
    heard, memory = Heard(), MemoryTransport(fleet.network)

    def dial(address: str, token: TokenSource) -> Peer:
        return Hurried(fleet.peers, address, token)

    slow = [Slow(fleet.network, name) for name in ("transfer_engine", "nccl")]
    with fed(fleet, heard, [*slow, memory], max_readers=1, dial=dial, stall_s=0.5) as (_, feed):
        assert heard.offered.wait(NEVER_S) or heard.failures
        assert (["TransportUnusable"] * 2, [], "memory") == (heard.detours, heard.failures, feed.transport)


@pytest.mark.parametrize("others", [True, False])
def test_a_place_that_cannot_be_given_back_is_no_failure(fleet: Fleet, others: bool) -> None:
    """The next transport is taken; without one, what ends the feed is why the last cannot be used."""

    class Deaf(MemoryPeer):
        def leave(self, channel_id: str, deadline: float) -> None:
            raise SourceStalled("no answer in time")

    def dial(address: str, token: TokenSource) -> Peer:
        return Deaf(fleet.peers, address, token)

    heard = Heard()
    transports: list[MemoryTransport] = [Elsewhere(fleet.network, "shared_memory")]
    if others:
        transports.append(MemoryTransport(fleet.network))
    with fed(fleet, heard, transports, dial=dial):
        (heard.offered if others else heard.failed).wait(NEVER_S)
        told = heard.detours, [error.kind for error in heard.failures]
    assert ((["NotOneHost"], []) if others else ([], ["NotOneHost"])) == told


def test_silence_counts_once_there_is_a_reader(fleet: Fleet) -> None:
    """To connect has a deadline of its own; a connect that keeps to none counts as silence in the end."""
    connecting, go_on = threading.Event(), threading.Event()

    class Waiting(MemoryTransport):
        def connect(
            self, endpoint: Endpoint, image: Image, token: TokenSource, deadline: float, talk: Talk = silent
        ) -> MemoryReader:
            connecting.set()
            go_on.wait(NEVER_S)
            return super().connect(endpoint, image, token, deadline, talk)

    with fed(fleet, Heard(), [Waiting(fleet.network)], stall_s=10.0) as (_, feed):
        assert connecting.wait(NEVER_S)
        now = time.monotonic()
        stalls = [feed.check(now + later, starved=True) is not None for later in (10.5, 19.0, 20.5)]
        go_on.set()
    assert [False, False, True] == stalls


@pytest.mark.parametrize("opened", ["shared_memory", "carrier pigeon"])
def test_a_source_that_opens_what_was_not_asked_for(fleet: Fleet, opened: str) -> None:
    """It is to blame, be it a transport passed over before or one that nobody has heard of."""

    class Wilful(MemoryPeer):
        def open(self, layout_id: str, transports: tuple[str, ...], deadline: float) -> tuple[str, Endpoint]:
            channel_id, endpoint = super().open(layout_id, transports, deadline)
            if endpoint.transport == "shared_memory":
                return channel_id, endpoint
            return channel_id, replace(endpoint, transport=opened)

    def dial(address: str, token: TokenSource) -> Peer:
        return Wilful(fleet.peers, address, token)

    heard = Heard()
    transports = [Elsewhere(fleet.network, "shared_memory"), MemoryTransport(fleet.network)]
    with fed(fleet, heard, transports, dial=dial):
        assert heard.failed.wait(NEVER_S)
        told = [(error.kind, error.fault) for error in heard.failures]
    assert [("SourceCorrupt", "source")] == told
    assert opened in str(heard.failures[0])


def test_a_source_out_of_reach_is_given_up_at_once(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner hears of it once, as a fault of the network, and another source gives everything."""
    held = image(1)
    a, b = fleet.source("a", held), fleet.source("b", held)
    beyond = next(iter(fleet.network.exports))
    connect = MemoryTransport.connect

    def reach(
        transport: MemoryTransport,
        endpoint: Endpoint,
        image: Image,
        token: TokenSource,
        deadline: float,
        talk: Talk = silent,
    ) -> MemoryReader:
        if endpoint.parameters["name"] == beyond:
            raise NotOneHost("memory: the source runs on another host")
        return connect(transport, endpoint, image, token, deadline, talk)

    monkeypatch.setattr(MemoryTransport, "connect", reach)
    script = Script([lambda: plan(route(a, ALL)), lambda: plan(route(b, ALL))])
    target = Target(fleet, script)
    target.run()
    assert ([("a", "network", "NotOneHost")], ["NotOneHost"], {"b": CHUNKS}) == (
        script.faults,
        target.reasons,
        {share.source_id: share.verified_chunks for share in target.puller.shares},
    )
