"""Channels: a reader keeps access while its lease is valid, and loses it soon after the lease expires."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from rfork.errors import SourceBusy, SourceWeightsChanged
from rfork.planner_client.lease import LeaseClaims, sign
from rfork.source.channels import ChannelTable, ServingSpans
from rfork.source.egress_limiter import EgressLimiter
from rfork.tracing import NOOP_TRACER
from rfork.transport.base import Endpoint, StatelessExporter
from tests.unit.source.lease_tables import TimedLeases

KEY = b"k" * 32
CLAIMS = LeaseClaims("fork-1", "seed-1", "0" * 32, None, 0, 1030.0)


class FakeExporter(StatelessExporter):
    """Records the authorized readers. Rejects readers while `full`, and revokes none until `may_revoke` is
    set.
    """

    def __init__(self) -> None:
        self.authorized: dict[str, str] = {}
        self.full = False
        self.may_revoke = threading.Event()
        self.may_revoke.set()
        self.revoked = threading.Event()
        self.fails_for: str | None = None
        self.registered = True

    def endpoint(self) -> Endpoint:
        if not self.registered:
            raise SourceBusy("not ready")
        return Endpoint("fake", {})

    def authorize_peer(self, channel_id: str, address: str) -> None:
        if self.full:
            raise SourceBusy("full")
        self.authorized[channel_id] = address

    def revoke_peer(self, channel_id: str) -> None:
        assert self.may_revoke.wait(60)
        if channel_id == self.fails_for:
            raise ValueError("a bug")
        self.authorized.pop(channel_id, None)
        self.revoked.set()

    def close(self) -> None:
        return


class ChannelHarness:
    def __init__(self) -> None:
        self.now = 1000.0
        self.exporter = FakeExporter()
        self.swept = threading.Event()
        self.leases = TimedLeases(2, CLAIMS.layout_id, lambda: self.now)
        self.leases.set_keys([KEY])
        self.channels = self.table(self.swept.set)

    def table(self, on_expired: Callable[[], None]) -> ChannelTable:
        return ChannelTable(
            self.leases.leases,
            threading.RLock(),
            lambda: self.now,
            {"fake": self.exporter},
            ServingSpans(NOOP_TRACER, EgressLimiter(None), "seed-1"),
            on_expired,
        )

    def open(self, fork_id: str = "fork-1", address: str = "10.0.0.1") -> str:
        self.leases.check(sign(CLAIMS._replace(fork_id=fork_id), KEY), 0, None)
        return self.channels.open(fork_id, "fake", address)[0]


def test_a_reader_is_authorized_from_open_to_close() -> None:
    """The exporter authorizes the reader's address and channel, and revokes them when the channel closes."""
    harness = ChannelHarness()
    channel = harness.open()
    authorized = dict(harness.exporter.authorized)
    harness.channels.start()
    harness.channels.close(channel)
    harness.channels.close(channel)
    harness.exporter.revoked.wait(60)
    harness.channels.stop()
    assert {channel: "10.0.0.1"} == authorized
    assert {} == harness.exporter.authorized
    assert () == harness.leases.readers


def test_closing_a_channel_does_not_wait_for_the_revocation() -> None:
    """The reader slot is free immediately; revoking access may take longer than an event loop can wait."""
    harness = ChannelHarness()
    harness.exporter.may_revoke.clear()
    harness.channels.start()
    channel = harness.open()
    harness.channels.close(channel)
    readers, authorized = harness.leases.readers, dict(harness.exporter.authorized)
    harness.exporter.may_revoke.set()
    harness.exporter.revoked.wait(60)
    harness.channels.stop()
    assert () == readers
    assert {channel: "10.0.0.1"} == authorized
    assert {} == harness.exporter.authorized


def test_close_all_revokes_every_reader() -> None:
    """When it returns, no channel is open and no reader is authorized."""
    harness = ChannelHarness()
    harness.open()
    harness.open("fork-2", "10.0.0.2")
    assert harness.channels.close_all()
    assert not harness.channels.close_all()
    assert {} == harness.exporter.authorized
    assert () == harness.leases.readers


def test_a_failed_revocation_does_not_affect_other_channels() -> None:
    """The error is not raised to the caller, and the next channel is still revoked."""
    harness = ChannelHarness()
    harness.exporter.fails_for = harness.open()
    harness.open("fork-2", "10.0.0.2")
    harness.channels.close_all()
    assert [harness.exporter.fails_for] == list(harness.exporter.authorized)


def test_sweeping_continues_after_a_callback_error() -> None:
    """If the callback raises, leases that expire later still close their channels."""
    harness = ChannelHarness()
    first_call, second_call = threading.Event(), threading.Event()

    def on_expired() -> None:
        (second_call if first_call.is_set() else first_call).set()
        raise ValueError("a bug")

    channels = harness.table(on_expired)
    harness.channels = channels
    harness.open()
    channels.start()
    harness.now = 1030.0
    first = first_call.wait(60)
    harness.leases.check(sign(CLAIMS._replace(fork_id="fork-2", expires_at=1060.0), KEY), 0, None)
    channels.open("fork-2", "fake", "10.0.0.2")
    harness.now = 1060.0
    second = second_call.wait(60)
    channels.stop()
    assert first
    assert second
    assert {} == harness.exporter.authorized


def test_readers_are_counted_by_transport() -> None:
    """Readers are counted by fork, not by channel."""
    harness = ChannelHarness()
    for fork_id in ("fork-1", "fork-1", "fork-2"):
        harness.open(fork_id)
    assert 2 == harness.channels.reader_count({"fake"})
    assert 0 == harness.channels.reader_count({"unknown"})


def test_an_expired_reader_is_revoked_automatically() -> None:
    """An expired lease revokes access, and the callback is called."""
    harness = ChannelHarness()
    harness.open()
    harness.channels.start()
    harness.now = 1030.0
    was_swept = harness.swept.wait(60)
    harness.channels.stop()
    assert was_swept
    assert {} == harness.exporter.authorized


def test_an_expired_reader_is_revoked_after_readers_were_counted() -> None:
    """Counting the readers removes the expired ones; their access is revoked nevertheless."""
    harness = ChannelHarness()
    harness.open()
    harness.now = 1030.0
    readers = harness.leases.readers
    harness.channels.start()
    harness.swept.wait(60)
    harness.channels.stop()
    assert () == readers
    assert {} == harness.exporter.authorized


def test_a_rejected_reader_occupies_no_slot() -> None:
    """If the exporter rejects a reader, its slot stays free."""
    harness = ChannelHarness()
    harness.exporter.full = True
    with pytest.raises(SourceBusy, match="full"):
        harness.open()
    assert () == harness.leases.readers


def test_a_reader_without_an_endpoint_occupies_no_slot() -> None:
    """If the exporter has no endpoint yet, the slot stays free and the reader is not authorized."""
    harness = ChannelHarness()
    harness.exporter.registered = False
    with pytest.raises(SourceBusy, match="not ready"):
        harness.open()
    harness.channels.close_all()
    assert () == harness.leases.readers
    assert {} == harness.exporter.authorized


def test_an_unknown_transport_is_rejected() -> None:
    """The error lists the transports that the source offers."""
    harness = ChannelHarness()
    with pytest.raises(SourceWeightsChanged, match="fake"):
        harness.channels.open("fork-1", "unknown", "10.0.0.1")
