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
from rfork.receiver.events import ReadChunk
from rfork.receiver.report import ForkTimer
from rfork.receiver.sources import ForkContext, PeerSource
from rfork.source.seed import InstanceIdentity, Seed
from rfork.testing import transport
from rfork.testing.peers import InMemoryPeer
from rfork.testing.transport import InMemoryTransport
from rfork.transport.base import TokenSource
from tests.unit.receiver.event_recorder import ALL, EventRecorder
from tests.unit.receiver.fleet import (
    NEVER_S,
    SECRET,
    Fleet,
    image,
    lease,
    route,
    settings,
)

CONNECTION = 7


def build_peer_source(
    fleet: Fleet,
    seed: Seed,
    recorder: EventRecorder,
    *,
    dial: Dial | None = None,
    stall_s: float = NEVER_S,
) -> PeerSource:
    return PeerSource(
        route(seed, ALL),
        CONNECTION,
        recorder,
        ForkContext(
            image(),
            {"memory": InMemoryTransport(fleet.network)},
            dial or fleet.peers.dial,
            settings(source_idle_timeout_s=stall_s),
            ForkTimer(NEVER_S),
        ),
    )


def test_the_manifest_precedes_the_first_offer(fleet: Fleet) -> None:
    """A seed sends its manifest once, then offers all its chunks over the transport that both sides have."""
    seed, recorder = fleet.source("a", image(1)), EventRecorder()
    peer_source = build_peer_source(fleet, seed, recorder)
    peer_source.thread.start()
    assert recorder.offered.wait(NEVER_S)
    assert ["memory"] == recorder.transports
    assert [seed.manifest] == recorder.manifests
    assert [(ALL,)] == recorder.offers
    peer_source.close()
    peer_source.thread.join()
    assert [] == recorder.failures


def test_a_source_closed_while_it_dials_ends(fleet: Fleet) -> None:
    """A close before the connection exists is remembered: no channel is opened."""
    seed, recorder = fleet.source("a", image(1)), EventRecorder()
    dial_started, proceed = threading.Event(), threading.Event()

    def dial(address: str, token: TokenSource) -> Peer:
        dial_started.set()
        proceed.wait(NEVER_S)
        return fleet.peers.dial(address, token)

    peer_source = build_peer_source(fleet, seed, recorder, dial=dial)
    peer_source.thread.start()
    dial_started.wait(NEVER_S)
    peer_source.close()
    proceed.set()
    peer_source.thread.join()
    assert [] == recorder.offers
    assert [] == recorder.failures
    assert () == seed.report().readers


def test_a_source_without_a_channel_rejects_reads(fleet: Fleet) -> None:
    """The error states that the source is unavailable."""
    peer_source = build_peer_source(fleet, fleet.source("a", image(1)), EventRecorder())
    with pytest.raises(SourceUnavailable):
        peer_source.read(ReadChunk(CONNECTION, 0, time.monotonic() + NEVER_S))


def test_an_exception_of_a_transport_is_a_failure_of_the_source(fleet: Fleet) -> None:
    """It is an event, and not lost on a thread."""

    def dial(address: str, token: TokenSource) -> Peer:
        raise ZeroDivisionError("a bug")

    recorder = EventRecorder()
    peer_source = build_peer_source(fleet, fleet.source("a", image(1)), recorder, dial=dial)
    peer_source.thread.start()
    peer_source.thread.join()
    assert ["TargetError"] == [error.kind for error in recorder.failures]
    assert "ZeroDivisionError: a bug" in str(recorder.failures[0])


def test_a_source_that_closes_the_channel_has_ended(fleet: Fleet) -> None:
    """The end of the progress stream is the end of the source."""
    source_image = image(1)
    seed, recorder = (
        fleet.source("a", source_image, chunk_state=ChunkState(source_image.layout.chunks, [0])),
        EventRecorder(),
    )
    peer_source = build_peer_source(fleet, seed, recorder)
    peer_source.thread.start()
    recorder.offered.wait(NEVER_S)
    channels = seed._served.leases._channels
    seed.close_channel(next(iter(channels)))
    peer_source.thread.join()
    assert ["SourceUnavailable"] == [error.kind for error in recorder.failures]


def test_a_waiting_reader_presents_its_renewed_lease(fleet: Fleet) -> None:
    """A reader that waits for a slow relay and reads nothing sends the renewed lease to keep its slot."""
    source_image, recorder = image(1), EventRecorder()
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
        CONNECTION,
        recorder,
        ForkContext(
            image(),
            {"memory": InMemoryTransport(fleet.network)},
            lambda address, token: RenewingPeer(fleet.peers, address, token),
            settings(source_idle_timeout_s=0.4),
            ForkTimer(NEVER_S),
        ),
    )
    peer_source.thread.start()
    peer_source.renew(newer)
    assert renewed.wait(NEVER_S)
    peer_source.close()
    peer_source.thread.join()
    assert [] == recorder.failures


def test_a_source_reports_its_activity(fleet: Fleet) -> None:
    """The time of its last message, and that of its last offer."""
    recorder = EventRecorder()
    peer_source = build_peer_source(fleet, fleet.source("a", image(1)), recorder)
    peer_source.thread.start()
    assert recorder.offered.wait(NEVER_S)
    activity = peer_source.activity(time.monotonic())
    assert activity.message_at >= activity.progress_at
    assert 0.0 == activity.connecting_until
    assert None is activity.storage_at
    peer_source.close()
    peer_source.thread.join()


def test_a_reader_obeys_the_rate_limit_of_its_source(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source does not throttle by itself; at one byte per second, the reader gets one slice and then
    waits.
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
        recorder = EventRecorder()
        peer_source = build_peer_source(fleet, seed, recorder)
        peer_source.thread.start()
        assert recorder.offered.wait(NEVER_S)
        clock_reads = count()  # one second passes with each reading of the clock
        monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=lambda: next(clock_reads)))
        peer_source.read(ReadChunk(CONNECTION, 0, 3.0))
        with pytest.raises(SourceTimeout, match="throttled"):
            peer_source.read(ReadChunk(CONNECTION, 1, 3.0))
        peer_source.close()
        peer_source.thread.join()
