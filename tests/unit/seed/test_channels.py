"""Channels: a way in for as long as a lease lasts, and not a moment longer than it takes to notice."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from rfork.control.lease import LeaseClaims, sign
from rfork.errors import SourceBusy, SourceChanged
from rfork.seed.channels import Channels
from rfork.seed.leases import LeaseBook
from rfork.transport.base import Endpoint, Plain

KEY = b"k" * 32
CLAIMS = LeaseClaims("fork-1", "seed-1", "0" * 32, None, 0, 1030.0)


class Door(Plain):
    """An exporter that notes who is in; `full`: it lets nobody in; nobody gets out until it `opens`."""

    def __init__(self) -> None:
        self.inside: dict[str, str] = {}
        self.full = False
        self.opens = threading.Event()
        self.opens.set()
        self.left = threading.Event()
        self.breaks_for: str | None = None
        self.registered = True

    def endpoint(self) -> Endpoint:
        if not self.registered:
            raise SourceBusy("not ready")
        return Endpoint("door", {})

    def let_in(self, channel_id: str, address: str) -> None:
        if self.full:
            raise SourceBusy("full")
        self.inside[channel_id] = address

    def let_out(self, channel_id: str) -> None:
        assert self.opens.wait(60)
        if channel_id == self.breaks_for:
            raise ValueError("a bug")
        self.inside.pop(channel_id, None)
        self.left.set()

    def close(self) -> None:
        return


class Scene:
    def __init__(self) -> None:
        self.now = 1000.0
        self.door = Door()
        self.swept = threading.Event()
        self.leases = LeaseBook("seed-1", 2, layout_id=CLAIMS.layout_id, clock=lambda: self.now)
        self.leases.learn_keys([KEY])
        self.channels = Channels(self.leases, {"door": self.door}, self.swept.set)

    def open(self, fork_id: str = "fork-1", address: str = "10.0.0.1") -> str:
        self.leases.check(sign(replace(CLAIMS, fork_id=fork_id), KEY), 0, None)
        return self.channels.open(fork_id, "door", address)[0]


def test_a_reader_is_in_from_open_to_close() -> None:
    """The exporter is told the reader's address and channel, and when it is over."""
    scene = Scene()
    channel = scene.open()
    inside = dict(scene.door.inside)
    scene.channels.start()
    scene.channels.close(channel)
    scene.channels.close(channel)
    scene.door.left.wait(60)
    scene.channels.stop()
    assert ({channel: "10.0.0.1"}, {}, ()) == (inside, scene.door.inside, scene.leases.readers)


def test_whoever_closes_a_channel_does_not_wait_for_the_way_in() -> None:
    """The place is free at once; to cut the reader off takes longer than an event loop may wait."""
    scene = Scene()
    scene.door.opens.clear()
    scene.channels.start()
    channel = scene.open()
    scene.channels.close(channel)
    readers, inside = scene.leases.readers, dict(scene.door.inside)
    scene.door.opens.set()
    scene.door.left.wait(60)
    scene.channels.stop()
    assert ((), {channel: "10.0.0.1"}, {}) == (readers, inside, scene.door.inside)


def test_all_are_out_at_once() -> None:
    """Once it returns no channel is left, and no way in."""
    scene = Scene()
    scene.open()
    scene.open("fork-2", "10.0.0.2")
    ended = [scene.channels.end_all(), scene.channels.end_all()]
    assert ([True, False], {}, ()) == (ended, scene.door.inside, scene.leases.readers)


def test_one_that_cannot_be_cut_off_holds_up_no_other() -> None:
    """Whatever goes wrong there, the next one is let out, and who had it done does not hear of it."""
    scene = Scene()
    scene.door.breaks_for = scene.open()
    scene.open("fork-2", "10.0.0.2")
    scene.channels.end_all()
    assert [scene.door.breaks_for] == list(scene.door.inside)


def test_sweeping_goes_on_whatever_happens() -> None:
    """Whoever is told raises: leases that end later end their channels all the same."""
    scene = Scene()
    told, again = threading.Event(), threading.Event()

    def ended() -> None:
        (again if told.is_set() else told).set()
        raise ValueError("a bug")

    channels = Channels(scene.leases, {"door": scene.door}, ended)
    scene.channels = channels
    scene.open()
    channels.start()
    scene.now = 1030.0
    first = told.wait(60)
    scene.leases.check(sign(replace(CLAIMS, fork_id="fork-2", expires_at=1060.0), KEY), 0, None)
    channels.open("fork-2", "door", "10.0.0.2")
    scene.now = 1060.0
    second = again.wait(60)
    channels.stop()
    assert (True, True, {}) == (first, second, scene.door.inside)


def test_readers_are_counted_by_transport() -> None:
    """Forks, not channels."""
    scene = Scene()
    for fork_id in ("fork-1", "fork-1", "fork-2"):
        scene.open(fork_id)
    assert (2, 0) == (scene.channels.readers_on({"door"}), scene.channels.readers_on({"carrier pigeon"}))


def test_an_expired_reader_is_let_out_though_nobody_asks() -> None:
    """A lease that ends ends the way in, and whoever waits for changes hears of it."""
    scene = Scene()
    scene.open()
    scene.channels.start()
    scene.now = 1030.0
    heard = scene.swept.wait(60)
    scene.channels.stop()
    assert (True, {}) == (heard, scene.door.inside)


def test_an_expired_reader_is_let_out_though_somebody_asked_before() -> None:
    """Whoever counts the readers drops those whose lease ended, and they are let out all the same."""
    scene = Scene()
    scene.open()
    scene.now = 1030.0
    readers = scene.leases.readers
    scene.channels.start()
    scene.swept.wait(60)
    scene.channels.stop()
    assert ((), {}) == (readers, scene.door.inside)


def test_who_cannot_be_let_in_gets_no_place() -> None:
    """An exporter that refuses a reader leaves its place to others."""
    scene = Scene()
    scene.door.full = True
    with pytest.raises(SourceBusy, match="full"):
        scene.open()
    assert () == scene.leases.readers


def test_who_cannot_be_told_where_to_read_gets_no_place() -> None:
    """An exporter that has no endpoint to give leaves the place to others, and the reader out."""
    scene = Scene()
    scene.door.registered = False
    with pytest.raises(SourceBusy, match="not ready"):
        scene.open()
    scene.channels.end_all()
    assert ((), {}) == (scene.leases.readers, scene.door.inside)


def test_a_transport_that_is_not_exported() -> None:
    """Who asks for one is told which there are."""
    scene = Scene()
    with pytest.raises(SourceChanged, match="door"):
        scene.channels.open("fork-1", "carrier pigeon", "10.0.0.1")
