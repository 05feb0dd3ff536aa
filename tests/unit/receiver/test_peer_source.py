"""PeerSource: one source as seen by the target."""

from __future__ import annotations

import threading
import time
from itertools import count
from types import SimpleNamespace

import pytest

from rfork.errors import SourceTimeout, SourceUnavailable
from rfork.image.chunk_state import ChunkState
from rfork.peer.base import Dial, Peer
from rfork.planner_client.lease import derive_key
from rfork.receiver.deadline import Deadline
from rfork.receiver.peer_source import PeerSource
from rfork.source.seed import InstanceIdentity, Seed
from rfork.testing import transport
from rfork.testing.peers import InMemoryPeer
from rfork.testing.transport import InMemoryTransport
from rfork.transport.base import TokenSource
from tests.unit.receiver.fleet import (
    NEVER_S,
    SECRET,
    Fleet,
    image,
    lease,
    route,
    settings,
)
from tests.unit.receiver.recording_listener import ALL, RecordingListener


def build_peer_source(
    fleet: Fleet,
    seed: Seed,
    listener: RecordingListener,
    *,
    dial: Dial | None = None,
    stall_s: float = NEVER_S,
) -> PeerSource:
    return PeerSource(
        route(seed, ALL),
        image(),
        {"memory": InMemoryTransport(fleet.network)},
        dial or fleet.peers.dial,
        settings(source_idle_timeout_s=stall_s),
        listener,
        Deadline(time.monotonic() + NEVER_S),
    )


def test_the_manifest_precedes_the_first_offer(fleet: Fleet) -> None:
    """A seed sends its manifest once, then offers all its chunks over the transport that both sides have."""
    seed, listener = fleet.source("a", image(1)), RecordingListener()
    peer_source = build_peer_source(fleet, seed, listener)
    peer_source.start()
    assert listener.offered.wait(NEVER_S)
    assert [seed.manifest] == listener.manifests
    assert [(ALL,)] == listener.offers
    assert "memory" == peer_source.transport
    peer_source.close()
    peer_source.join()
    assert [] == listener.failures


def test_a_source_closed_while_it_dials_ends(fleet: Fleet) -> None:
    """A close before the connection exists is remembered: no channel is opened."""
    seed, listener = fleet.source("a", image(1)), RecordingListener()
    dial_started, proceed = threading.Event(), threading.Event()

    def dial(address: str, token: TokenSource) -> Peer:
        dial_started.set()
        proceed.wait(NEVER_S)
        return fleet.peers.dial(address, token)

    peer_source = build_peer_source(fleet, seed, listener, dial=dial)
    peer_source.start()
    dial_started.wait(NEVER_S)
    peer_source.close()
    proceed.set()
    peer_source.join()
    assert [] == listener.offers
    assert [] == listener.failures
    assert () == seed.report().readers


def test_a_source_without_a_channel_rejects_reads(fleet: Fleet) -> None:
    """The error states that the source is unavailable."""
    peer_source = build_peer_source(fleet, fleet.source("a", image(1)), RecordingListener())
    with pytest.raises(SourceUnavailable):
        peer_source.read(0, 1, time.monotonic() + NEVER_S)


def test_an_exception_of_a_transport_is_a_failure_of_the_source(fleet: Fleet) -> None:
    """It is reported to the listener and not lost on a thread."""

    def dial(address: str, token: TokenSource) -> Peer:
        raise ZeroDivisionError("a bug")

    listener = RecordingListener()
    peer_source = build_peer_source(fleet, fleet.source("a", image(1)), listener, dial=dial)
    peer_source.start()
    peer_source.join()
    assert ["TargetError"] == [error.kind for error in listener.failures]
    assert "ZeroDivisionError: a bug" in str(listener.failures[0])


def test_a_source_that_closes_the_channel_has_ended(fleet: Fleet) -> None:
    """The end of the progress stream is the end of the source."""
    source_image = image(1)
    seed, listener = (
        fleet.source("a", source_image, chunk_state=ChunkState(source_image.layout.chunks, [0])),
        RecordingListener(),
    )
    peer_source = build_peer_source(fleet, seed, listener)
    peer_source.start()
    listener.offered.wait(NEVER_S)
    channels = seed._leases._channels
    seed.close_channel(next(iter(channels)))
    peer_source.join()
    assert ["SourceUnavailable"] == [error.kind for error in listener.failures]


def test_a_waiting_reader_presents_its_renewed_lease(fleet: Fleet) -> None:
    """A reader that waits for a slow relay and reads nothing sends the renewed lease to keep its slot."""
    source_image, listener = image(1), RecordingListener()
    relay = fleet.source(
        "a", source_image, chunk_state=ChunkState(source_image.layout.chunks), manifest=source_image.manifest()
    )
    # The source requests the next lease soon, and the reader keeps its slot however late it arrives.
    first = lease(relay).model_copy(update={"expires_in_s": 0.3})
    newer, renewed = lease(relay, ttl_s=NEVER_S + 1), threading.Event()

    class RenewingPeer(InMemoryPeer):
        def renew(self, deadline: float) -> None:
            super().renew(deadline)
            renewed.set()

    peer_source = PeerSource(
        route(relay, ALL).model_copy(update={"lease": first}),
        image(),
        {"memory": InMemoryTransport(fleet.network)},
        lambda address, token: RenewingPeer(fleet.peers, address, token),
        settings(source_idle_timeout_s=0.4),
        listener,
        Deadline(time.monotonic() + NEVER_S),
    )
    peer_source.start()
    peer_source.renew(newer)
    assert renewed.wait(NEVER_S)
    peer_source.close()
    peer_source.join()
    assert [] == listener.failures


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
def test_a_silent_or_starved_source_is_stalled(
    fleet: Fleet, silent_s: float, idle_s: float, starved: bool, expected: str | None
) -> None:
    """It is stalled after `source_idle_timeout_s` (10 s) in silence, or after 30 s without a readable chunk."""
    peer_source = build_peer_source(fleet, fleet.source("a", image(1)), RecordingListener(), stall_s=10.0)
    peer_source.last_message_at, peer_source.last_progress_at = 100.0 - silent_s, 100.0 - idle_s
    stall = peer_source.check(100.0, starved=starved)
    assert expected == (None if stall is None else str(stall).partition(": ")[2])


def test_a_reader_obeys_the_rate_limit_of_its_source(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """At one byte per second, the reader gets one slice and then waits.

    The source does not throttle by itself.
    """
    fast = fleet.source("a", image(1))
    seed = Seed(
        fast.image,
        InstanceIdentity("model", instance_id="slow"),
        settings(max_egress_bytes_per_s=1),
        [InMemoryTransport(fleet.network, one_sided=True)],
        manifest=fast.manifest,
        serve_peer=fleet.peers.service,
    )
    with seed:
        seed.set_lease_keys([derive_key(SECRET, "slow")])
        listener = RecordingListener()
        peer_source = build_peer_source(fleet, seed, listener)
        peer_source.start()
        assert listener.offered.wait(NEVER_S)
        clock_reads = count()  # one second passes with each reading of the clock
        monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=lambda: next(clock_reads)))
        with pytest.raises(SourceTimeout, match="throttled"):
            peer_source.read(0, 2 << 20, 3.0)
        peer_source.close()
        peer_source.join()
