"""Channels: a way in for as long as a lease lasts, and not a moment longer than it takes to notice."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from rfork.errors import SourceBusy, SourceWeightsChanged
from rfork.planner_client.lease import LeaseClaims, sign
from rfork.source.channels import ChannelTable
from rfork.source.leases import LeaseVerifier
from rfork.transport.base import Endpoint, StatelessExporter

KEY = b"k" * 32
CLAIMS = LeaseClaims("fork-1", "seed-1", "0" * 32, None, 0, 1030.0)


class FakeExporter(StatelessExporter):
    """An exporter that notes who is in; `full`: it lets nobody in; nobody gets out until it `may_revoke`."""

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
        return Endpoint("door", {})

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
        self.leases = LeaseVerifier("seed-1", 2, layout_id=CLAIMS.layout_id, clock=lambda: self.now)
        self.leases.set_keys([KEY])
        self.channels = ChannelTable(self.leases, {"door": self.exporter}, self.swept.set)

    def open(self, fork_id: str = "fork-1", address: str = "10.0.0.1") -> str:
        self.leases.check(sign(replace(CLAIMS, fork_id=fork_id), KEY), 0, None)
        return self.channels.open(fork_id, "door", address)[0]


def test_a_reader_is_in_from_open_to_close() -> None:
    """The exporter is told the reader's address and channel, and when it is over."""
    harness = ChannelHarness()
    channel = harness.open()
    authorized = dict(harness.exporter.authorized)
    harness.channels.start()
    harness.channels.close(channel)
    harness.channels.close(channel)
    harness.exporter.revoked.wait(60)
    harness.channels.stop()
    assert ({channel: "10.0.0.1"}, {}, ()) == (
        authorized,
        harness.exporter.authorized,
        harness.leases.readers,
    )


def test_whoever_closes_a_channel_does_not_wait_for_the_way_in() -> None:
    """The place is free at once; to cut the reader off takes longer than an event loop may wait."""
    harness = ChannelHarness()
    harness.exporter.may_revoke.clear()
    harness.channels.start()
    channel = harness.open()
    harness.channels.close(channel)
    readers, authorized = harness.leases.readers, dict(harness.exporter.authorized)
    harness.exporter.may_revoke.set()
    harness.exporter.revoked.wait(60)
    harness.channels.stop()
    assert ((), {channel: "10.0.0.1"}, {}) == (readers, authorized, harness.exporter.authorized)


def test_all_are_out_at_once() -> None:
    """Once it returns no channel is left, and no way in."""
    harness = ChannelHarness()
    harness.open()
    harness.open("fork-2", "10.0.0.2")
    closed = [harness.channels.close_all(), harness.channels.close_all()]
    assert ([True, False], {}, ()) == (closed, harness.exporter.authorized, harness.leases.readers)


def test_one_that_cannot_be_cut_off_holds_up_no_other() -> None:
    """Whatever goes wrong there, the next one is let out, and who had it done does not hear of it."""
    harness = ChannelHarness()
    harness.exporter.fails_for = harness.open()
    harness.open("fork-2", "10.0.0.2")
    harness.channels.close_all()
    assert [harness.exporter.fails_for] == list(harness.exporter.authorized)


def test_sweeping_goes_on_whatever_happens() -> None:
    """Whoever is told raises: leases that end later end their channels all the same."""
    harness = ChannelHarness()
    first_call, second_call = threading.Event(), threading.Event()

    def on_expired() -> None:
        (second_call if first_call.is_set() else first_call).set()
        raise ValueError("a bug")

    channels = ChannelTable(harness.leases, {"door": harness.exporter}, on_expired)
    harness.channels = channels
    harness.open()
    channels.start()
    harness.now = 1030.0
    first = first_call.wait(60)
    harness.leases.check(sign(replace(CLAIMS, fork_id="fork-2", expires_at=1060.0), KEY), 0, None)
    channels.open("fork-2", "door", "10.0.0.2")
    harness.now = 1060.0
    second = second_call.wait(60)
    channels.stop()
    assert (True, True, {}) == (first, second, harness.exporter.authorized)


def test_readers_are_counted_by_transport() -> None:
    """Forks, not channels."""
    harness = ChannelHarness()
    for fork_id in ("fork-1", "fork-1", "fork-2"):
        harness.open(fork_id)
    assert (2, 0) == (
        harness.channels.reader_count({"door"}),
        harness.channels.reader_count({"carrier pigeon"}),
    )


def test_an_expired_reader_is_let_out_though_nobody_asks() -> None:
    """A lease that ends ends the way in, and whoever waits for changes hears of it."""
    harness = ChannelHarness()
    harness.open()
    harness.channels.start()
    harness.now = 1030.0
    was_swept = harness.swept.wait(60)
    harness.channels.stop()
    assert (True, {}) == (was_swept, harness.exporter.authorized)


def test_an_expired_reader_is_let_out_though_somebody_asked_before() -> None:
    """Whoever counts the readers drops those whose lease ended, and they are let out all the same."""
    harness = ChannelHarness()
    harness.open()
    harness.now = 1030.0
    readers = harness.leases.readers
    harness.channels.start()
    harness.swept.wait(60)
    harness.channels.stop()
    assert ((), {}) == (readers, harness.exporter.authorized)


def test_who_cannot_be_let_in_gets_no_place() -> None:
    """An exporter that refuses a reader leaves its place to others."""
    harness = ChannelHarness()
    harness.exporter.full = True
    with pytest.raises(SourceBusy, match="full"):
        harness.open()
    assert () == harness.leases.readers


def test_who_cannot_be_told_where_to_read_gets_no_place() -> None:
    """An exporter that has no endpoint to give leaves the place to others, and the reader out."""
    harness = ChannelHarness()
    harness.exporter.registered = False
    with pytest.raises(SourceBusy, match="not ready"):
        harness.open()
    harness.channels.close_all()
    assert ((), {}) == (harness.leases.readers, harness.exporter.authorized)


def test_a_transport_that_is_not_exported() -> None:
    """Who asks for one is told which there are."""
    harness = ChannelHarness()
    with pytest.raises(SourceWeightsChanged, match="door"):
        harness.channels.open("fork-1", "carrier pigeon", "10.0.0.1")
