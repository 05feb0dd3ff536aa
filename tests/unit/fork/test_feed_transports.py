"""A feed whose source is beyond the reach of some of the transports that both have."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from rfork.control.lease import derive_key
from rfork.errors import NotOneHost, SourceStalled, TransportUnusable
from rfork.fork.deadline import Deadline
from rfork.fork.feed import Feed
from rfork.image.memory import Image
from rfork.peer.base import Dial, Peer
from rfork.peer.memory import MemoryPeer
from rfork.seed.seed import Identity, Seed
from rfork.transport.base import Endpoint, Gate, Talk, TokenSource, silent
from rfork.transport.memory import Faults, MemoryExporter, MemoryNetwork, MemoryReader, MemoryTransport
from tests.unit.fork.feeds import ALL, Heard
from tests.unit.fork.fleet import (
    CHUNKS,
    NEVER_S,
    SECRET,
    Fleet,
    Script,
    Target,
    image,
    plan,
    route,
    settings,
)


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
        until = feed._connecting_until
        stalls = [feed.check(until + later, starved=True) is not None for later in (0.5, 9.5, 10.5)]
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
